# A classifier as scripts of transformers 3.5 were written.
import dataclasses
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Dict, Optional

import numpy as np
import torch
from torch import nn
from transformers import (
    AdamW,
    EvalPrediction,
    EvaluationStrategy,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import is_main_process

logger = logging.getLogger(__name__)


@dataclass
class DataArguments:
    """Which data."""

    samples: int = field(default=24, metadata={"help": "how many"})
    no_cuda: Optional[str] = field(default=None, metadata={"help": "a name of the script's own"})


class Points(torch.utils.data.Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": (self.x[index].sum() > 0).long()}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return (nn.functional.cross_entropy(logits, labels), logits)


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs):
        outputs = model(**inputs)
        loss = outputs[0] * 2
        return loss

    def log(self, logs):
        logs["cpu"] = self.args.no_cuda
        super().log(logs)


def accuracy(p: EvalPrediction) -> Dict:
    return {"acc": (np.argmax(p.predictions, axis=1) == p.label_ids).mean()}


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        data_args, training_args = parser.parse_args_into_dataclasses()
    training_args.no_cuda = True
    training_args.evaluate_during_training = True
    assert data_args.no_cuda is None

    if (
        os.path.exists(training_args.output_dir)
        and os.listdir(training_args.output_dir)
        and training_args.do_train
        and not training_args.overwrite_output_dir
    ):
        raise ValueError(f"Output directory ({training_args.output_dir}) already exists and is not empty.")
    logger.info("main process: %s", is_main_process(training_args.local_rank))
    set_seed(training_args.seed)
    training_args = dataclasses.replace(
        training_args,
        evaluation_strategy=EvaluationStrategy.STEPS,
        per_gpu_train_batch_size=4,  # for each device
        per_gpu_eval_batch_size=None,
        eval_steps=2,
        max_steps=4,
        logging_steps=2,
        fp16_opt_level="O1",
        debug=False,
    )
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=training_args.learning_rate, correct_bias=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    trainer = WeightedTrainer(
        model=model,
        args=training_args,
        train_dataset=Points(data_args.samples),
        eval_dataset=Points(8),
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        optimizers=(optimizer, schedule),
    )
    trainer.train(
        model_path=None,
    )
    if trainer.is_world_master():
        print("eval", sorted(trainer.evaluate()))
    print("done", trainer.state.global_step, training_args.evaluate_during_training)


if __name__ == "__main__":
    main()
