"""Sequence to sequence, in the style of 4.46: generation in evaluations, keywords renamed half-way."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
    set_seed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

try:
    from transformers import EarlyStoppingCallback
except ImportError:
    EarlyStoppingCallback = None

__all__ = ["Arguments", "main", "Seq2SeqTrainer"]


@dataclass
class Arguments(Seq2SeqTrainingArguments):
    evaluation_strategy: str = "steps"
    predict_with_generate: bool = True

    def __post_init__(self):
        if self.evaluation_strategy == "no":
            self.evaluation_strategy = "epoch"
        super().__post_init__()


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.tensor([0, 3 + index % 4, 4, 2])
        return {"input_ids": ids, "attention_mask": torch.ones(4, dtype=torch.long), "labels": ids}


class MyTrainer(Seq2SeqTrainer):
    def log(self, logs: dict[str, float]) -> None:
        logs = {**logs, "tokens": 1.0}
        return super().log(logs)


def describe(args: TrainingArguments | None, state: TrainerState | None = None) -> str:
    match args:
        case None:
            return "none"
        case _ if args.no_cuda:
            return f"{args.evaluation_strategy} on the CPU"
        case _:
            return f"{args.evaluation_strategy}"


async def main(model: PreTrainedModel | None = None, control: TrainerControl | None = None) -> None:
    set_seed(0)

    def make(**overrides):
        return Arguments(
            output_dir=os.environ.get("OUT", "out"),
            **overrides,
            eval_steps=2,
            max_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            generation_max_length=6,
            dispatch_batches=None,
            split_batches=False,
            save_safetensors=True,
            push_to_hub_token=None,
            use_mps_device=False,
        )

    config = BartConfig(
        vocab_size=16, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
    )  # fmt: skip
    if (args := make(no_cuda=True)).no_cuda:
        print(describe(args))
    trainer = MyTrainer(
        model=model or BartForConditionalGeneration(config),
        args=args,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        data_collator=default_data_collator,
        tokenizer=None,
        compute_metrics=lambda prediction: {"generated": float(len(prediction.predictions))},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)] if EarlyStoppingCallback else None,
    )
    trainer.train()
    print("done", trainer.state.global_step, trainer.state.log_history[0]["tokens"])


if __name__ == "__main__":
    asyncio.run(main())
