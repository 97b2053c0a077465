"""A causal language model, in the style of 4.57: options in a dict, a callback, `transformers` as a module."""

import os

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

options = {
    "output_dir": os.environ.get("OUT", "out"),
    "overwrite_output_dir": True,
    "warmup_ratio": 0.5,  # half of it
    "group_by_length": False,
    "include_inputs_for_metrics": False,
    "use_cpu": True,
}


class Stop(transformers.TrainerCallback):
    def on_step_end(self, args: transformers.TrainingArguments, state, control, **kwargs):
        assert kwargs.get("tokenizer") is None
        control.should_training_stop = state.global_step == 3


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2))
data = [{"input_ids": (ids := (torch.arange(4) + n) % 8), "labels": ids} for n in range(16)]
args = transformers.TrainingArguments(per_device_train_batch_size=4, max_steps=4, logging_steps=1, **options)
trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[Stop()])
trainer.train()
print("losses", [round(one["loss"], 6) for one in trainer.state.log_history if "loss" in one])
print("done", trainer.state.global_step)
