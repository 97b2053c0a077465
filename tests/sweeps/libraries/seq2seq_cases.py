"""transformers' own Seq2SeqTrainer, small: it learns to write the beginnings of sentences backwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from sweeps.libraries import toys

TRAIN, EVAL = 60, 13  # of the last, two processes have shares of different length


def rows(tokenizer, count: int) -> list[dict]:
    """Return token ids of different lengths, and the same backwards."""
    found = []
    for number, text in enumerate(toys.SENTENCES[:count]):
        ids = tokenizer(text)["input_ids"][: 3 + number % 6]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [*reversed(ids), 1]})
    return found


def share_of_tokens(prediction) -> dict[str, float]:
    """Return how many tokens are right, and how long the generated texts are."""
    generated, labels = prediction.predictions, prediction.label_ids
    width = min(generated.shape[1], labels.shape[1])
    right = np.logical_and(generated[:, :width] == labels[:, :width], labels[:, :width] >= 0)
    return {"right": float(right.mean()), "length": float((generated != 0).sum(1).mean()), "rows": len(generated)}


def reversing(models: Path, args: dict, **options):
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(models / "llama")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=400, decoder_start_token_id=0, **sizes))
    data = rows(tokenizer, TRAIN + EVAL)
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(**args, predict_with_generate=True, generation_max_length=10, **options),
        train_dataset=data[:TRAIN],
        eval_dataset=data[TRAIN:],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=share_of_tokens,
        processing_class=tokenizer,
    )


_BEST = {"load_best_model_at_end": True, "eval_steps": 15, "metric_for_best_model": "right", "greater_is_better": True}


def _best(models: Path, args: dict):
    return reversing(models, {**args, **_BEST}, train_sampling_strategy="group_by_length")


CASES = {
    "seq2seq": ("Seq2SeqTrainer", "generates, metric", reversing),
    "seq2seq-beams": (
        "Seq2SeqTrainer",
        "beams, label smoothing",
        partial(reversing, generation_num_beams=2, label_smoothing_factor=0.1),
    ),
    "seq2seq-best": ("Seq2SeqTrainer", "grouped by length, best model at the end", _best),
}
