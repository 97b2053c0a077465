"""The evaluation: when it is run, what it keeps of a batch, and what computes its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_compat.data.types import Batch
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.tools.ejection.data_part import DataPart
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.loss_part import LossPart, logits_expression
from hf_compat.tools.ejection.own_part import OwnPart
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.generation import GenerationSteps


@dataclass(slots=True)
class EvaluationPart:
    """What an evaluation consists of.

    Args:
        sets: Names of the evaluation sets, where there are several.
        lines: The body of `validation_step`.
        prediction_lines: The body of the stand-in's `prediction_step`, where the script has a Trainer of its own.
        compute_metrics: The expression of the metric function; None without one.
        generates: Whether predictions are generated.
        fill_to: Length that generated rows are filled up to.
        pad_token: What fills them up.
    """

    sets: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    prediction_lines: list[str] = field(default_factory=lambda: ["raise NotImplementedError"])
    compute_metrics: str | None = None
    generates: bool = False
    fill_to: int = 0
    pad_token: int = 0


def describe_evaluation(
    trainer: Trainer, data: DataPart, loss: LossPart, own: OwnPart, write: Expressions, findings: Findings
) -> EvaluationPart | None:
    """Return what an evaluation consists of; None where the run has no evaluation set."""
    if trainer.eval_dataset is None:
        if trainer.args.eval_strategy != IntervalStrategy.NO:
            findings.forbid("There is no `eval_dataset`, and `eval_strategy` asks for evaluations.", "pass one.")
        return None
    part = EvaluationPart(sets=[name for name in data.eval_sets if name])
    try:
        metrics = trainer.compute_metrics
        if not (metrics is None or trainer.args.prediction_loss_only):
            if isinstance(metrics, Mapping) or not callable(metrics):
                raise CannotBeWritten(f"`compute_metrics` is a {type(metrics).__name__}, and no function")
            if isinstance(metrics, torch.nn.Module):
                raise CannotBeWritten(
                    "`compute_metrics` is a torchmetrics object; log it in `validation_step` by yourself"
                )
            part.compute_metrics = write.of(metrics)
        _find_lines(part, trainer, loss, own, write)
    except CannotBeWritten as error:
        left = findings.leave(f"The evaluation cannot be written down: {error}", "`validation_step` in `module.py`")
        part.lines, part.compute_metrics = left, None
    return part


def _find_lines(part: EvaluationPart, trainer: Trainer, loss: LossPart, own: OwnPart, write: Expressions) -> None:
    """Write what is kept of a batch: its loss for each sample, its predictions and labels where metrics read them."""
    given = trainer.eval_dataset
    dataset = next(iter(given.values())) if isinstance(given, Mapping) else given
    batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader(dataset))))
    labels = _labels(trainer)
    part.generates = bool(getattr(trainer.args, "predict_with_generate", False)) and part.compute_metrics is not None
    several = "[dataloader_idx]" if part.sets else ""
    if own.name is not None:
        part.lines = [
            *_size(trainer, labels),
            f"{'loss, predictions, labels' if part.compute_metrics else 'loss, *_'} = self.own.prediction_step(",
            f"    self.model, dict(batch), prediction_loss_only={part.compute_metrics is None}, ignore_keys=None",
            ")",
            "if loss is not None:",
            f"    self.eval_losses{several}.append(loss.detach().repeat(size))",
        ]
        if part.compute_metrics:
            shown = _preprocessed("predictions", "labels", trainer, write)
            part.lines += ["if predictions is not None:", f"    self.eval_outputs{several}.append(({shown}, labels))"]
        if "prediction_step" in own.seams and "prediction_step" not in own.supers:
            return  # the method that it overrides is never called
    if not trainer._has_loss(batch):
        raise CannotBeWritten(f"a batch has none of the labels {trainer.label_names}, so there is no loss")
    outputs = "outputs" if part.compute_metrics and not part.generates else "_"
    items = "count_targets(batch)" if loss.counts_items else ""
    made = _generation_lines(part, trainer, batch, labels, write) if part.generates else []
    predictions = "self.fill_up(tokens)" if part.generates else ""
    kept = f"self.fill_up({labels})" if part.generates else labels
    if part.compute_metrics and not part.generates:
        predictions = _predictions(trainer, batch)
    if own.name is not None:
        items = f", num_items_in_batch=self.module.{items}" if items else ""
        lines = [
            *made,
            f"labels = {kept}",
            f"loss, {outputs} = self.compute_loss(model, dict(batch), return_outputs=True{items})",
            *(["if prediction_loss_only:", "    return loss.detach(), None, None"] if predictions else []),
            f"return loss.detach(), {predictions or None}, labels",
        ]
        part.prediction_lines = [line.replace("self.fill_up", "self.module.fill_up") for line in lines]
        return
    part.lines = [
        *made,
        f"loss, {outputs} = self.loss_and_outputs(batch{', ' if items else ''}{items})",
        *_size(trainer, labels),
        f"self.eval_losses{several}.append(loss.detach().repeat(size))",
    ]
    if part.compute_metrics:
        shown = predictions if part.generates else _preprocessed(predictions, labels, trainer, write)
        part.lines.append(f"self.eval_outputs{several}.append(({shown}, {kept}))")


def _labels(trainer: Trainer) -> str:
    names = trainer.label_names
    parts = [f'batch["{name}"]' for name in names]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _size(trainer: Trainer, labels: str) -> list[str]:
    """Return the statements that find how many samples a batch's loss counts for."""
    if isinstance(trainer, GenerationSteps):  # as upstream's
        return [
            "# Seq2SeqTrainer counts a short last batch as a full one",
            "size = self.trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]  # a fit has one",
        ]
    return [f"size = len({labels})" if len(trainer.label_names) == 1 else "size = len(next(iter(batch.values())))"]


def _preprocessed(predictions: str, labels: str, trainer: Trainer, write: Expressions) -> str:
    preprocess = trainer.preprocess_logits_for_metrics
    return predictions if preprocess is None else f"{write.of(preprocess)}({predictions}, {labels})"


def _predictions(trainer: Trainer, batch: Batch) -> str:
    """Return the expression of what the metrics read, found out on a first batch."""
    trainer.model.eval()
    with torch.no_grad():
        try:
            _, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        except Exception as error:
            raise CannotBeWritten(f"`compute_loss` gives no outputs of a first batch ({error})") from error
    return logits_expression(outputs, trainer._ignored_keys(None))


def _generation_lines(
    part: EvaluationPart, trainer: Trainer, batch: Batch, labels: str, write: Expressions
) -> list[str]:
    """Return the statements that generate for a batch."""
    assert isinstance(trainer, GenerationSteps)  # its arguments say that it generates
    keywords = trainer._generation_keywords({})
    longest, longest_new = trainer._lengths_of_generations()
    if longest and longest_new and longest_new > longest:
        raise CannotBeWritten("the generation's `max_length` and `max_new_tokens` fill rows up to two lengths")
    part.fill_to, part.pad_token = longest or longest_new or 0, trainer._padding_token()
    told = "".join(f", {name}={write.of(value)}" for name, value in keywords.items() if value is not None)
    decoded = batch.get("decoder_input_ids")
    if decoded is None or decoded.shape != batch["labels"].shape:
        return [f"tokens = self.model.generate(**batch{told})"]
    return [
        "# a decoder's inputs that the collator made of the labels would give them away",
        'inputs = {name: value for name, value in batch.items() if not name.startswith("decoder_")}',
        f"tokens = self.model.generate(**inputs{told})",
    ]
