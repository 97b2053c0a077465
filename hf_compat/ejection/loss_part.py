"""The loss of a micro-batch, and what an evaluation keeps of a batch, as statements."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_compat.data.types import Batch, ModelOutput
from hf_compat.ejection.expressions import Expressions
from hf_compat.ejection.findings import CannotBeWritten, Findings
from hf_compat.ejection.sources import Import
from hf_compat.interop.transformers_models import is_causal_lm
from hf_compat.runtime.inspection import accepts_keyword
from hf_compat.runtime.nested import Nested
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.steps import call_model

# What a method of the script's own may ask of a LightningModule, besides what it brings itself.
_OF_MODULE = frozenset(("model", "device", "training", "compute_loss", "current_epoch", "global_step"))


@dataclass(slots=True)
class LossPart:
    """What makes a loss.

    Args:
        lines: The body of `loss_and_outputs`; empty where the script's own `compute_loss` is taken over.
        train_loss: The expression of a micro-batch's loss.
        counts_items: Whether a window's targets are counted, and the loss is divided by them.
        shifts: Whether the first label of each row is no target.
        divides: Whether a micro-batch's loss is divided by the number of micro-batches.
        own_class: The class of the script's that brings `compute_loss`.
        calls_default: Whether that calls the method that it overrides.
        loss_of_outputs: The expression of the loss in the outputs of the model.
        model_takes_items: Whether the model divides by the window's targets itself.
    """

    lines: list[str] = field(default_factory=list)
    train_loss: str = ""
    counts_items: bool = False
    shifts: bool = False
    divides: bool = False
    own_class: str | None = None
    calls_default: bool = False
    loss_of_outputs: str = "outputs.loss"
    model_takes_items: bool = False


def first_batch(trainer: Trainer) -> Batch:
    """Return a batch of training, on the device of the model."""
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer._prepare_inputs(batch)


def describe_loss(trainer: Trainer, batch: Batch, write: Expressions, findings: Findings) -> LossPart:
    """Return what makes the loss: the model, a function, label smoothing, or the script's own method."""
    num_items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    part = LossPart(counts_items=num_items is not None, shifts=trainer._loss_shifts_labels)
    part.divides = not trainer._is_scaled_for_window(num_items)
    part.model_takes_items = bool(trainer.model_accepts_loss_kwargs) and part.counts_items
    part.loss_of_outputs = _loss_in(_outputs(trainer, batch))
    items = ", num_items" if part.counts_items else ""
    try:
        if _overrides(trainer, "compute_loss"):
            _take_over(part, trainer, write)
        else:
            part.lines = _own_lines(part, trainer, write)
            part.train_loss = f"self.loss_and_outputs(part{items})[0]"
    except CannotBeWritten as error:
        findings.forbid(
            f"The loss cannot be written down: {error}.", "let it use numbers, tensors and functions of the script."
        )
    return part


def _overrides(trainer: Trainer, name: str) -> bool:
    return name in vars(trainer) or not getattr(type(trainer), name).__module__.startswith("hf_compat.")


def _outputs(trainer: Trainer, batch: Batch) -> ModelOutput:
    """Return what the model makes of a batch: its form says where the loss is."""
    inputs = dict(batch)
    elsewhere = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    if elsewhere or _overrides(trainer, "compute_loss"):
        kept = dict(inputs)
        with torch.no_grad():
            try:
                return call_model(trainer.model, inputs)
            except (TypeError, ValueError, RuntimeError):  # a model that cannot be given its labels
                kept.pop("labels", None)
                return call_model(trainer.model, kept)
    with torch.no_grad():
        return call_model(trainer.model, inputs)


def _loss_in(outputs: ModelOutput) -> str:
    if isinstance(outputs, torch.Tensor):
        return "outputs"
    if type(outputs) is dict:
        return 'outputs["loss"]'
    return "outputs.loss" if hasattr(outputs, "loss") else "outputs[0]"


def _own_lines(part: LossPart, trainer: Trainer, write: Expressions) -> list[str]:
    """Return the statements of the loss where the script has no method of its own for it."""
    items = ", num_items_in_batch=num_items" if part.model_takes_items else ""
    if trainer.compute_loss_func is not None:
        function = write.of(trainer.compute_loss_func)
        given = ", num_items_in_batch=num_items" if part.counts_items else ", num_items_in_batch=None"
        return [
            'inputs = {name: value for name, value in batch.items() if name != "labels"}',
            f"outputs = self.model(**inputs{items})",
            f'return {function}(outputs, batch.get("labels"){given}), outputs',
        ]
    if trainer.label_smoother is not None:
        # The statements of a loss with label smoothing: a share of it is that of equal probabilities
        epsilon = trainer.args.label_smoothing_factor
        shift = is_causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        write.import_(Import("torch", None, "torch"))
        return [
            "# The model makes no loss of its own here: the labels are left out.",
            'inputs = {name: value for name, value in batch.items() if name != "labels"}',
            f"outputs = self.model(**inputs{items})",
            'logits, labels = outputs["logits"], batch["labels"]',
            *(["logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()"] if shift else []),
            "negative_log = -torch.log_softmax(logits, dim=-1)",
            "ignored = labels.unsqueeze(-1) == -100",
            "picked = negative_log.gather(-1, labels.unsqueeze(-1).clamp(min=0)).masked_fill(ignored, 0.0)",
            "spread = negative_log.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)",
            f"count = {'num_items' if part.counts_items else 'ignored.numel() - ignored.long().sum()'}",
            "target, uniform = picked.sum() / count, spread.sum() / (count * logits.shape[-1])",
            f"return {1 - epsilon!r} * target + {epsilon!r} * uniform, outputs",
        ]
    return [f"outputs = self.model(**batch{items})", f"return {part.loss_of_outputs}, outputs"]


def _take_over(part: LossPart, trainer: Trainer, write: Expressions) -> None:
    """Take the script's own `compute_loss` over, with the methods and attributes that it reads."""
    if "compute_loss" in vars(trainer):
        raise CannotBeWritten("`compute_loss` was put on the Trainer object, and is in no class of the script")
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    if not write.recorder.is_of_script(owner.__module__):
        raise CannotBeWritten(f"`compute_loss` is that of {owner.__module__}.{owner.__name__}, no class of the script")
    methods, attributes = _reached(owner)
    constants = {name: write.code.express(getattr(trainer, name)) for name in sorted(attributes)}
    part.own_class = write.of_user_code(write.code.add_methods(owner, sorted(methods), constants))
    source = "".join(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name)))) for name in methods)
    part.calls_default = "super()" in source
    takes = accepts_keyword(trainer.compute_loss, "num_items_in_batch")
    items = ", num_items_in_batch=num_items" if takes and part.counts_items else ""
    part.counts_items &= takes
    part.train_loss = f"self.compute_loss(self.model, part{items})"


def _reached(owner: type) -> tuple[set[str], set[str]]:
    """Return the methods of a class that `compute_loss` reaches, and the attributes that these read.

    Raises:
        CannotBeWritten: Something else of HF's Trainer is read.
    """
    methods, attributes, waiting = set[str](), set[str](), ["compute_loss"]
    while waiting:
        name = waiting.pop()
        methods.add(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(vars(owner)[name]))))
        nodes = (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        )
        for read in {
            node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"
        } - _OF_MODULE:
            if read in vars(owner) and inspect.isfunction(inspect.unwrap(vars(owner)[read])):
                waiting += [read] if read not in methods else []
            elif hasattr(Trainer, read) or read in ("args", "state", "control", "accelerator", "optimizer"):
                raise CannotBeWritten(f"`{owner.__name__}.{name}` reads `self.{read}` of HF's Trainer")
            elif read not in _OF_MODULE:
                attributes.add(read)
    return methods, attributes


def logits_expression(outputs: ModelOutput, ignored: list[str]) -> str:
    """Return the expression of the predictions in what the model gives.

    Raises:
        CannotBeWritten: They are not one tensor or a plain tuple of tensors.
    """
    if isinstance(outputs, Mapping):
        names = [name for name, value in outputs.items() if name not in (*ignored, "loss") and value is not None]
        parts = [f'outputs["{name}"]' for name in names]
        values: list[Nested] = [outputs[name] for name in names]
    elif isinstance(outputs, (tuple, list)):
        parts, values = [f"outputs[{place}]" for place in range(1, len(outputs))], list(outputs[1:])
    else:
        raise CannotBeWritten(f"the model gives a {type(outputs).__name__}")
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        raise CannotBeWritten("what the model gives beside the loss is no tensor, and no plain tuple of them")
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
