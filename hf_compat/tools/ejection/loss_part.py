"""The loss of a micro-batch, and what an evaluation keeps of a batch, as statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_compat.data.types import Batch, ModelOutput
from hf_compat.interop.transformers_models import is_causal_lm
from hf_compat.runtime.inspection import accepts_keyword
from hf_compat.runtime.nested import Nested
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.own_part import OwnPart
from hf_compat.tools.ejection.sources import Import
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.steps import call_model


@dataclass(slots=True)
class LossPart:
    """What makes a loss.

    Args:
        lines: The body of `loss_and_outputs`.
        train_loss: The expression of a micro-batch's loss, of `{part}` and of `{items}`.
        counts_items: Whether a window's targets are counted, and the loss is divided by them.
        shifts: Whether the first label of each row is no target.
        divides: Whether a micro-batch's loss is divided by the number of micro-batches.
        loss_of_outputs: The expression of the loss in the outputs of the model.
        model_takes_items: Whether the model divides by the window's targets itself.
    """

    lines: list[str] = field(default_factory=list)
    train_loss: str = ""
    counts_items: bool = False
    shifts: bool = False
    divides: bool = False
    loss_of_outputs: str = "outputs.loss"
    model_takes_items: bool = False


def first_batch(trainer: Trainer) -> Batch:
    """Return a batch of training, on the device of the model."""
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer._prepare_inputs(batch)


def describe_loss(trainer: Trainer, batch: Batch, own: OwnPart, write: Expressions, findings: Findings) -> LossPart:
    """Return what makes the loss: the model, a function, label smoothing, or the script's own method."""
    num_items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    part = LossPart(counts_items=num_items is not None, shifts=trainer._loss_shifts_labels)
    part.divides = not trainer._is_scaled_for_window(num_items)
    part.model_takes_items = bool(trainer.model_accepts_loss_kwargs) and part.counts_items
    overrides = "compute_loss" in own.seams
    part.loss_of_outputs = _loss_in(trainer, batch, overrides)
    try:
        part.lines = _default_lines(part, trainer, own, write)
    except CannotBeWritten as error:
        part.lines = findings.leave(f"The loss cannot be written down: {error}", "`training_step` in `module.py`")
    prepared = "self.own._prepare_inputs({part})" if "_prepare_inputs" in own.seams else "{part}"
    part.counts_items &= not overrides or accepts_keyword(trainer.compute_loss, "num_items_in_batch")
    items = "{items}" if part.counts_items else "None"
    if "training_step" in own.seams:
        takes = part.counts_items and accepts_keyword(trainer.training_step, "num_items_in_batch")
        part.train_loss = f"self.own.training_step(self.model, {{part}}{', {items}' if takes else ''})"
    elif overrides:
        told = f", num_items_in_batch={items}" if part.counts_items else ""
        part.train_loss = f"self.own.compute_loss(self.model, {prepared}{told})"
    elif own.name:
        part.train_loss = f"self.loss_and_outputs({prepared}, {items}, self.model)[0]"
    else:
        part.train_loss = f"self.loss_and_outputs({prepared}{', {items}' if part.counts_items else ''})[0]"
    return part


def _loss_in(trainer: Trainer, batch: Batch, overrides: bool) -> str:
    """Return the expression of the loss in what the model makes of a batch."""
    outputs: ModelOutput
    kept = dict(batch)
    elsewhere = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    with torch.no_grad():
        try:
            outputs = call_model(trainer.model, dict(batch))
        except Exception:
            if not (elsewhere or overrides):
                raise
            kept.pop("labels", None)  # a model that cannot be given its labels
            try:
                outputs = call_model(trainer.model, kept)
            except Exception:  # only the script's own method knows what it gives the model
                return 'outputs["loss"] if isinstance(outputs, dict) else outputs[0]'
    if isinstance(outputs, torch.Tensor):
        return "outputs"
    if type(outputs) is dict:
        return 'outputs["loss"]'
    return "outputs.loss" if hasattr(outputs, "loss") else "outputs[0]"


def _default_lines(part: LossPart, trainer: Trainer, own: OwnPart, write: Expressions) -> list[str]:
    """Return the statements of the loss as HF's own method has it."""
    model = "model" if own.name else "self.model"
    items = ", num_items_in_batch=num_items" if part.model_takes_items else ""
    if items and own.name:  # a method of the script's may leave them out
        items = ', **({} if num_items is None else {"num_items_in_batch": num_items})'
    if trainer.compute_loss_func is not None:
        function = write.of(trainer.compute_loss_func)
        given = f", num_items_in_batch={'num_items' if part.counts_items else None}"
        return [
            'inputs = {name: value for name, value in batch.items() if name != "labels"}',
            f"outputs = {model}(**inputs{items})",
            f'return {function}(outputs, batch.get("labels"){given}), outputs',
        ]
    if trainer.label_smoother is not None:
        # The statements of a loss with label smoothing: a share of it is that of equal probabilities
        epsilon = trainer.args.label_smoothing_factor
        shift = is_causal_lm(trainer.accelerator.unwrap_model(trainer.model))
        write.import_(Import("torch", None, "torch"))
        counted = "num_items" if part.counts_items else "ignored.numel() - ignored.long().sum()"
        if part.counts_items and own.name:
            counted = "ignored.numel() - ignored.long().sum() if num_items is None else num_items"
        return [
            "# The model makes no loss of its own here: the labels are left out.",
            'inputs = {name: value for name, value in batch.items() if name != "labels"}',
            f"outputs = {model}(**inputs{items})",
            'logits, labels = outputs["logits"], batch["labels"]',
            *(["logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()"] if shift else []),
            "negative_log = -torch.log_softmax(logits, dim=-1)",
            "ignored = labels.unsqueeze(-1) == -100",
            "picked = negative_log.gather(-1, labels.unsqueeze(-1).clamp(min=0)).masked_fill(ignored, 0.0)",
            "spread = negative_log.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)",
            f"count = {counted}",
            "target, uniform = picked.sum() / count, spread.sum() / (count * logits.shape[-1])",
            f"return {1 - epsilon!r} * target + {epsilon!r} * uniform, outputs",
        ]
    return [f"outputs = {model}(**batch{items})", f"return {part.loss_of_outputs}, outputs"]


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
