"""Masked tokens, in the style of 4.57: only what 5.x has taken away is old."""

import os

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType, get_last_checkpoint


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": (ids := torch.arange(4) + n % 8), "labels": ids} for n in range(count)]


class MaskedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None, **extra):
        super().log(logs, start_time)


def train(ratio: float = 0.25) -> None:
    args = TrainingArguments(
        output_dir=os.environ.get("OUT", "out"),
        overwrite_output_dir=True,
        eval_strategy=IntervalStrategy.STEPS,
        lr_scheduler_type=SchedulerType.LINEAR,
        eval_steps=4,
        max_steps=4,
        save_steps=4,
        logging_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        warmup_ratio=ratio,
        group_by_length=False,
        include_tokens_per_second=True,
        save_safetensors=True,
        fsdp_min_num_params=0,
        torchdynamo=None,
        report_to="none",
    )
    config = BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    torch.manual_seed(0)
    trainer = MaskedTrainer(BertForMaskedLM(config), args, train_dataset=data(), eval_dataset=data(4))
    trainer.train()
    assert get_last_checkpoint(args.output_dir) is not None
    print("losses", [round(one["loss"], 6) for one in trainer.state.log_history if "loss" in one])
    print("done", trainer.state.global_step)


if __name__ == "__main__":
    train()
