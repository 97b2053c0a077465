"""Predict a disease's progress with an optimizer, a schedule and callbacks of one's own."""

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 24), nn.Linear(24, 1)

    def forward(self, x, labels=None):
        prediction = self.outer(nn.functional.gelu(self.inner(x))).squeeze(-1)
        return {"loss": None if labels is None else nn.functional.mse_loss(prediction, labels), "output": prediction}


class FreezeInner(TrainerCallback):
    """Trains the outer layer alone at first."""

    def __init__(self, updates):
        self.updates = updates

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for parameter in model.inner.parameters():
            parameter.requires_grad_(state.global_step >= self.updates)


class EvaluateOften(TrainerCallback):
    """Evaluates and saves at updates of its own choice."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (3, 4, 11):
            control.should_evaluate = control.should_save = True
        return control

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print(f"update {state.global_step}: {metrics['eval_loss']:.3f}")


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="own_optimizer")
options = parser.parse_args()

set_seed(11)
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
rows = [{"x": row * 20, "labels": (value - y.mean()) / y.std()} for row, value in zip(x, y, strict=True)]
model = Regression()
optimizer = torch.optim.RMSprop(
    [{"params": model.inner.parameters(), "lr": 1e-3}, {"params": model.outer.parameters(), "lr": 1e-2}]
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-3, 1e-2], total_steps=25)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output_dir,
        max_steps=20,
        per_device_train_batch_size=24,
        logging_steps=4,
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=rows[:360],
    eval_dataset=rows[360:],
    callbacks=[FreezeInner(5), EvaluateOften],
    optimizers=(optimizer, scheduler),
)
trainer.train()
print(trainer.predict(rows[360:]).predictions[:3])
trainer.save_model()
