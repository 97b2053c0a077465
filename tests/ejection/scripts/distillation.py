"""Distil a teacher into a smaller student; alpha and temperature are arguments of a subclass."""

from dataclasses import dataclass, field

import torch
from tiny import Net, rows
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DistillationTrainingArguments(TrainingArguments):
    alpha: float = field(default=0.5)
    temperature: float = field(default=2.0)
    logging_steps: float = 2
    report_to: str = "none"


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher_model=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model
        self.teacher.to(self.args.device)
        self.teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs_student = model(**inputs)
        student_loss = outputs_student["loss"]
        logits_student = outputs_student["logits"]
        with torch.no_grad():
            logits_teacher = self.teacher(**inputs)["logits"]
        loss_fct = nn.KLDivLoss(reduction="batchmean")
        loss_kd = self.args.temperature**2 * loss_fct(
            nn.functional.log_softmax(logits_student / self.args.temperature, dim=-1),
            nn.functional.softmax(logits_teacher / self.args.temperature, dim=-1),
        )
        loss = self.args.alpha * student_loss + (1.0 - self.args.alpha) * loss_kd
        return (loss, outputs_student) if return_outputs else loss


def main():
    (args,) = HfArgumentParser(DistillationTrainingArguments).parse_args_into_dataclasses()
    set_seed(7)
    teacher = Net(size=24)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.5)
    for row in rows(40, seed=9):  # a teacher that has learned something
        loss = teacher(row["x"][None], torch.tensor([row["labels"]]))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = DistillationTrainer(
        model=Net(),
        args=args,
        teacher_model=teacher,
        train_dataset=rows(36),
        eval_dataset=rows(10, seed=1),
    )
    trainer.train()


if __name__ == "__main__":
    main()
