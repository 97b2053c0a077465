"""One evaluation batch with its metrics; the names of the metrics; what a whole evaluation would keep in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice

import torch
from torch.utils.data import IterableDataset

from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.types import Batch, Sample
from hf_compat.hf.arguments import Seq2SeqTrainingArguments
from hf_compat.hf.builtin_callbacks import eval_metric_name
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import EvalLoopOutput
from hf_compat.runtime.inspection import has_length
from hf_compat.runtime.nested import Nested, leaves
from hf_compat.tools.preflight.session import Session
from hf_compat.tools.preflight.snapshot import one_shot_iterators
from hf_compat.tools.preflight.space import free_memory, in_words
from hf_compat.tools.preflight.subject import overrides, without_workers
from hf_compat.training_run.run import tracked_value

CHECK, METRIC = "evaluation", "metric name"
# What every evaluation gives, whatever the metrics are.
_ALWAYS = ("eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


class SomeSamples:
    """A few samples of a data set, from all over it; all else is the data set's.

    Args:
        dataset: A map-style data set.
        count: How many.
    """

    def __init__(self, dataset: Sized, count: int) -> None:
        self.dataset = dataset
        self._stride = max(len(dataset) // max(count, 1), 1)
        self._count = min(count, len(dataset))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self.dataset[index % self._count * self._stride]  # type: ignore[index]  # it is map-style

    def __getattr__(self, name: str) -> object:
        if name in ("dataset", "__getitems__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class FirstSamples(IterableDataset[Sample]):
    """The first samples of a stream.

    Args:
        dataset: The stream.
        count: How many.
    """

    def __init__(self, dataset: IterableDataset[Sample], count: int) -> None:
        self.dataset = dataset
        self._count = count

    def __iter__(self) -> Iterator[Sample]:
        return islice(iter(self.dataset), self._count)


class FirstBatch:
    """The first batch of a loader that a subclass has made; all else is the loader's."""

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
    """Return a few samples of a data set, in its own kind where that has a way to choose."""
    if isinstance(dataset, dict):
        return {name: few_of(part, count) for name, part in dataset.items()}
    select, names = getattr(dataset, "select", None), getattr(dataset, "column_names", None)
    if callable(select) and isinstance(names, list) and isinstance(dataset, Sized):
        stride = max(len(dataset) // max(count, 1), 1)
        return select([place * stride for place in range(min(count, len(dataset)))])
    if isinstance(dataset, IterableDataset):
        return FirstSamples(dataset, count)
    return SomeSamples(dataset, count) if isinstance(dataset, Sized) and has_length(dataset) else dataset


def check_evaluation(session: Session) -> None:
    """Evaluate one batch; where that fails, ask the metrics about training data for their names."""
    trainer = session.trainer
    own_loader = overrides(trainer, "get_eval_dataloader")
    if trainer.eval_dataset is None and not own_loader:
        return
    held = one_shot_iterators(trainer.eval_dataset)
    if held:
        session.leave_out(CHECK, f"it reads from an iterator, which gives each sample once ({type(held[0]).__name__})")
        return
    data = session.trainer.eval_dataset
    parts = data.items() if isinstance(data, dict) else [(None, data)]
    empty = [name for name, part in parts if part is not None and has_length(part) and len(part) == 0]
    for name in empty:
        told = "`eval_dataset`" if name is None else f"`eval_dataset[{name!r}]`"
        session.error(CHECK, f"{told} is empty: an evaluation gives no number.", "look how it was loaded or filtered")
    if bool(empty):
        return
    evaluated = _Evaluated()
    error = _evaluate(session, trainer.eval_dataset, evaluated)
    if error is None:
        session.checked += [CHECK, *(["generation"] if _generates(session) else [])]
        _estimate_memory(session, evaluated)
        return
    session.raised(error, CHECK, "The first evaluation fails")
    if trainer.train_dataset is not None and not one_shot_iterators(trainer.train_dataset):
        _evaluate(session, trainer.train_dataset, _Evaluated())


def _generates(session: Session) -> bool:
    args = session.trainer.args
    return isinstance(args, Seq2SeqTrainingArguments) and args.predict_with_generate


class _Evaluated:
    """What an evaluation has kept.

    Attributes:
        kept_bytes: Of predictions, labels and inputs.
        samples: That it was given.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.samples = 0

    def take(self, output: EvalLoopOutput) -> None:
        kept: list[Nested] = [output.predictions, output.label_ids]
        self.kept_bytes += sum(getattr(leaf, "nbytes", 0) for part in kept for leaf in leaves(part))
        self.samples += output.num_samples or 0


def _evaluate(session: Session, dataset: object, evaluated: _Evaluated) -> Exception | None:
    """Evaluate one batch within a run that saves and reports nothing, and return what went wrong."""
    trainer = session.trainer
    samples = trainer.args.eval_batch_size * trainer.args.world_size
    with session.on_a_copy(name="evaluation"):
        trainer.is_in_train = True  # as an evaluation within training
        trainer._evaluator.is_prepared = True
        without_workers(trainer.args)
        trainer.eval_dataset = few_of(dataset, samples)
        _watch(session, evaluated)
        try:
            session.metrics = dict(trainer.evaluate())
        except Exception as error:
            return error
    return None


def _watch(session: Session, evaluated: _Evaluated) -> None:
    """See what an evaluation keeps, and give it one batch of a loader that is a subclass's own."""
    trainer = session.trainer
    loop, load = trainer.evaluation_loop, trainer.get_eval_dataloader

    def watched_loop(*args: object, **kwargs: object) -> EvalLoopOutput:
        output = loop(*args, **kwargs)  # type: ignore[arg-type]  # handed on as they are
        evaluated.take(output)
        return output

    def first_of_own(*args: object, **kwargs: object) -> object:
        loader = load(*args, **kwargs)
        is_short = isinstance(loader, PreparedDataLoader) and has_length(loader) and len(loader) <= 1
        return loader if is_short else FirstBatch(loader)

    vars(trainer)["evaluation_loop"] = watched_loop
    if overrides(trainer, "get_eval_dataloader"):
        vars(trainer)["get_eval_dataloader"] = first_of_own


def _estimate_memory(session: Session, evaluated: _Evaluated) -> None:
    """Compare what a whole evaluation keeps with the memory that is free."""
    dataset = session.trainer.eval_dataset
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    args, samples = (
        session.trainer.args,
        sum(len(part) for part in parts if isinstance(part, Sized) and has_length(part)),
    )
    if not samples or not evaluated.samples or not evaluated.kept_bytes:
        return
    needed = evaluated.kept_bytes * samples // evaluated.samples
    on_gpu = args.eval_accumulation_steps is None and args.device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_memory()
    where = "GPU memory" if on_gpu else "memory"
    session.measured.append(f"an evaluation of {samples} samples keeps {in_words(needed)} of predictions and labels")
    if free is not None and needed > free / 2:
        session.error(
            "evaluation memory",
            f"An evaluation keeps {in_words(needed)} of predictions and labels for {samples} samples, as much again "
            f"when they are joined, and {in_words(free)} of {where} are free.",
            ("set `eval_accumulation_steps`, " if on_gpu else "")
            + "reduce them by `preprocess_logits_for_metrics` (argmax, say), or pass a torchmetrics metric as "
            "`compute_metrics`",
        )


def check_metric_name(session: Session) -> None:
    """Look whether the metric that the run follows is among those that an evaluation gives."""
    args = session.trainer.args
    wanted = args.metric_for_best_model
    if wanted is None or args.eval_strategy == IntervalStrategy.NO:
        return
    if session.metrics is None and not _gives_only_known(session):
        session.leave_out(METRIC, f"no evaluation went through that would tell whether {wanted!r} is a metric")
        return
    metrics = session.metrics if session.metrics is not None else dict.fromkeys(_ALWAYS, 0.0)
    try:
        tracked_value(metrics, wanted)
        session.checked.append(METRIC)
    except Exception as error:
        way_out = (
            f"name one of them, or let `compute_metrics` return {eval_metric_name(wanted).removeprefix('eval_')!r}"
        )
        session.raised(error, METRIC, "The metric cannot be followed", way_out)


def _gives_only_known(session: Session) -> bool:
    """Return whether an evaluation can give the loss and its speed only."""
    trainer = session.trainer
    own = any(overrides(trainer, name) for name in ("evaluate", "evaluation_loop", "_evaluate"))
    return trainer.compute_metrics is None and not own and not isinstance(trainer.eval_dataset, dict)
