"""What a Trainer or a native module is given beside its arguments, as far as arguments lose their effect by it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from torch.utils.data import IterableDataset

from hf_compat.engine.evaluation import is_metric_source
from hf_compat.hf.callbacks import PrinterCallback, ProgressCallback
from hf_compat.hf.rows import RunParts
from hf_compat.optim.optimizers import unread_arguments
from hf_compat.runtime.inspection import codes_of, has_length, is_replaced, package_of
from hf_compat.trainer_methods.base import StepsBase
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.steps import StepMethods

_PACKAGES = frozenset(("hf_compat", "transformers", "lightning", "lightning_fabric", "pytorch_lightning", "torch"))
# Modules with callbacks that report to trackers.
_TRACKING = ("hf_compat.callbacks.", "transformers.integrations.")


def run_parts(steps: StepsBase) -> RunParts:
    """Collect the parts of a run that is about to begin."""
    callbacks = getattr(getattr(steps, "callback_handler", None), "callbacks", ())  # native mode has none
    optimizer = None
    if steps.optimizer is not None and steps.optimizer is not steps._own_optimizer:
        optimizer = "optimizers"
    elif steps.optimizer_cls_and_kwargs is not None:
        optimizer = "optimizer_cls_and_kwargs"
    makers = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
    # the user, or the user's own method
    makes_it = optimizer is not None or any(is_replaced(steps, name, StepMethods) for name in makers)
    others = steps.eval_dataset.values() if isinstance(steps.eval_dataset, Mapping) else [steps.eval_dataset]
    return RunParts(
        optimizer=optimizer,
        has_schedule=steps.lr_scheduler is not None and not steps._created_lr_scheduler,
        unread=dict if makes_it else functools.cache(lambda: unread_arguments(steps.args, steps.model)),
        loss=_own_loss(steps),
        metrics=_kind_of_metrics(steps.compute_metrics),
        generates=isinstance(steps, GenerationSteps) or is_replaced(steps, "prediction_step", StepMethods),
        trains_on_stream=isinstance(steps.train_dataset, IterableDataset),
        has_length=steps.train_dataset is None or has_length(steps.train_dataset),
        has_other_sets=not all(one is None or isinstance(one, IterableDataset) for one in others),
        has_config=steps.model is None or getattr(steps.model, "config", None) is not None,
        has_trackers=any(f"{type(one).__module__}.".startswith(_TRACKING) for one in callbacks),
        prints_logs=not callbacks or any(isinstance(one, (ProgressCallback, PrinterCallback)) for one in callbacks),
        reads=functools.partial(_is_mentioned, steps, callbacks),
    )


def _own_loss(steps: StepsBase) -> str | None:
    """The name of the user's own function or method that computes the loss, without ours."""
    if is_replaced(steps, "compute_loss", StepMethods):
        codes = list(codes_of(getattr(steps, "compute_loss", None)))
        ours = {"compute_loss", "label_smoother"}  # it may call ours, or smooth the labels itself
        return "compute_loss" if codes and ours.isdisjoint(_names_in(codes)) else None
    return None if steps.compute_loss_func is None else "compute_loss_func"


def _kind_of_metrics(given: object) -> Literal["none", "function", "torchmetrics"]:
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    if all(part is None for part in parts):
        return "none"
    return "torchmetrics" if all(part is None or is_metric_source(part) for part in parts) else "function"


def _is_mentioned(steps: StepsBase, callbacks: Iterable[object], name: str) -> bool:
    """Whether the user's own callbacks, methods or functions mention a name in their code."""
    functions = (steps.compute_loss_func, steps.compute_metrics, steps.preprocess_logits_for_metrics)
    holders = (steps, *callbacks, steps.data_collator, *functions)
    return any(name in _names_in(_codes_in(holder)) for holder in holders)


def _codes_in(holder: object) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of the methods that an object's own classes define."""
    kinds = [one for one in type(holder).__mro__ if one.__module__.partition(".")[0] not in _PACKAGES]
    for value in (holder, *(value for owner in (holder, *kinds) for value in getattr(owner, "__dict__", {}).values())):
        home = package_of(value)
        if home not in _PACKAGES:
            yield from codes_of(value)


def _names_in(codes: Iterable[types.CodeType]) -> set[str]:
    """The names and texts in code."""
    return {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}
