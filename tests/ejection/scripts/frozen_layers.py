"""Train some layers at a time, as LISA does: a callback freezes and thaws by random numbers of its own."""

import random
import sys

from tiny import Net, rows
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class LayerCallback(TrainerCallback):
    def __init__(self, model, every):
        self.model, self.every = model, every
        self.draws = random.Random(3)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            thawed = self.draws.choice(["encoder", "head"])
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad = name.startswith(thawed)


set_seed(9)
args = TrainingArguments(
    sys.argv[sys.argv.index("--output_dir") + 1] if "--output_dir" in sys.argv else "layers",
    max_steps=9,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
model = Net()
trainer = Trainer(model=model, args=args, train_dataset=rows(20), callbacks=[LayerCallback(model, every=2)])
trainer.train()
