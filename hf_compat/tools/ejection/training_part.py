"""The counts of the run, and the statements of its loss and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_compat.data.types import Batch, ModelOutput
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.interop.transformers_models import is_causal_lm
from hf_compat.plan.translate import RunCounts
from hf_compat.runtime.inspection import accepts_keyword
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.seeding import RandomStates, read_rng, set_seed, write_rng
from hf_compat.tools.ejection.data_part import DataPart, same_random_states
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.own_part import OwnPart
from hf_compat.tools.until_train import CapturedTrain
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.steps import call_model


@dataclass
class RunPart:
    """The length of the run, and how its updates are made."""

    counts: RunCounts
    max_epochs: int | None  # its epochs if they are whole ones
    max_steps: int
    accumulation: int
    windows: bool  # whether updates are made by hand, because Lightning's accumulation would divide differently
    accumulates: bool
    logging_steps: int
    save_steps: int
    saves_at_end: bool  # whether the last update has a checkpoint besides those at regular intervals
    eval_every: int | None  # Lightning's batches between evaluations. None evaluates at each epoch
    evaluates_at_end: bool  # whether the end needs an evaluation of its own


def prepare(captured: CapturedTrain, findings: Findings) -> tuple[RandomStates, bool]:
    """Bring the model to the start of training. Returns the random states there, and whether the seed gives them."""
    trainer = captured.trainer
    if captured.keywords.get("trial") is not None:
        findings.forbid(
            "The script searches for hyperparameters, and a project is one run.",
            "write the values that were found into the arguments, and call `train()`.",
        )
    elif captured.positional or {name for name, value in captured.keywords.items() if value}:
        findings.tell("The script resumes a checkpoint; the project begins with the weights of a new run.")
    trainer._set_use_cache()
    trainer._prepare_model_for_training(None, None)
    states = read_rng()
    set_seed(trainer.args.seed)
    is_seeded = same_random_states(states, read_rng())
    write_rng(states)
    return states, is_seeded


def describe_run(trainer: Trainer, data: DataPart, loss: LossPart, own: OwnPart) -> RunPart:
    """Read the counts of the run."""
    args, state = trainer.args, trainer.state
    counts = trainer.run_counts(args, trainer.get_train_dataloader())
    updates, per_epoch = counts.max_updates, counts.updates_per_epoch
    state.compute_steps(args, updates)
    window = args.gradient_accumulation_steps
    even = not counts.is_endless and counts.micro_batches_per_epoch % window == 0
    exact = even and loss.divides and not loss.counts_items
    windows = (window > 1 and (not exact or data.reads_ahead)) or "training_step" in own.seams
    save_steps, eval_steps = int(state.save_steps or 0), int(state.eval_steps or 0)
    by_step, by_epoch = (args.eval_strategy == one for one in (IntervalStrategy.STEPS, IntervalStrategy.EPOCH))
    saves_by_step = args.save_strategy == SaveStrategy.STEPS and save_steps > 0
    return RunPart(
        counts=counts,
        max_epochs=None if counts.is_endless or updates % per_epoch else updates // per_epoch,
        max_steps=updates,
        accumulation=window,
        windows=windows,
        accumulates=window > 1 and not windows,
        logging_steps=int(state.logging_steps or 1),
        save_steps=save_steps,
        saves_at_end=saves_by_step and updates % save_steps != 0,
        eval_every=eval_steps * (1 if windows else window) if by_step else None,
        evaluates_at_end=updates % eval_steps != 0 if by_step else by_epoch and updates % per_epoch != 0,
    )


@dataclass
class LossPart:
    """The loss: HF's own method by the template `loss.jinja`, or statements that raise."""

    loss_lines: list[str] = field(default_factory=list)
    loss_model: str = ""  # the expression of the model there
    loss_items: bool = False  # whether a window's targets are counted for it
    takes_items: bool = False  # whether the model itself gets their number
    loss_function: str = ""
    loss_of_outputs: str = ""
    smoothing: float | None = None  # the share of the loss that is that of equal probabilities
    shifts_logits: bool = False
    train_loss: str = ""  # the expression of a micro-batch's loss, of `{part}` and of `{items}`
    counts_items: bool = False  # whether the targets of a window are counted, and the loss is divided by them
    shifts: bool = False  # whether the first label of each row is not a target
    divides: bool = False  # whether a micro-batch's loss is divided by the number of micro-batches


def describe_loss(trainer: Trainer, own: OwnPart, write: Expressions, findings: Findings) -> LossPart:
    """Read the loss off the model, a function, label smoothing, or the script's own method."""
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    num_items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    part = LossPart(counts_items=num_items is not None, shifts=trainer._loss_shifts_labels)
    part.divides = not trainer._is_scaled_for_window(num_items)
    overrides = "compute_loss" in own.seams
    try:
        part.loss_of_outputs = _loss_in(trainer, batch, overrides)
        part.loss_model, part.loss_items = "model" if own.own else "self.model", part.counts_items
        part.takes_items = trainer.model_accepts_loss_kwargs and part.counts_items
        if trainer.compute_loss_func is not None:
            part.loss_function = write.of(trainer.compute_loss_func)
        elif trainer.label_smoother is not None:
            part.smoothing = trainer.args.label_smoothing_factor
            part.shifts_logits = is_causal_lm(trainer.accelerator.unwrap_model(trainer.model))
    except CannotBeWritten as error:
        part.loss_lines = findings.leave(f"The loss cannot be written down: {error}", "`training_step` in `module.py`")
    prepared = "self.own._prepare_inputs({part})" if "_prepare_inputs" in own.seams else "{part}"
    part.counts_items &= not overrides or accepts_keyword(trainer.compute_loss, "num_items_in_batch")
    items = "{items}" if part.counts_items else "None"
    if "training_step" in own.seams:
        takes = part.counts_items and accepts_keyword(trainer.training_step, "num_items_in_batch")
        part.train_loss = f"self.own.training_step(self.model, {{part}}{', {items}' if takes else ''})"
    elif overrides:
        told = f", num_items_in_batch={items}" if part.counts_items else ""
        part.train_loss = f"self.own.compute_loss(self.model, {prepared}{told})"
    elif own.own:
        part.train_loss = f"self.loss_and_outputs({prepared}, {items}, self.model)[0]"
    else:
        part.train_loss = f"self.loss_and_outputs({prepared}{', {items}' if part.counts_items else ''})[0]"
    return part


def _loss_in(trainer: Trainer, batch: Batch, overrides: bool) -> str:
    outputs: ModelOutput
    elsewhere = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    with torch.no_grad():
        try:
            outputs = call_model(trainer.model, dict(batch))
        except Exception:
            if not (elsewhere or overrides):
                raise
            try:  # some models do not accept their labels
                outputs = call_model(trainer.model, {name: one for name, one in batch.items() if name != "labels"})
            except Exception:  # only the script's own method knows the inputs of the model
                return 'outputs["loss"] if isinstance(outputs, dict) else outputs[0]'
    if isinstance(outputs, torch.Tensor):
        return "outputs"
    if type(outputs) is dict:
        return 'outputs["loss"]'
    return "outputs.loss" if hasattr(outputs, "loss") else "outputs[0]"


@dataclass
class EvaluationPart:
    """The evaluation: `validation.jinja` and the stand-in's `prediction_step` write it, or statements that raise."""

    has_eval: bool = False
    evaluates: bool = False
    several: list[str] = field(default_factory=list)  # names of the evaluation sets if there are several
    validation_lines: list[str] = field(default_factory=list)
    predicts: bool = False  # whether HF's own `prediction_step` is known
    compute_metrics: str | None = None
    metrics_are_code: bool = False  # whether that is a name, which can stand wherever it is called
    eval_labels: str = ""
    size: str = ""  # the number of samples for which a batch's loss counts
    counts_full_batches: bool = False
    predictions: str = ""  # the values of `outputs` that the metrics read
    preprocess: str = ""
    generation: bool = False
    generation_words: str = ""
    has_decoded_labels: bool = False  # whether a batch has decoder inputs that the collator made of the labels
    fill_to: int = 0  # length to which generated rows are filled up
    pad_token: int = 0

    def read_off(self, trainer: Trainer, own: OwnPart, write: Expressions) -> None:
        """Find which values of a batch are kept: the loss of each sample, and what the metrics read."""
        given = trainer.eval_dataset
        dataset = next(iter(given.values())) if isinstance(given, Mapping) else given
        batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader(dataset))))
        names = [f'batch["{name}"]' for name in trainer.label_names]
        self.eval_labels = names[0] if len(names) == 1 else f"({', '.join(names)})"
        self.size = f"len({self.eval_labels})" if len(names) == 1 else "len(next(iter(batch.values())))"
        self.counts_full_batches = isinstance(trainer, GenerationSteps)  # as upstream's
        self.generation = (
            bool(getattr(trainer.args, "predict_with_generate", False)) and self.compute_metrics is not None
        )
        preprocess = trainer.preprocess_logits_for_metrics
        if self.compute_metrics and preprocess is not None and (own.own is not None or not self.generation):
            self.preprocess = write.of(preprocess)
        if own.own is not None and "prediction_step" in own.seams and "prediction_step" not in own.supers:
            return  # the method that it overrides is never called
        if not trainer._has_loss(batch):
            raise CannotBeWritten(f"a batch has none of the labels {trainer.label_names}, so there is no loss")
        if self.generation:
            assert isinstance(trainer, GenerationSteps)  # its arguments say that it generates
            keywords = trainer._generation_keywords({})
            config: Any = trainer.model.generation_config
            longest = config.max_length or 20  # transformers' default
            if (config.max_new_tokens or 0) >= longest:
                raise CannotBeWritten("the generation's `max_length` and `max_new_tokens` fill rows up to two lengths")
            self.fill_to, self.pad_token = longest, trainer._padding_token()
            words = {name: value for name, value in keywords.items() if value is not None}
            self.generation_words = "".join(f", {name}={write.of(value)}" for name, value in words.items())
            decoded = batch.get("decoder_input_ids")
            self.has_decoded_labels = decoded is not None and decoded.shape == batch["labels"].shape
        elif self.compute_metrics:
            self.predictions = _predictions(trainer, batch)
        self.predicts = True


def describe_evaluation(
    trainer: Trainer, data: DataPart, own: OwnPart, write: Expressions, findings: Findings
) -> EvaluationPart:
    """Read the evaluation off the Trainer."""
    evaluates = trainer.args.eval_strategy != IntervalStrategy.NO
    if trainer.eval_dataset is None:
        if evaluates:
            findings.forbid("There is no `eval_dataset`, and `eval_strategy` asks for evaluations.", "pass one.")
        return EvaluationPart(evaluates=evaluates)
    part = EvaluationPart(has_eval=True, evaluates=evaluates, several=[name for name in data.eval_sets if name])
    try:
        metrics = trainer.compute_metrics
        if not (metrics is None or trainer.args.prediction_loss_only):
            if isinstance(metrics, Mapping) or not callable(metrics):
                raise CannotBeWritten(f"`compute_metrics` is a {type(metrics).__name__}, not a function")
            if isinstance(metrics, torch.nn.Module):
                raise CannotBeWritten(
                    "`compute_metrics` is a torchmetrics object; log it in `validation_step` by yourself"
                )
            part.compute_metrics = write.of(metrics)
            part.metrics_are_code = part.compute_metrics.replace(".", "").isidentifier()
        part.read_off(trainer, own, write)
    except CannotBeWritten as error:
        left = findings.leave(f"The evaluation cannot be written down: {error}", "`validation_step` in `module.py`")
        part.validation_lines, part.compute_metrics = left, None
    return part


def _predictions(trainer: Trainer, batch: Batch) -> str:
    """The expression of the values that the metrics read, found on a first batch."""
    trainer.model.eval()
    with torch.no_grad():
        try:
            _, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        except Exception as error:
            raise CannotBeWritten(f"`compute_loss` gives no outputs of a first batch ({error})") from error
    if isinstance(outputs, Mapping):
        ignored = (*trainer._ignored_keys(None), "loss")
        names = [name for name, value in outputs.items() if name not in ignored and value is not None]
        parts = [f'outputs["{name}"]' for name in names]
        values: list[Nested] = [outputs[name] for name in names]
    elif isinstance(outputs, (tuple, list)):
        parts, values = [f"outputs[{place}]" for place in range(1, len(outputs))], list(outputs[1:])
    else:
        raise CannotBeWritten(f"the model gives a {type(outputs).__name__}")
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        raise CannotBeWritten("the model's outputs beside the loss are not a tensor or a plain tuple of tensors")
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
