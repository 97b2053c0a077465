"""A job that may be stopped at any moment, and started again by the same command until it is done.

    hf-compat run --devices 2 preemptible.py --output_dir FOLDER

Shows: a checkpoint when SIGTERM comes, an automatic resume from the newest whole one, and few checkpoints on the disk.
FOLDER may be an object store: `s3://bucket/run`.
`kubernetes.yaml` and `train.sbatch` start it in a cluster.
"""

import argparse
import os

import torch
from sklearn.datasets import load_breast_cancer

from hf_compat import Trainer, TrainingArguments, get_last_checkpoint, set_seed


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
    parser.add_argument("--output_dir", default="trainer_output/preemptible")
    parser.add_argument("--max_steps", type=int, default=60)
    words = parser.parse_args()
    args = TrainingArguments(
        output_dir=words.output_dir,
        max_steps=words.max_steps,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        save_strategy="steps",
        save_steps=20,  # what a kill without a warning may cost
        save_total_limit=2,
        logging_steps=20,
        enable_jit_checkpoint=True,  # SIGTERM: a checkpoint at the end of the update, then exit
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(args.seed)
    trainer = Trainer(Classifier(), args, train_dataset=rows())
    is_begun = os.path.isdir(args.output_dir) and get_last_checkpoint(args.output_dir) is not None
    trainer.train(resume_from_checkpoint=is_begun)
    if trainer.is_world_process_zero():
        print(f"updates: {trainer.state.global_step}, last loss: {trainer.state.log_history[-2]['loss']:.6f}")


if __name__ == "__main__":
    main()
