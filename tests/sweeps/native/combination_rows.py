"""Rows of `native_combinations.py`: which settings there are, how a row is drawn, what it says to each door."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Row = dict[str, object]

# By feature: its values, the first of which is the plain run's.
FEATURES: dict[str, list[object]] = {
    "task": ["rows", "noisy", "stream", "sized_stream", "shuffled_stream", "tagged", "masked", "gpt2", "lora"],
    "accumulation": [1, 2, 3, 20],
    "clip": [1.0, 0.0, 0.05],
    "length": ["2 epochs", "1 epochs", "3 epochs", "5 updates", "17 updates"],
    "length_by": ["trainer", "both"],
    "precision": ["none", "trainer", "both"],
    "schedule": [
        "linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
        "warmup_stable_decay", "reduce_lr_on_plateau", "warmup share",
    ],
    "optimizer": [
        "adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad", "schedule_free_adamw", "adamw with betas",
        "stable_adamw",
    ],
    "arguments": ["none", "label_smoothing", "drop_last", "weight_decay", "eval batch", "data_seed", "sequential",
                  "neftune", "eval_accumulation", "workers"],
    "limit": [None, 3, 0.5],
    "validation": ["epoch", "none", "2 epochs", "3 updates", "4 updates across", 0.5],
    "sets": ["one", "two"],
    "metrics": ["none", "function", "torchmetrics", "torchmetrics class"],
    "stopping": ["none", "lightning", "hf"],
    "checkpoints": ["none", "best", "every 3", "best and last"],
    "logger": ["none", "csv", "tensorboard"],
    "rates": [False, True],
    "spies": [False, True],
    "module": ["none", "hooks", "steps", "optimizers"],
    "resume": ["none", "native", "to trainer", "from trainer", "last"],
    "around": ["none", "validate", "test", "predict", "all"],
    "sanity": [0, 2],
    "inference_mode": [True, False],
    "averages": ["none", "swa", "ema"],
    "second": ["none", "fit again"],
    "bar": [False, True],
    "yaml": [False, True],
}  # fmt: skip
PLAIN: Row = {name: values[0] for name, values in FEATURES.items()}

_OF_TASK = {"stream": 48, "shuffled_stream": 48, "tagged": 40, "masked": 40, "gpt2": 40, "lora": 40}
BATCH_SIZE = 4


def draw(generator: random.Random) -> Row:
    """Return a row of 2 to 5 features whose doors can be compared."""
    while True:
        chosen = generator.sample(sorted(FEATURES), generator.randint(2, 5))
        row = {name: generator.choice(FEATURES[name][1:]) for name in chosen}
        if why_not(row) is None:
            return row


def why_not(row: Row) -> str | None:
    """Say why nothing can be compared; None where it can."""
    full = {**PLAIN, **row}
    rules = {
        "a stream needs a number of updates": is_stream(full) and not str(full["length"]).endswith("updates"),
        "a stream has no share": is_stream(full) and 0.5 in (full["validation"], full["limit"]),
        "a stream has no epoch's end that is known": is_stream(full) and full["accumulation"] == 20,
        "classes are counted for single labels": full["metrics"] in ("torchmetrics", "torchmetrics class")
        and full["task"] not in ("rows", "noisy", "stream", "sized_stream", "shuffled_stream"),
        "a Trainer has no limit, and its schedule would end later": full["limit"] is not None
        and (full["schedule"] != "constant_with_warmup" or str(full["length"]).endswith("updates")),
        "Lightning refuses an interval that is longer than an epoch": full["validation"] == "3 updates"
        and lengths_of(full).epoch < 3,
        "half an update is none": 0.5 in (full["validation"], full["limit"]) and lengths_of(full).whole_epoch < 2,
        "it follows an evaluation": full["validation"] == "none"
        and (full["schedule"] == "reduce_lr_on_plateau" or full["stopping"] != "none" or "best" in
             str(full["checkpoints"])),
        "noise is put on embeddings": full["arguments"] == "neftune" and full["task"] not in ("gpt2", "lora"),
        "streams have no order": is_stream(full) and full["arguments"] in ("data_seed", "sequential", "workers"),
        "a share of a run's end": full["schedule"] == "warmup share" and full["limit"] is not None,
        "averages have a test of their own": full["averages"] != "none" and (
            full["resume"] != "none" or full["stopping"] != "none" or full["schedule"] != "linear"
            or full["optimizer"] == "schedule_free_adamw" or full["second"] != "none"),
        "one ending at a time": full["resume"] != "none" and (full["stopping"] != "none" or full["second"] != "none"),
        "a validation of no batches draws no random number": full["validation"] == "none"
        and full["around"] in ("validate", "all"),
        "a YAML fits, and does not validate before": full["yaml"] and full["around"] in ("validate", "all"),
        "Lightning saves before the evaluation at the end of an epoch": full["accumulation"] == 20
        and full["validation"] != "none" and full["resume"] in ("last", "native", "to trainer"),
        "Lightning saves the last one before the evaluation that averages, and a Trainer after it":
            full["optimizer"] == "schedule_free_adamw" and full["checkpoints"] == "best and last",
        "the best of several sets has one name": full["sets"] == "two" and full["schedule"] == "reduce_lr_on_plateau",
    }  # fmt: skip
    return next((reason for reason, holds in rules.items() if holds), None)


def is_stream(row: Row) -> bool:
    return row["task"] in ("stream", "shuffled_stream")


@dataclass(frozen=True)
class Lengths:
    """How long a row's run is, in updates.

    Attributes:
        whole_epoch: Updates of an epoch of all its data.
        epoch: Those that are trained of it.
        epochs: How many, where they bound the run.
        updates: Of the whole run, unless something stops it.
        moments: The updates after which it is evaluated.
    """

    whole_epoch: int
    epoch: int
    epochs: int | None
    updates: int
    moments: frozenset[int]


def lengths_of(row: Row) -> Lengths:
    samples = _OF_TASK.get(str(row["task"]), 50)
    drops = row["arguments"] == "drop_last" and row["task"] != "sized_stream"  # HF drops nothing of a stream
    batches = samples // BATCH_SIZE if drops else math.ceil(samples / BATCH_SIZE)
    whole = math.ceil(batches / int(row["accumulation"]))
    epoch = whole if row["limit"] is None else _part(row["limit"], whole)
    number, unit = str(row["length"]).split()
    updates = int(number) * (epoch if unit == "epochs" else 1)
    epochs = int(number) if unit == "epochs" else None
    return Lengths(whole, epoch, epochs, updates, frozenset(_moments(row["validation"], epoch, updates)))


def _part(limit: object, whole: int) -> int:
    return min(int(limit), whole) if isinstance(limit, int) else int(whole * float(limit))


def _moments(validation: object, epoch: int, updates: int) -> list[int]:
    done = range(1, updates + 1)
    every = {
        "none": lambda n: False,
        "epoch": lambda n: n % epoch == 0,
        "2 epochs": lambda n: n % (2 * epoch) == 0,
        "3 updates": lambda n: ((n - 1) % epoch + 1) % min(3, epoch) == 0,
        "4 updates across": lambda n: n % 4 == 0,
        0.5: lambda n: ((n - 1) % epoch + 1) % max(1, int(epoch * 0.5)) == 0,
    }[validation]
    return [n for n in done if every(n)]


def shared_arguments(row: Row) -> dict[str, object]:
    """Return what both doors are told by `TrainingArguments`."""
    return {
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": 3,
        "learning_rate": 0.05 if row["optimizer"] != "sgd" else 0.5,
        "seed": 7,
        "use_cpu": True,
        "report_to": "none",
        "gradient_accumulation_steps": row["accumulation"],
        "max_grad_norm": row["clip"],
        **_schedule(row["schedule"]),
        **_optimizer(row["optimizer"]),
        **_arguments(row["arguments"]),
    }


def _schedule(kind: object) -> dict[str, object]:
    more = {
        "linear": {},
        "cosine": {"warmup_steps": 2},
        "constant_with_warmup": {"warmup_steps": 3},
        "polynomial": {"lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}},
        "inverse_sqrt": {"warmup_steps": 2},
        "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
        "warmup_stable_decay": {"warmup_steps": 1, "lr_scheduler_kwargs": {"num_decay_steps": 2}},
        "reduce_lr_on_plateau": {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}},
        "warmup share": {"warmup_steps": 0.3},
    }[str(kind)]
    return {"lr_scheduler_type": "linear" if kind == "warmup share" else kind, **more}


def _optimizer(kind: object) -> dict[str, object]:
    if kind == "adamw with betas":
        return {"optim": "adamw_torch", "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    return {"optim": kind}


def _arguments(kind: object) -> dict[str, object]:
    return {
        "none": {},
        "label_smoothing": {"label_smoothing_factor": 0.2},
        "drop_last": {"dataloader_drop_last": True},
        "weight_decay": {"weight_decay": 0.3},
        "eval batch": {"per_device_eval_batch_size": 5},
        "data_seed": {"data_seed": 5},
        "sequential": {"train_sampling_strategy": "sequential"},
        "neftune": {"neftune_noise_alpha": 4.0},
        "eval_accumulation": {"eval_accumulation_steps": 2},
        "workers": {"dataloader_num_workers": 1},
    }[str(kind)]


def trainer_arguments(row: Row) -> dict[str, object]:
    """Return what our Trainer needs besides: what a Lightning trainer says natively."""
    lengths = lengths_of(row)
    long = {"num_train_epochs": lengths.epochs} if lengths.epochs else {"max_steps": lengths.updates}
    return {
        **long,
        "bf16": row["precision"] != "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": not row["bar"],
        # a callback says when; early stopping asks that something does
        "eval_strategy": "no" if row["validation"] == "none" else "steps",
        **({} if row["validation"] == "none" else {"eval_steps": 10**6}),
        **followed(row),
    }


def followed(row: Row) -> dict[str, object]:
    name = "eval_a_loss" if row["sets"] == "two" else "eval_loss"
    return {"metric_for_best_model": name, "greater_is_better": False}


def native_arguments(row: Row) -> dict[str, object]:
    """Return what an HFModule's arguments say of the trainer's affairs, where both are to say it."""
    lengths = lengths_of(row)
    said: dict[str, object] = {}
    if row["length_by"] == "both":
        said |= {"num_train_epochs": lengths.epochs} if lengths.epochs else {"max_steps": lengths.updates}
    if row["precision"] == "both":
        said["bf16"] = True
    if row["schedule"] == "reduce_lr_on_plateau":
        said["eval_strategy"] = "epoch"  # as the arguments ask; Lightning's trainer says when
    return {**said, **followed(row)}


def lightning_options(row: Row) -> dict[str, object]:
    """Return the settings of a Lightning trainer."""
    lengths = lengths_of(row)
    long = {"max_epochs": lengths.epochs} if lengths.epochs else {"max_epochs": -1, "max_steps": lengths.updates}
    options = {
        "accelerator": "cpu",
        "num_sanity_val_steps": row["sanity"],
        "inference_mode": row["inference_mode"],
        "enable_progress_bar": row["bar"],
        "enable_model_summary": False,
        "enable_checkpointing": row["checkpoints"] != "none" or row["resume"] != "none",
        "log_every_n_steps": 1,
        **long,
        **_validation(row["validation"]),
    }
    if row["limit"] is not None:
        options["limit_train_batches"] = row["limit"]
    if row["precision"] != "none":
        options["precision"] = "bf16-mixed"
    return options


def _validation(kind: object) -> dict[str, object]:
    return {
        "epoch": {},
        "none": {"limit_val_batches": 0},
        "2 epochs": {"check_val_every_n_epoch": 2},
        "3 updates": {"val_check_interval": 3},
        "4 updates across": {"val_check_interval": 4, "check_val_every_n_epoch": None},
        0.5: {"val_check_interval": 0.5},
    }[kind]
