"""Draw rare classes more often, and train the head faster than the encoder: overrides of sampler and optimizer."""

import sys

import torch
from tiny import Net, rows
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainingArguments, set_seed


class BalancedTrainer(Trainer):
    def _get_train_sampler(self, *args):
        labels = torch.tensor([row["labels"] for row in self.train_dataset])
        weights = 1.0 / torch.bincount(labels)[labels].double()
        return WeightedRandomSampler(weights, num_samples=len(labels), replacement=True)

    def create_optimizer(self):
        if self.optimizer is None:
            head = [p for name, p in self.model.named_parameters() if name.startswith("head")]
            rest = [p for name, p in self.model.named_parameters() if not name.startswith("head")]
            self.optimizer = torch.optim.AdamW(
                [{"params": rest, "lr": self.args.learning_rate}, {"params": head, "lr": 10 * self.args.learning_rate}],
                lr=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
            )
        return self.optimizer


set_seed(3)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "balanced",
    num_train_epochs=3,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    weight_decay=0.01,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
)
trainer = BalancedTrainer(model=Net(), args=args, train_dataset=rows(40))
trainer.train()
