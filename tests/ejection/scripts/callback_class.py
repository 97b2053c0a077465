"""Callbacks given as a class, and as an instance that keeps a count: gradual unfreezing and a stop by training loss."""

import sys

from tiny import Net, rows
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class UnfreezeCallback(TrainerCallback):
    """Train the head alone for an epoch, then everything."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for parameter in model.encoder.parameters():
            parameter.requires_grad_(False)

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if state.epoch >= 1:
            for parameter in model.encoder.parameters():
                parameter.requires_grad_(True)


class StopOnPlateau(TrainerCallback):
    def __init__(self, least=0.001):
        self.least = least
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            if len(self.losses) > 2 and abs(self.losses[-1] - self.losses[-3]) < self.least * args.learning_rate:
                control.should_training_stop = True
        return control


set_seed(2)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "callbacks",
    num_train_epochs=3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    logging_steps=2,
    evaluation_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    Net(dropout=0.0), args, train_dataset=rows(40), eval_dataset=rows(9, seed=3), callbacks=[UnfreezeCallback]
)
stop = StopOnPlateau()
stop.least = 1e-9
trainer.add_callback(stop)
trainer.train()
