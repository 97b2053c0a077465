"""A mean loss with accumulation, in the style of 4.46, before overrides took `num_items_in_batch`."""

import functools
import os

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels=None, **kwargs):
        return {"logits": self.layer(x)}


class MeanTrainer(Trainer):
    @torch.enable_grad()
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(inputs["x"])
        loss = (outputs["logits"] - inputs["labels"]).abs().mean()
        return (loss, outputs) if return_outputs else loss


rows = [{"x": torch.tensor([n / 8, 1.0]), "labels": torch.tensor([n % 3 / 2])} for n in range(20)]
make = functools.partial(TrainingArguments, no_cuda=True, evaluation_strategy="no", report_to=[])
args = make(
    output_dir=os.environ.get("OUT", "out"),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,  # 20 samples: the last window is short
    num_train_epochs=2,
    learning_rate=0.1,
    logging_steps=1,
    save_safetensors=True,
)
trainer = MeanTrainer(Net(), args, train_dataset=rows, tokenizer=None)
trainer.train()
print("losses", [round(one["loss"], 6) for one in trainer.state.log_history if "loss" in one])
print("done", trainer.state.global_step)
