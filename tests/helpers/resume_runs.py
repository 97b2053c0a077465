"""Runs that stop and are resumed, under transformers and under hf_compat: one body, everything recorded.

A run is 13 samples in micro-batches of 2: seven updates an epoch, or three with an accumulation of 3 (the last window
is short). The model has dropout, so that its weights depend on the random states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from helpers import toy
from helpers.parity.compare import first_difference, same
from helpers.parity.runner import files_under, tracer, without_times

OPTIONS = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}
# Events within an update: none of them comes where nothing is trained.
OF_A_STEP = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


class Endless(toy.Stream):
    """Iterable data that never end."""

    def __iter__(self):
        return itertools.cycle(self.samples)


DATA: dict[str, Callable[[], Any]] = {
    "map": lambda: toy.rows(13),
    "sized": lambda: toy.SizedStream(toy.rows(13)),
    "endless": lambda: Endless(toy.rows(13)),
}


def pairs(axes: dict[str, tuple], valid: Callable[[dict], bool]) -> Iterator[dict]:
    """Yield valid combinations until every valid pair of values of two axes has occurred."""
    whole = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    whole = [combination for combination in whole if valid(combination)]
    left = {pair for combination in whole for pair in itertools.combinations(combination.items(), 2)}
    while left:
        best = max(whole, key=lambda combination: len(left & set(itertools.combinations(combination.items(), 2))))
        left -= set(itertools.combinations(best.items(), 2))
        yield best


class Run:
    """A Trainer of either package with a tracer among its callbacks."""

    def __init__(
        self,
        api: Any,
        folder: Path,
        callbacks: Callable[[Any], list] = lambda api: [],
        data: str | Callable[[], Any] = "map",
        model: Callable[[], torch.nn.Module] = toy.Classifier,
        **args: Any,
    ) -> None:
        api.set_seed(1)
        self.trace: list = []
        self.folder = folder
        self.trainer = api.Trainer(
            model(),
            api.TrainingArguments(str(folder), **{**OPTIONS, **args}),
            train_dataset=(DATA[data] if isinstance(data, str) else data)(),
            eval_dataset=toy.rows(5, seed=5),
            callbacks=[tracer(api, self.trace)(), *callbacks(api)],
        )

    def train(self, resume: str | bool | None = None, **changed: Any) -> dict:
        """Train, with changed arguments; returns everything that is compared."""
        for name, value in changed.items():
            setattr(self.trainer.args, name, value)
        self.trace.clear()
        self.trainer.train(resume_from_checkpoint=resume)
        return self.recorded()

    def recorded(self) -> dict:
        """Return what the last call to `train` has left."""
        state = self.trainer.state
        names = ("epoch", "global_step", "max_steps", "num_train_epochs", "total_flos", "best_metric")
        return {
            "log": without_times(state.log_history),
            "events": [(event, step, epoch, flags) for event, step, epoch, flags, _ in self.trace],
            "weights": {name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()},
            "state": {name: getattr(state, name) for name in names},
            "files": files_under(self.folder),
            "random": torch.random.get_rng_state(),
        }

    def checkpoint(self, step: int) -> str:
        return str(self.folder / f"checkpoint-{step}")


def names(events: list) -> list[str]:
    return [event for event, *_ in events]


def without(log: list[dict], *keys: str) -> list[dict]:
    return [{key: value for key, value in entry.items() if key not in keys} for entry in log]


def assert_same(theirs: Any, ours: Any, what: str) -> None:
    assert same(theirs, ours), f"{what}{first_difference(theirs, ours)}"


def assert_as_transformers(theirs: dict, ours: dict, sums_begin_again: bool = True, own_events: int = 0) -> None:
    """Compare a resumed run with transformers'.

    Args:
        theirs: What transformers recorded.
        ours: What hf_compat recorded.
        sums_begin_again: Its first log covers updates before the checkpoint, whose losses transformers leaves out.
        own_events: Events of ours after the first one that complete the epoch in which the checkpoint was written.
    """
    lost = ("train_loss", "loss") if sums_begin_again else ("train_loss",)
    assert ours["state"]["global_step"] == theirs["state"]["global_step"], "updates"
    assert_same(without(theirs["log"], *lost), without(ours["log"], *lost), "log")
    assert_same(theirs["events"], ours["events"][:1] + ours["events"][1 + own_events :], "events")
    assert_same(theirs["weights"], ours["weights"], "weights")
    assert_same(theirs["state"], ours["state"], "state")
    assert_same(theirs["files"], ours["files"], "files")
    assert_same(theirs["random"], ours["random"], "random")


def assert_uninterrupted(whole: dict, ours: dict, *left_out: str) -> None:
    """Compare a resumed run with the uninterrupted one, entry by entry."""
    assert_same(without(whole["log"], *left_out), without(ours["log"], *left_out), "uninterrupted log")
    assert_same(whole["weights"], ours["weights"], "uninterrupted weights")


def assert_nothing_trained(stopped: dict, ours: dict) -> None:
    """Check that a run whose updates were done has only begun, logged its summary and ended."""
    assert ours["state"]["global_step"] == stopped["state"]["global_step"]
    assert not [event for event in ours["events"] if event[0] in OF_A_STEP]
    assert "train_loss" in ours["log"][-1]
    before = [entry for entry in stopped["log"] if "train_loss" not in entry]  # a signal ends a run without a summary
    assert_same(before, ours["log"][:-1], "log")
    assert_same(stopped["weights"], ours["weights"], "weights")


def stop_and_save(at: int, stop: bool = True, save: bool = True) -> Callable[[Any], list]:
    """Return what makes an HF callback that sets the flags at the end of an update."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == at:
            control.should_training_stop |= stop
            control.should_save |= save

    return lambda api: [type("StopAndSave", (api.TrainerCallback,), {"on_step_end": on_step_end})()]


class LightningStop(pl.Callback):
    """Stops as Lightning's callbacks do."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.at:
            trainer.should_stop = True
