"""Ray Train: the Trainer inside a `TorchTrainer`, with Ray's own callback and `prepare_trainer`, unchanged.

    python ray_train.py --output_dir FOLDER

Shows: two workers train as under torchrun. Ray gets each checkpoint and its metrics. A run whose worker dies goes on
from the checkpoint that was reported last. Needs Ray: `pip install -e '.[ray]'`.
"""

import argparse
import os

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_breast_cancer

from hf_compat import Trainer, TrainingArguments, set_seed


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


def train_on_worker(config: dict) -> None:
    """Train; Ray calls this in each worker, whose place it has put into the environment as torchrun does."""
    args = TrainingArguments(
        output_dir=config["output_dir"],
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        ddp_find_unused_parameters=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(args.seed)
    data = rows()
    trainer = Trainer(Classifier(), args, train_dataset=data[:448], eval_dataset=data[448:])
    trainer.add_callback(RayTrainReportCallback())  # reports at every save
    trainer = prepare_trainer(trainer)
    reported = ray.train.get_checkpoint()  # of the workers before these, where one of them has died
    if reported is None:
        trainer.train()
    else:
        with reported.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/ray_train")
    folder = os.path.abspath(parser.parse_args().output_dir)
    ray.init(num_cpus=2, include_dashboard=False)
    result = TorchTrainer(
        train_on_worker,
        train_loop_config={"output_dir": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray", storage_path=os.path.join(folder, "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    print(f"held out: loss {result.metrics['eval_loss']:.4f}")
    print(f"checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
