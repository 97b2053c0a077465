"""The features that `combinations.py` draws from: arguments, data, callbacks and overrides of one run.

A feature takes places (`places`): two that want the same one never meet in a row. What a feature does that no
checkpoint can know (an argument that a callback changes in the middle of a run) makes it `volatile`: a resumed run is
then not compared with the uninterrupted one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from helpers import toy
from helpers.parity import cases, model_cases

FEATURES: dict[str, Feature] = {}
Extra = Callable[[object, object], dict]  # api, model → keywords of the Trainer


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One thing that a row may have.

    Args:
        name: What `--features` calls it.
        family: Features of one family stand for one subject, and are drawn as often as one.
        places: What it decides; two features of a row never decide the same.
        args: Training arguments.
        ours: Arguments that only hf_compat gets: what they do must not be seen.
        task: Model and data (`model`, `train`, `eval`), as in `cases.py`.
        extra: Further keywords of the Trainer.
        methods: Overrides of a subclass, each made by a function of the api.
        theirs: Overrides that transformers gets in their place, where a page says why.
        callback: Methods of a callback; `self.trainer` is there.
        tasks: The tasks that it fits; all of them where it is empty.
        volatile: Checkpoints do not know of it.
    """

    name: str
    family: str
    places: frozenset[str]
    args: dict = field(default_factory=dict)
    ours: dict = field(default_factory=dict)
    task: dict | None = None
    extra: Extra | None = None
    methods: dict = field(default_factory=dict)
    theirs: dict | None = None
    callback: Callable[[], dict] | None = None
    tasks: tuple[str, ...] = ()
    volatile: bool = False


def feature(name: str, family: str, args: dict | None = None, places: str = "", **parts) -> None:
    assert name not in FEATURES, name
    taken = frozenset(places.split() or [family])
    FEATURES[name] = Feature(name=name, family=family, places=taken, args=args or {}, **parts)


# Tasks ---------------------------------------------------------------------------------------------------------------
class Normed(toy.Classifier):
    """A classifier with buffers that training moves."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)


class Silent(toy.Classifier):
    """A classifier that computes no loss."""

    def forward(self, x):
        return {"logits": super().forward(x)["logits"]}


class Outputs(toy.Classifier):
    """A classifier that returns what transformers' models return."""

    def forward(self, x, labels=None):
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(**super().forward(x, labels))


def _cross_entropy(outputs, labels, num_items_in_batch=None):
    total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else len(labels))


def _frozen():
    model = toy.Classifier()
    model.inner.weight.requires_grad = False
    return model


def task(name: str, model, train, evaluation, **parts) -> None:
    parts = {"extra": None, **parts}
    feature(name, "task", places="task", task={"model": model, "train": train, "eval": evaluation}, **parts)


ROWS = (toy.rows, lambda: toy.rows(21, seed=5))
task("rows", toy.Classifier, *ROWS)
task("rows_few", toy.Classifier, lambda: toy.rows(26), lambda: toy.rows(7, 5))
task("rows_normed", Normed, *ROWS)
task("rows_outputs", Outputs, *ROWS)
task("rows_frozen", _frozen, *ROWS)
task("rows_noisy", toy.Classifier, lambda: toy.Noisy(toy.rows()), ROWS[1])
task("rows_table", toy.Classifier, lambda: toy.Table(toy.rows(30)), lambda: toy.Table(toy.rows(9, 5)))
task("rows_silent", Silent, *ROWS, extra=lambda api, model: {"compute_loss_func": _cross_entropy})
task("rows_summed", toy.Classifier, *ROWS, extra=lambda api, model: {"compute_loss_func": _cross_entropy})
task("rows_nan", toy.NanAt, *ROWS, volatile=True)
task("regression", toy.TupleRegressor, toy.regression_rows, lambda: toy.regression_rows(13, 4))
task("tags", toy.Tagger, *(cases.TAGS[k] for k in ("train", "eval")), extra=lambda a, m: {"data_collator": toy.pad})
task(
    "tags_config",
    toy.tagger_with_config,
    *(cases.TAGS[k] for k in ("train", "eval")),
    extra=lambda a, m: {"data_collator": toy.pad},
)
task(
    "tags_masked",
    toy.Tagger,
    *(cases.TAGS[k] for k in ("train", "eval")),
    extra=lambda a, m: {"data_collator": toy.mask_at_random},
)
task("gpt2", *(cases.LM[k] for k in ("model", "train", "eval")))
task("gpt2_lora", model_cases.lora, *(cases.LM[k] for k in ("train", "eval")))
task("bert", *(cases.BERT[k] for k in ("model", "train", "eval")))
task(
    "bert_datasets",
    toy.tiny_bert,
    lambda: cases.as_dataset(toy.labelled_blocks()),
    lambda: cases.as_dataset(toy.labelled_blocks(11)),
)
task(
    "bert_tokenizer",
    *(cases.WORDS[k] for k in ("model", "train", "eval")),
    extra=lambda a, m: {"processing_class": toy.tiny_tokenizer()},
)
task("stream", toy.Classifier, lambda: toy.Stream(toy.rows(23)), lambda: toy.Stream(toy.rows(9, 5)))
task("stream_sized", toy.Classifier, lambda: toy.SizedStream(toy.rows(30)), ROWS[1])
task("stream_epochs", toy.Classifier, lambda: toy.ShuffledStream(toy.rows(20)), ROWS[1])

CLASSES = ("rows", "rows_few", "rows_normed", "rows_outputs", "rows_frozen", "rows_noisy", "rows_table", "rows_silent",
           "rows_summed", "rows_nan", "stream", "stream_sized", "stream_epochs", "bert", "bert_datasets",
           "bert_tokenizer")  # fmt: skip
PLAIN = tuple(name for name in CLASSES if not name.startswith("bert") and name not in ("rows_silent", "rows_outputs"))
TOKENS = ("tags", "tags_config", "tags_masked")
MODELS = ("gpt2", "gpt2_lora", "bert", "bert_datasets", "bert_tokenizer")
MAPS = ("rows", "rows_few", "rows_normed", "rows_noisy", "rows_frozen", "rows_outputs", "regression", *TOKENS, *MODELS)

# The step ------------------------------------------------------------------------------------------------------------
for count in (2, 3, 4, 20):
    feature(f"accumulate_{count}", "accumulation", {"gradient_accumulation_steps": count})
feature("max_steps_7", "length", {"max_steps": 7})
feature("max_steps_17", "length", {"max_steps": 17})
feature("epochs_1_5", "length", {"num_train_epochs": 1.5})
feature("epochs_3", "length", {"num_train_epochs": 3})
feature("epochs_0_3", "length", {"num_train_epochs": 0.3})
feature("drop_last", "drop_last", {"dataloader_drop_last": True})
feature("train_batch_3", "train_batch", {"per_device_train_batch_size": 3})
feature("workers", "workers", {"dataloader_num_workers": 1})
feature("pin_memory_off", "workers", {"dataloader_pin_memory": False})
feature("clip_0", "clipping", {"max_grad_norm": 0.0})
feature("clip_hard", "clipping", {"max_grad_norm": 0.05})
# 5.23 asks a model without a config for it
feature("smoothing", "smoothing", {"label_smoothing_factor": 0.1}, tasks=("bert", "gpt2", "tags_config"))
feature("bf16", "precision", {"bf16": True})
feature("bf16_eval", "precision", {"bf16_full_eval": True})
feature("tokens_all", "tokens", {"include_num_input_tokens_seen": "all"}, tasks=(*TOKENS, *MODELS))
feature("tokens_unpadded", "tokens", {"include_num_input_tokens_seen": "non_padding"}, tasks=(*TOKENS, *MODELS))
feature("tokens_of_device", "tokens", {"average_tokens_across_devices": False})
feature("neftune", "neftune", {"neftune_noise_alpha": 5.0}, tasks=MODELS)
feature("grad_checkpointing", "checkpointing", {"gradient_checkpointing": True}, tasks=("gpt2", "bert"))
feature("empty_cache", "cache", {"torch_empty_cache_steps": 2})
feature("memory_metrics", "memory", {"skip_memory_metrics": False})
feature("seed_7", "seed", {"seed": 7})
feature("data_seed", "seed", {"data_seed": 11})
feature("determinism", "seed", {"full_determinism": True})
feature("not_seedable", "accelerator", {"accelerator_config": {"use_seedable_sampler": False}})
feature("sequential", "sampling", {"train_sampling_strategy": "sequential"})
feature("by_length", "sampling", {"train_sampling_strategy": "group_by_length"}, tasks=(*TOKENS, "gpt2", "bert"))
feature("rebalance", "sampling", {"train_sampling_strategy": "batch_rebalance"}, tasks=TOKENS)
feature("keep_columns", "columns", {"remove_unused_columns": False}, tasks=(*PLAIN, "regression", *TOKENS, "gpt2"))
feature("label_names", "labels", {"label_names": ["labels"]})
feature("no_label_names", "labels", {"label_names": []}, tasks=PLAIN)
feature(
    "auto_batch",
    "auto_batch",
    {"auto_find_batch_size": True, "per_device_train_batch_size": 8},
    places="auto_batch train_batch model",
    tasks=("rows", "rows_noisy", "rows_few"),
    extra=lambda api, model: {"model": toy.OutOfMemoryAbove(7)},
    volatile=True,
)
feature(
    "auto_batch_late",
    "auto_batch",
    {"auto_find_batch_size": True, "per_device_train_batch_size": 8},
    places="auto_batch train_batch model",
    tasks=("rows", "rows_noisy", "rows_few"),
    extra=lambda api, model: {"model": _OutOfMemoryAtStep(5)},
    volatile=True,
)
feature("async_save", "async", ours={"async_save": True})
feature("patched", "patched", places="patched")


class _OutOfMemoryAtStep(torch.nn.Module):
    """Is out of memory once, in the middle of training."""

    def __init__(self, step: int):
        super().__init__()
        self.body, self.calls, self.step = toy.Classifier(), 0, step

    def forward(self, x, labels=None):
        self.calls += self.training
        if self.calls == self.step and self.training:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 sample too many")
        return self.body(x, labels)


def _model_init(api, model):
    kind = type(model)
    return {"model": None, "model_init": kind}


feature("model_init", "model_init", places="model", tasks=("rows", "rows_few", "regression"), extra=_model_init)

# Optimizer and schedule ----------------------------------------------------------------------------------------------
for optim, options in {
    "sgd": {"optim_args": "momentum=0.9"},
    "adafactor": {},
    "adagrad": {},
    "rmsprop": {},
    "adamw_torch": {"weight_decay": 0.1},
}.items():
    feature(f"optim_{optim}", "optimizer", {"optim": optim, **options})
for schedule, options in {
    "cosine": {"warmup_steps": 3},
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 0.2},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}},
    "inverse_sqrt": {"warmup_steps": 2},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "warmup_stable_decay": {"warmup_steps": 2, "lr_scheduler_kwargs": {"num_decay_steps": 3}},
}.items():
    feature(f"schedule_{schedule}", "schedule", {"lr_scheduler_type": schedule, **options})
for plateau in ("reduce_lr_on_plateau", "greedy"):
    options = {"lr_scheduler_kwargs": {"patience": 1, "factor": 0.5}}
    feature(
        f"schedule_{plateau}",
        "schedule",
        {"lr_scheduler_type": plateau, "eval_strategy": "steps", "eval_steps": 2, **options},
        places="schedule eval",
    )


def _own_optimizer(api, model):
    return {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), None)}


def _own_both(api, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))}


def _create_sgd(api):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        return self.optimizer

    return create_optimizer


def _create_groups(api):
    def create_optimizer(self, *args, **kwargs):
        found = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": found[:1], "lr": 0.003}, {"params": found[1:], "lr": 0.03, "weight_decay": 0.1}]
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer

    return create_optimizer


def _create_schedule(api):
    def create_scheduler(self, num_training_steps, optimizer=None):
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_training_steps)
        return self.lr_scheduler

    return create_scheduler


def _create_adagrad(api):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        return self.optimizer

    return create_optimizer


def _create_decay(api):
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        return self.lr_scheduler

    return create_scheduler


def _create_both(api):
    def create_optimizer_and_scheduler(self, num_training_steps):
        _create_adagrad(api)(self)
        _create_decay(api)(self, num_training_steps)

    return create_optimizer_and_scheduler


feature("own_optimizer", "optimizer", extra=_own_optimizer)
feature("own_both", "optimizer", places="optimizer schedule", extra=_own_both)
feature("create_sgd", "optimizer", methods={"create_optimizer": _create_sgd})
feature("create_groups", "optimizer", methods={"create_optimizer": _create_groups})
feature("create_schedule", "schedule", methods={"create_scheduler": _create_schedule})
# 5.23 no longer calls the first method: a row of docs/differences.md.
feature(
    "create_both",
    "schedule",
    places="optimizer schedule",
    methods={"create_optimizer_and_scheduler": _create_both},
    theirs={"create_optimizer": _create_adagrad, "create_scheduler": _create_decay},
)
feature(
    "optimizer_class",
    "optimizer",
    extra=lambda api, model: {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 0.01})},
)

# Logs ----------------------------------------------------------------------------------------------------------------
for name, options in {
    "1": {"logging_steps": 1},
    "3": {"logging_steps": 3},
    "share": {"logging_steps": 0.2},
    "first": {"logging_first_step": True, "logging_steps": 5},
    "epoch": {"logging_strategy": "epoch"},
    "no": {"logging_strategy": "no"},
}.items():
    feature(f"log_{name}", "log", options)
feature("nan_filter_off", "nan_filter", {"logging_nan_inf_filter": False})

# Evaluations ---------------------------------------------------------------------------------------------------------
for name, options in {
    "2": {"eval_strategy": "steps", "eval_steps": 2},
    "5": {"eval_strategy": "steps", "eval_steps": 5},
    "share": {"eval_strategy": "steps", "eval_steps": 0.25},
    "epoch": {"eval_strategy": "epoch"},
    "late": {"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 6},
    "late_epoch": {"eval_strategy": "epoch", "eval_delay": 1.5},
    "as_logs": {"eval_strategy": "steps"},
}.items():
    feature(f"eval_{name}", "eval", options)
feature("eval_on_start", "eval_on_start", {"eval_on_start": True}, volatile=True)
feature("eval_batch_3", "eval_batch", {"per_device_eval_batch_size": 3})
feature("eval_moved", "eval_moved", {"eval_accumulation_steps": 2, "per_device_eval_batch_size": 3},
        places="eval_moved eval_batch")  # fmt: skip
feature("eval_apart", "eval_moved", {"eval_do_concat_batches": False})
feature("loss_only", "loss_only", {"prediction_loss_only": True})


def _two_sets(api, model):
    return {"eval_dataset": {"a": toy.rows(9, 3), "b": toy.rows(10, 4)}}


def _accuracy(prediction):
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean()), "count": len(logits)}


feature("two_sets", "eval_data", tasks=PLAIN, extra=_two_sets)
feature("accuracy", "metrics", tasks=CLASSES, extra=lambda api, model: {"compute_metrics": _accuracy})
feature("metrics_none", "metrics", tasks=CLASSES, extra=lambda api, model: {"compute_metrics": lambda p: {}})
feature(
    "batch_metrics",
    "metrics",
    {"batch_eval_metrics": True},
    tasks=CLASSES,
    extra=lambda api, model: {"compute_metrics": cases._by_batch()},
)
feature(
    "metrics_of_inputs",
    "metrics",
    {"include_for_metrics": ["inputs", "loss"]},
    tasks=(*PLAIN, "gpt2"),
    extra=lambda api, model: {
        "compute_metrics": lambda p: {"losses": float(p.losses.sum()), "inputs": float(abs(p.inputs).sum())}
    },
)
feature(
    "preprocessed",
    "preprocess",
    places="preprocess metrics",
    tasks=PLAIN,
    extra=lambda api, model: {
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "compute_metrics": lambda p: {"mean": float(p.predictions.mean())},
    },
)

# Saving --------------------------------------------------------------------------------------------------------------
for name, options in {
    "3": {"save_strategy": "steps", "save_steps": 3},
    "4": {"save_strategy": "steps", "save_steps": 4},
    "share": {"save_strategy": "steps", "save_steps": 0.3},
    "epoch": {"save_strategy": "epoch"},
}.items():
    feature(f"save_{name}", "save", options)
BEST = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.2}
feature(
    "save_best", "save", {**BEST, "save_strategy": "best", "metric_for_best_model": "loss"}, places="save eval rate"
)
feature(
    "load_best",
    "save",
    {**BEST, "save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True},
    places="save eval rate",
)
feature(
    "load_best_epoch",
    "save",
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.2},
    places="save eval rate",
)
feature(
    "load_best_greater",
    "save",
    {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
     "metric_for_best_model": "accuracy", "greater_is_better": True},
    places="save eval rate metrics",
    tasks=CLASSES,
    extra=lambda api, model: {"compute_metrics": _accuracy},
)  # fmt: skip
feature(
    "load_best_lower",
    "save",
    {**BEST, "save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
     "greater_is_better": True},
    places="save eval rate",
)  # fmt: skip
feature("limit_1", "limit", {"save_total_limit": 1})
feature("limit_2", "limit", {"save_total_limit": 2})
feature("model_only", "model_only", {"save_only_model": True}, volatile=True)
feature("ignore_data_skip", "ignore_data_skip", {"ignore_data_skip": True}, volatile=True)
feature("restore_callbacks", "restore_callbacks", {"restore_callback_states_from_checkpoint": True})
feature("overwrite_no", "resume_word", {"save_on_each_node": True})


def own_callback(api, chosen: Feature):
    methods = chosen.callback()
    return type(f"Own_{chosen.name}", (api.TrainerCallback,), methods)()


def trainer_class(api, chosen: list[Feature], is_theirs: bool):
    methods: dict[str, types.FunctionType] = {}
    for one in chosen:
        makes = one.theirs if is_theirs and one.theirs is not None else one.methods
        methods |= {name: make(api) for name, make in makes.items()}
    return type("OwnTrainer", (api.Trainer,), methods) if methods else api.Trainer


from sweeps.parity import (
    combination_callbacks,  # noqa: F401 - adds those that are callbacks
    combination_overrides,  # noqa: F401 - adds those that are overrides
)
