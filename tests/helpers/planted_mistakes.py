"""Mistakes, each planted in a run that is fine without it: what makes the Trainer, and what is to be found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from helpers import toy
from hf_compat import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

NUMBER_OF_ROWS = 24


@dataclass(frozen=True)
class Planted:
    """A mistake.

    Args:
        check: The check that is to find it.
        words: That stand in the problem, in any order.
        way_out: Words of the way out.
        options: Training arguments that differ.
        parts: Keywords of the Trainer that differ.
        model: Makes the model.
        kind: The Trainer's class.
        severity: How bad it is.
    """

    check: str
    words: tuple
    way_out: str
    options: dict = field(default_factory=dict)
    parts: dict = field(default_factory=dict)
    model: object = toy.Classifier
    kind: type = Trainer
    severity: str = "error"


def fine_options():
    return {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "num_train_epochs": 2, "save_steps": 4, "eval_strategy": "steps",
        "eval_steps": 4, "logging_steps": 2,
    }  # fmt: skip


def fine_parts():
    return {
        "train_dataset": toy.rows(NUMBER_OF_ROWS),
        "eval_dataset": toy.rows(10, seed=1),
        "compute_metrics": accuracy,
    }


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make(planted, folder):
    torch.manual_seed(0)
    is_seq2seq = issubclass(planted.kind, Seq2SeqTrainer)
    args_kind = Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments
    args = args_kind(str(folder / "out"), **fine_options() | planted.options)
    parts = fine_parts() | planted.parts
    return planted.kind(planted.model(), args, **{name: part for name, part in parts.items() if part is not None})


class Broken(toy.Classifier):
    """A classifier whose loss is changed."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, labels=None):
        out = super().forward(x, labels)
        if labels is not None:
            out["loss"] = self.change(out["loss"], out["logits"], self)
        return out


class EvaluatesNot(toy.Classifier):
    def forward(self, x, labels=None):
        if not self.training:
            raise RuntimeError("this model has no mode for evaluations")
        return super().forward(x, labels)


class HalfUsed(toy.Classifier):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class SavesNot(toy.Classifier):
    def state_dict(self, *args, **kwargs):
        raise RuntimeError("weights of this kind cannot be written")


class SavesHalf(toy.Classifier):
    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("norm.")}


def frozen():
    return toy.Classifier().requires_grad_(False)


class Weighted(Trainer):
    """Asks for a column that the forward does not take."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = inputs.pop("sample_weight")
        outputs = model(**inputs)
        loss = (outputs["loss"] * weights).mean()
        return (loss, outputs) if return_outputs else loss


def with_column(name, value, count=NUMBER_OF_ROWS):
    return [{**row, name: value(place)} for place, row in enumerate(toy.rows(count))]


def raising(*args, **kwargs):
    raise ValueError("this metric does not take what it is given")


def bert_rows(count=NUMBER_OF_ROWS, length=6, classes=3, odd=None):
    found = [{"input_ids": [1 + (i + j) % 30 for j in range(length)], "labels": i % classes} for i in range(count)]
    if odd is not None:
        found[odd]["labels"] = classes
    return found


def gpt_rows(count=NUMBER_OF_ROWS, length=8, token=1):
    return [{"input_ids": [token] * length, "labels": [1] * length} for _ in range(count)]


class WithoutPadding:
    """A tokenizer without a padding token, as GPT-2's."""

    def __new__(cls):
        tokenizer = toy.tiny_tokenizer()
        tokenizer.pad_token = None
        return tokenizer


def larger_tokenizer():
    tokenizer = toy.tiny_tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(20)])
    return tokenizer


class LocalData(toy.Table):
    def __init__(self, samples):
        super().__init__(samples)
        self.transform = lambda sample: sample


PLANTED = {
    "wrong metric name": Planted(
        "metric name", ("eval_f1", "eval_accuracy"), "let `compute_metrics` return 'f1'",
        {"metric_for_best_model": "f1"},
    ),
    "metric function fails": Planted(
        "evaluation", ("does not take what it is given", "planted_mistakes.py"), "at that place",
        parts={"compute_metrics": raising}
    ),
    "evaluation fails": Planted("evaluation", ("no mode for evaluations",), "at that place", model=EvaluatesNot),
    "loss is not a number": Planted(
        "update", ("nan",), "look at the batch", model=lambda: Broken(lambda loss, logits, own: loss * float("nan"))
    ),
    "loss without parameters": Planted(
        "update", ("does not require grad",), "without `detach`",
        model=lambda: Broken(lambda loss, logits, own: loss.detach()),
    ),
    "gradients of 0": Planted(
        "update", ("gradients are 0",), "without `detach`",
        model=lambda: Broken(lambda loss, logits, own: loss.detach() + 0 * logits.sum()), severity="warning",
    ),
    "loss of a wrong shape": Planted(
        "update", ("not a scalar",), "take its mean", model=lambda: Broken(lambda loss, logits, own: logits.sum(-1))
    ),
    "parameters without gradient": Planted(
        "update", ("unused.weight", "2 parameters"), "freeze them", model=HalfUsed, severity="note"
    ),
    "everything is frozen": Planted("numbers", ("No parameter",), "requires_grad_(True)", model=frozen),
    "a label in the first batches": Planted(
        "update", ("out of bounds",), "count from 0",
        parts={"train_dataset": [{**row, "labels": 3} for row in toy.rows(NUMBER_OF_ROWS)]},
    ),
    "a label somewhere": Planted(
        "numbers", ("ow 17 of `train_dataset`", "labels=3", "3 classes"), "num_labels",
        parts={"train_dataset": bert_rows(odd=17), "eval_dataset": bert_rows(8)}, model=toy.tiny_bert,
    ),
    "a token too many": Planted(
        "numbers", ("token 40", "0 to 31"), "resize_token_embeddings",
        parts={"train_dataset": gpt_rows(token=40), "eval_dataset": None, "compute_metrics": None},
        options={"eval_strategy": "no"}, model=toy.tiny_gpt2,
    ),
    "a sequence too long": Planted(
        "numbers", ("20 tokens long", "16 positions"), "truncation=True",
        parts={"train_dataset": gpt_rows(length=20), "eval_dataset": None, "compute_metrics": None},
        options={"eval_strategy": "no"}, model=toy.tiny_gpt2,
    ),
    "more tokens than embeddings": Planted(
        "numbers", ("52 tokens", "for 32"), "resize_token_embeddings", severity="warning", model=toy.tiny_bert,
        parts={
            "processing_class": larger_tokenizer, "train_dataset": toy.tokenized(), "eval_dataset": toy.tokenized(8),
        },
    ),
    "no padding token": Planted(
        "training data", ("padding token",), "tokenizer.pad_token", model=toy.tiny_bert,
        parts={"processing_class": WithoutPadding, "train_dataset": toy.tokenized(), "eval_dataset": toy.tokenized(8)},
    ),
    "text that reaches the collator": Planted(
        "training data", ("ValueError",), "'note' (str)", model=toy.tiny_bert,
        parts={
            "processing_class": toy.tiny_tokenizer, "eval_dataset": toy.tokenized(8),
            "train_dataset": [{**row, "note": "some text"} for row in toy.tokenized()],
        }, options={"remove_unused_columns": False},
    ),
    "a column that is removed": Planted(
        "update", ("KeyError", "sample_weight"), "remove_unused_columns=False", kind=Weighted,
        parts={"train_dataset": with_column("sample_weight", lambda place: 0.5)},
    ),
    "samples of different shapes": Planted(
        "training data", ("cannot be joined", "'x'"), "data_collator",
        parts={"train_dataset": with_column("x", lambda place: torch.zeros(8 + place % 2))},
    ),
    "no full batch": Planted(
        "training data", ("no batch",), "at least one full batch",
        options={"dataloader_drop_last": True, "per_device_train_batch_size": 64},
    ),
    "most of the data dropped": Planted(
        "plan", ("leaves 8 of 24",), "smaller", severity="warning",
        options={"dataloader_drop_last": True, "per_device_train_batch_size": 16},
    ),
    "empty training data": Planted("training data", ("is empty",), "filtered", parts={"train_dataset": []}),
    "empty evaluation data": Planted("evaluation", ("is empty",), "filtered", parts={"eval_dataset": []}),
    "no update": Planted("plan", ("0 updates",), "num_train_epochs", options={"num_train_epochs": 0}),
    "a warmup as long as the run": Planted(
        "schedule", ("500 updates", "12"), "warmup_steps", options={"warmup_steps": 500}, severity="warning"
    ),
    "evaluations that never come": Planted(
        "plan", ("eval_steps=400", "12 updates"), "below 12", options={"eval_steps": 400}, severity="note"
    ),
    "disk space": Planted(
        "disk space", ("checkpoints of", "are free"), "save_total_limit",
        options={"max_steps": 10**12, "save_steps": 1},
    ),
    "early stopping without a metric": Planted(
        "followed metric", ("EarlyStoppingCallback", "names none"), "metric_for_best_model",
        parts={"callbacks": [EarlyStoppingCallback]},
    ),
    "what cannot be saved": Planted("save", ("cannot be written",), "", model=SavesNot),
    "what is not saved": Planted(
        "load", ("norm.weight",), "write them", model=SavesHalf, severity="warning"
    ),
    "workers that cannot be sent their data": Planted(
        "workers", ("train_dataset", "spawn"), "top of a module",
        parts={"train_dataset": LocalData(toy.rows(NUMBER_OF_ROWS))},
        options={"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"},
    ),
    "a hub without a token": Planted("hub", ("no token",), "HF_TOKEN"),
    "wandb without a key": Planted("trackers", ("wandb has no key",), "wandb login", options={"report_to": "wandb"}),
}  # fmt: skip


def made(planted, folder):
    """Make the Trainer; parts that are functions are made now, so that every test has its own."""
    lazily = ("processing_class",)
    parts = {name: part() if name in lazily else part for name, part in planted.parts.items()}
    return make(Planted(**{**vars(planted), "parts": parts}), folder)
