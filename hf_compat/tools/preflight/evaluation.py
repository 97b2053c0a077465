"""Check one evaluation batch with its metrics, their names, and the memory of a whole evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from itertools import islice

import torch
from torch.utils.data import IterableDataset, Subset

from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.types import Batch, Sample
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.callbacks import eval_metric_name
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import EvalLoopOutput
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import leaves
from hf_compat.tools.preflight.plan_checks import in_words
from hf_compat.tools.preflight.session import Session, without_workers
from hf_compat.tools.preflight.snapshot import one_shot_iterators
from hf_compat.tools.until_train import overrides
from hf_compat.training_run.best import tracked_value

CHECK, METRIC = "evaluation", "metric name"
# The values of every evaluation, without those of `compute_metrics`.
_ALWAYS = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


class SomeSamples(Subset[Sample]):
    """Some samples of a data set. Its other attributes are the data set's."""

    def __getattr__(self, name: str) -> object:
        if name == "dataset":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class FirstSamples(IterableDataset[Sample]):
    """The first samples of a stream."""

    def __init__(self, dataset: IterableDataset[Sample], count: int) -> None:
        self.dataset = dataset
        self._count = count

    def __iter__(self) -> Iterator[Sample]:
        return islice(iter(self.dataset), self._count)


class FirstBatch:
    """The first batch of a loader that a subclass has made. Its other attributes are the loader's."""

    def __init__(self, loader: object) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        return islice(iter(self._loader), 1)  # type: ignore[call-overload]  # any iterable

    def __getattr__(self, name: str) -> object:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def few_of(dataset: object, count: int) -> object:
    """Take a few samples from all over a data set, as the same kind of data set if it can select."""
    if isinstance(dataset, dict):
        return {name: few_of(part, count) for name, part in dataset.items()}
    if isinstance(dataset, IterableDataset):
        return FirstSamples(dataset, count)
    if not isinstance(dataset, Sized) or not has_length(dataset):
        return dataset
    stride = max(len(dataset) // max(count, 1), 1)
    places = [place * stride for place in range(min(count, len(dataset)))]
    select, names = getattr(dataset, "select", None), getattr(dataset, "column_names", None)
    if callable(select) and isinstance(names, list):
        return select(places)
    return SomeSamples(dataset, places)  # type: ignore[arg-type]  # it is map-style


def check_evaluation(session: Session) -> None:
    """Evaluate one batch. If that fails, evaluate training data for the names of the metrics."""
    trainer, data = session.trainer, session.trainer.eval_dataset
    if data is None and not overrides(trainer, "get_eval_dataloader"):
        return
    held = one_shot_iterators(data)
    if held:
        session.leave_out(CHECK, f"it reads from an iterator, which gives each sample once ({type(held[0]).__name__})")
        return
    parts = data.items() if isinstance(data, dict) else [(None, data)]
    empty = [name for name, part in parts if part is not None and has_length(part) and len(part) == 0]
    for name in empty:
        told = "`eval_dataset`" if name is None else f"`eval_dataset[{name!r}]`"
        session.error(CHECK, f"{told} is empty: an evaluation gives no number.", "look how it was loaded or filtered")
    if empty:
        return
    error = _evaluate(session, data, session.evaluated)
    if error is None:
        generates = isinstance(trainer.args, Seq2SeqTrainingArguments) and trainer.args.predict_with_generate
        session.checked += [CHECK, *(["generation"] if generates else [])]
        return
    session.evaluated.clear()
    session.raised(error, CHECK, "The first evaluation fails")
    if trainer.train_dataset is not None and not one_shot_iterators(trainer.train_dataset):
        _evaluate(session, trainer.train_dataset, [])


def _evaluate(session: Session, dataset: object, kept: list[tuple[int, int]]) -> Exception | None:
    """Evaluate one batch within a run that saves and reports nothing, and give the error."""
    trainer = session.trainer
    samples = trainer.args.eval_batch_size * trainer.args.world_size
    loop, load = trainer.evaluation_loop, trainer.get_eval_dataloader

    def watched_loop(*args: object, **kwargs: object) -> EvalLoopOutput:
        output = loop(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they are
        found = (leaf for part in (output.predictions, output.label_ids) for leaf in leaves(part))
        kept.append((sum(getattr(leaf, "nbytes", 0) for leaf in found), output.num_samples or 0))
        return output

    def first_of_own(*args: object, **kwargs: object) -> object:
        loader = load(*args, **kwargs)
        is_short = isinstance(loader, PreparedDataLoader) and has_length(loader) and len(loader) <= 1
        return loader if is_short else FirstBatch(loader)

    is_own = overrides(trainer, "get_eval_dataloader")
    with session.on_a_copy(name="evaluation"):
        trainer.is_in_train = True  # as an evaluation within training
        trainer._evaluator.is_prepared = True
        without_workers(trainer.args)
        trainer.eval_dataset = few_of(dataset, samples)
        vars(trainer).update(evaluation_loop=watched_loop, **({"get_eval_dataloader": first_of_own} if is_own else {}))
        try:
            session.metrics = dict(trainer.evaluate())
        except Exception as error:
            return error
    return None


def check_memory(session: Session) -> None:
    """Estimate the memory of a whole evaluation by the evaluated batches."""
    kept_bytes = sum(size for size, _ in session.evaluated)
    evaluated = sum(samples for _, samples in session.evaluated)
    dataset, args = session.trainer.eval_dataset, session.trainer.args
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    samples = sum(len(part) for part in parts if isinstance(part, Sized) and has_length(part))
    if not samples or not evaluated or not kept_bytes:
        return
    needed = kept_bytes * samples // evaluated
    on_gpu = args.eval_accumulation_steps is None and args.device.type == "cuda"
    try:
        free = torch.cuda.mem_get_info()[0] if on_gpu else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # the system does not say
        free = None
    session.measured.append(f"an evaluation of {samples} samples keeps {in_words(needed)} of predictions and labels")
    if free is not None and needed > free / 2:
        session.error(
            "evaluation memory",
            f"An evaluation keeps {in_words(needed)} of predictions and labels for {samples} samples, as much again "
            f"when they are joined, and {in_words(free)} of {'GPU memory' if on_gpu else 'memory'} are free.",
            ("set `eval_accumulation_steps`, " if on_gpu else "")
            + "reduce them by `preprocess_logits_for_metrics` (argmax, say), or pass a torchmetrics metric as "
            "`compute_metrics`",
        )


def check_metric_name(session: Session) -> None:
    """Check that an evaluation gives the metric that the run follows."""
    trainer, wanted = session.trainer, session.trainer.args.metric_for_best_model
    if wanted is None or trainer.args.eval_strategy == IntervalStrategy.NO:
        return
    metrics = session.metrics
    if metrics is None:
        own = any(overrides(trainer, name) for name in ("evaluate", "evaluation_loop", "_evaluate"))
        if trainer.compute_metrics is not None or own or isinstance(trainer.eval_dataset, dict):
            session.leave_out(METRIC, f"no evaluation went through that would tell whether {wanted!r} is a metric")
            return
        metrics = dict.fromkeys(_ALWAYS, 0.0)
    try:
        tracked_value(metrics, wanted)
        session.checked.append(METRIC)
    except Exception as error:
        name = eval_metric_name(wanted).removeprefix("eval_")
        way_out = f"name one of them, or let `compute_metrics` return {name!r}"
        session.raised(error, METRIC, "The metric cannot be followed", way_out)
