"""One script, one process or several: data-parallel training (DDP).

    hf-compat run --devices 2 two_processes.py --output_dir FOLDER
    torchrun --nproc_per_node 2 two_processes.py --output_dir FOLDER
    python two_processes.py --output_dir FOLDER

Shows: what a script has to mind with several processes (little: data are prepared once, one process prints), and that
the loss is that of one process with the same global batch.
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torchmetrics.classification import BinaryAccuracy

from hf_compat import Trainer, TrainingArguments, set_seed

GLOBAL_BATCH = 32


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, features, labels):
        logits = self.layers(features).squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float()), logits


def rows() -> list[dict]:
    data = load_breast_cancer()
    features = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    return [{"features": row, "labels": int(label)} for row, label in zip(features, data.target, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/two_processes")
    args = TrainingArguments(
        output_dir=parser.parse_args().output_dir,
        num_train_epochs=4,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        ddp_find_unused_parameters=False,  # each parameter gets a gradient, so nobody has to look for those without
        use_cpu=True,
    )
    args.per_device_train_batch_size = GLOBAL_BATCH // args.world_size
    set_seed(args.seed)
    with args.main_process_first(desc="preparing data"):  # the others then read what the first one has prepared
        data = rows()
    trainer = Trainer(
        model=Classifier(),
        args=args,
        train_dataset=data[:448],
        eval_dataset=data[448:],
        compute_metrics=BinaryAccuracy(),
    )
    trainer.train()
    metrics = trainer.evaluate()  # every process takes part, and gets the metrics of all samples
    trainer.save_model()  # the first process writes
    if trainer.is_world_process_zero():
        losses = [round(log["loss"], 4) for log in trainer.state.log_history if "loss" in log]
        print(f"processes: {args.world_size}, samples an update: {args.train_batch_size * args.world_size}")
        print(f"loss by epoch: {losses}")
        print(f"held out: loss {metrics['eval_loss']:.4f}, accuracy {metrics['eval_BinaryAccuracy']:.3f}")


if __name__ == "__main__":
    main()
