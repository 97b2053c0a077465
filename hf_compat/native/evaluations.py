"""What a native module measures: each update, and the metrics of each validation loader, under HF's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import lightning.pytorch as pl
from torchmetrics import Metric, MetricCollection

from hf_compat.data.types import Batch
from hf_compat.engine.compilation import uncompiled
from hf_compat.engine.evaluation import EvaluationRun, EvaluationSettings
from hf_compat.engine.protocols import GradNorm, SilentObserver
from hf_compat.engine.torchmetrics_evaluation import ComputeMetrics
from hf_compat.native.steps import NativeSteps


class LastUpdate(SilentObserver):
    """Keeps what the update that was just made has measured; tensors stay where they are until somebody logs them."""

    def __init__(self) -> None:
        self.grad_norm: GradNorm = None
        self.learning_rate: float | None = None

    def forget(self) -> None:
        """Begin with the next batch."""
        self.grad_norm = self.learning_rate = None

    def optimizer_stepped(self, grad_norm: GradNorm) -> None:
        """Keep the norm of the gradients."""
        self.grad_norm = grad_norm

    def learning_rate_read(self, learning_rate: float) -> None:
        """Keep the rate; it also says that an update was made."""
        self.learning_rate = learning_rate

    def measured(self) -> dict[str, GradNorm]:
        """Return what is there, under HF's names."""
        measured = {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        return {name: value for name, value in measured.items() if value is not None}


Loaders: TypeAlias = Mapping[str, Iterable[Batch]]
Metrics: TypeAlias = Metric | MetricCollection | ComputeMetrics | None


class NativeEvaluations:
    """What is evaluated between the first batch of a validation, or test, and its end.

    Args:
        steps: Whose `prediction_step` is called.
        compute_metrics: From predictions to metrics, or a torchmetrics object.
    """

    def __init__(self, steps: NativeSteps, compute_metrics: Metrics) -> None:
        self.steps = steps
        self.compute_metrics = compute_metrics
        self.forget()

    def forget(self) -> None:
        """Begin anew: an error may have ended the last evaluation."""
        self._runs: dict[int, EvaluationRun] = {}
        self._metrics: dict[str, float] = {}

    def run_of(self, trainer: pl.Trainer, dataloader_idx: int) -> EvaluationRun:
        """Return what collects the batches of a loader."""
        if dataloader_idx not in self._runs:
            self._finish_open()  # a torchmetrics object counts for one loader at a time
            self._runs[dataloader_idx] = self._begin(trainer, dataloader_idx)
        return self._runs[dataloader_idx]

    def _finish_open(self) -> None:
        for run in self._runs.values():
            self._metrics |= run.finish().metrics or {}
        self._runs = {}

    def _begin(self, trainer: pl.Trainer, dataloader_idx: int) -> EvaluationRun:
        loaders = named_loaders(trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders)
        name, loader = list(loaders.items())[dataloader_idx]
        prefix = "_".join(part for part in ("test" if trainer.testing else "eval", name) if part)
        # predictions that no metric reads are not kept, and not generated
        loss_only = self.steps.args.prediction_loss_only or self.compute_metrics is None
        model = self.steps.model_wrapped  # within a fit evaluations run uncompiled, as in HF
        settings = EvaluationSettings.of(self.steps.args, prefix, loss_only)
        return EvaluationRun(
            self.steps,
            uncompiled(model) if trainer.state.fn == "fit" else self.steps.compiled(model),
            loader,
            settings,
            self.compute_metrics,
            drops_fillers=not self.steps.evaluates_as_seq2seq,
        )

    def finish(self) -> dict[str, float]:
        """Return the metrics of all loaders, and begin anew."""
        self._finish_open()
        metrics = self._metrics
        self.forget()
        return metrics


def named_loaders(loaders: object) -> Loaders:
    """Return loaders by the names in their metrics: of a mapping its keys, of several in a sequence their numbers.

    A loader alone has no name.
    """
    if isinstance(loaders, Mapping):
        return loaders
    if isinstance(loaders, Sequence):
        return {"": loaders[0]} if len(loaders) == 1 else {str(i): loader for i, loader in enumerate(loaders)}
    assert isinstance(loaders, Iterable)  # Lightning iterates over it
    return {"": loaders}
