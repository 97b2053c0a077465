"""A trainer of one's own, in the style of 4.19: losses, steps, samplers, checkpoints."""

import functools
import os

import torch
import transformers.trainer_utils as tu
from torch import nn
from torch.utils.data import RandomSampler
from transformers import Trainer as HFTrainer
from transformers import TrainerCallback, TrainingArguments, is_torch_tpu_available
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_pt_utils import LabelSmoother, nested_detach


class Trainer(HFTrainer):
    """The name is ours; the base is transformers'."""

    smoother = LabelSmoother(epsilon=0.0)

    def __init__(self, model, tokenizer=None, weight=1.0, **kwargs):
        super().__init__(model, tokenizer=tokenizer, **kwargs)
        self.weight = weight

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.weight * nn.functional.mse_loss(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs):
        return super().training_step(model, inputs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(
            model,
            inputs,
            prediction_loss_only,
            ignore_keys,
        )
        return (loss, nested_detach(logits), labels)

    def _get_train_sampler(self):
        if self.args.group_by_length:
            return super()._get_train_sampler()
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(3))

    def create_optimizer(self):
        self.optimizer = super().create_optimizer()
        return self.optimizer

    def _save_checkpoint(self, model, trial, metrics=None):
        print("saving", tu.PREFIX_CHECKPOINT_DIR)
        super()._save_checkpoint(model, trial, metrics=metrics)

    def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
        super()._maybe_log_save_evaluate(tr_loss, model, trial, epoch, ignore_keys_for_eval)


class Says(TrainerCallback):
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        print("tokenizer", kwargs["tokenizer"], kwargs.get("tokenizer"), args.evaluation_strategy)


class Regression(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return {"logits": self.layer(x)}


def rows(count):
    x = torch.linspace(-1, 1, count * 3).view(count, 3)
    return [{"x": one, "labels": one.sum(0, keepdim=True)} for one in x]


common = {
    "evaluation_strategy": "steps",
    "no_cuda": True,
    # a tenth
    "warmup_ratio": 0.1,
    "half_precision_backend": "auto",
}
make_args = functools.partial(dict, label_names=["labels"])
args = TrainingArguments(
    output_dir=os.environ.get("OUT", "out"),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_steps=2,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
    remove_unused_columns=False,
    adafactor=False,
    optim="adamw_hf",
    include_inputs_for_metrics=not torch.cuda.is_available(),
    report_to=[],
    **make_args(),
    **common,
)
trainer = Trainer(Regression(), args=args, weight=0.5, train_dataset=rows(12), eval_dataset=rows(4), callbacks=[Says])
trainer.train()
print("tpu", is_torch_tpu_available())
print("losses", [round(one["loss"], 6) for one in trainer.state.log_history if "loss" in one])
print("done", trainer.state.global_step)
