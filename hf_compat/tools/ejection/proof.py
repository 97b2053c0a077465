"""Prove a project: its first updates and an evaluation, beside those of the script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hf_compat.hf.callbacks import TrainerCallback
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.plan.translate import RunCounts
from hf_compat.tools.ejection import witness
from hf_compat.tools.until_train import CapturedTrain, restore_as_written
from hf_compat.trainer import Trainer

UPDATES = 5  # watched, unless an epoch is short
_SHORT_EPOCH = 30  # updates of an epoch after which the next one is watched, too
_CLOSE = 1e-4  # of the weights' largest value: numbers that differ by rounding alone
_SPEED = re.compile(r"_(runtime|per_second|time)$")


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found when script and project were run beside each other.

    Args:
        verdict: `equal`, `close` (they differ by rounding), `differs`, `failed` (one of them), or `none`.
        told: What was compared, and what differs.
    """

    verdict: str
    told: str

    @property
    def holds(self) -> bool:
        return self.verdict in ("equal", "close", "none")


def updates_to_watch(counts: RunCounts) -> int:
    """How many updates to watch: where an epoch is short, the first of the second epoch, too."""
    is_short = counts.updates_per_epoch <= _SHORT_EPOCH
    return max(UPDATES, counts.updates_per_epoch + 1) if is_short else UPDATES


def train_and_watch(captured: CapturedTrain, updates: int, result: Path) -> None:
    """Train a captured run for some updates, evaluate if it does, and write what was noted."""
    trainer = captured.trainer
    restore_as_written(trainer.args)
    trainer.args.output_dir, trainer.args.push_to_hub = str(result.parent / "output"), False
    watch = _Watch(trainer, updates)
    trainer.callback_handler.callbacks.insert(0, watch)
    given = {name: value for name, value in captured.keywords.items() if name == "ignore_keys_for_eval"}
    trainer.train(**given)  # type: ignore[arg-type]  # as the script has passed it
    assert watch.witness is not None
    watch.witness.save(result)


class _Watch(TrainerCallback):
    """Watches a Trainer, and ends its training."""

    def __init__(self, trainer: Trainer, updates: int) -> None:
        self.trainer, self.updates = trainer, updates
        self.witness: witness.Witness | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.witness = witness.Witness(self.trainer.model, self.updates)

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        assert self.witness is not None
        self.witness.note_rates(parts["optimizer"])

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        assert self.witness is not None
        self.witness.note_update()
        if self.witness.has_all:
            self._evaluate()
            control.should_training_stop = True

    def _evaluate(self) -> None:
        assert self.witness is not None
        if self.trainer.args.eval_strategy != "no" and not self.witness.metrics:
            found = self.trainer.evaluate()
            numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
            kept = {name: float(value) for name, value in numbers.items() if not _SPEED.search(name)}
            self.witness.metrics = {name: value for name, value in kept.items() if name.startswith("eval_")}


def prove(
    project: Path, script: Sequence[str], variables: Mapping[str, str], updates: int, inexact: Sequence[str]
) -> Proof:
    """Run a script and its project, and compare them.

    Args:
        project: The project's folder, of which a copy is run.
        script: `hf-compat eject`'s words for the script: its path, whether it is a module, its arguments.
        variables: The environment's variables, before the script ran.
        updates: How many updates to watch.
        inexact: Why numbers may differ by rounding, if they may.
    """
    with TemporaryDirectory() as aside:
        copy, mine, theirs = Path(aside) / project.name, Path(aside) / "project.json", Path(aside) / "script.json"
        shutil.copytree(project, copy)
        again = [sys.executable, "-m", "hf_compat", "eject", "--watch", str(theirs), "--updates", str(updates)]
        told = _failure([*again, *script], Path.cwd(), variables)
        if told:
            return Proof("failed", f"The script itself failed within its first {updates} updates: {told}")
        told = _failure([sys.executable, "-P", str(witness.__file__), str(mine), str(updates)], copy, variables)
        if told:
            return Proof("failed", f"The project failed within its first {updates} updates: {told}")
        return _compared(theirs, mine, inexact)


def _failure(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run a program, and give its last words if it fails."""
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [line.rstrip() for line in done.stderr.splitlines() if line.strip()]
    places = [line.strip() for line in lines if re.match(rf'\s+File "{re.escape(str(folder))}/', line)]
    where = places[-1].replace(f"{folder}/", "") if places else ""
    what = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)), None)
    return " ".join(
        [what or (lines[-1] if lines else f"exit status {done.returncode}"), *([f"({where})"] if where else [])]
    )


def _compared(theirs: Path, mine: Path, inexact: Sequence[str]) -> Proof:
    there, here = json.loads(theirs.read_text(encoding="utf-8")), json.loads(mine.read_text(encoding="utf-8"))
    distance = _distance(Path(f"{theirs}.pt"), Path(f"{mine}.pt"))
    count, metrics = len(there["rows"]), _differing_metrics(there["metrics"], here["metrics"])
    evaluated = f" and an evaluation ({', '.join(there['metrics'])})" if there["metrics"] else ""
    watched = f"{count} update{'s' if count > 1 else ''}{evaluated}"
    if len(here["rows"]) != count:
        return Proof("differs", f"The project makes {len(here['rows'])} updates where the script makes {count}.")
    differing = next((number for number in range(count) if there["rows"][number] != here["rows"][number]), None)
    if differing is None and not metrics:
        return Proof("equal", f"{watched}: equal, bit for bit")
    if inexact and distance <= _CLOSE and _have_same_data(there["rows"], here["rows"]):
        return Proof(
            "close", f"{watched}: the weights differ by at most {distance:.1g} of the largest one, by rounding"
        )
    if differing is None:
        return Proof("differs", f"{count} updates are equal, bit for bit. The evaluation differs: {metrics}")
    what = _first_difference(there["rows"][differing], here["rows"][differing])
    after = f"After {watched} the weights differ by {distance:.1g} of the largest one"
    return Proof("differs", f"Update {differing + 1} differs: {what}. {after}")


def _have_same_data(theirs: Sequence[Mapping[str, object]], mine: Sequence[Mapping[str, object]]) -> bool:
    return all(one[name] == other[name] for one, other in zip(theirs, mine, strict=True) for name in ("batch", "rate"))


def _first_difference(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    if there["batch"] != here["batch"]:
        return "the model is given other batches (data, their order, or the collator)"
    if there["result"] != here["result"]:
        losses = f": loss {there['loss']} in the script, {here['loss']} in the project" if there["loss"] else ""
        return f"the model gives other results for the same batches (weights, mode or random numbers){losses}"
    if there["rate"] != here["rate"]:
        return f"the learning rates are {there['rate']} in the script, {here['rate']} in the project"
    return "batches, results and learning rates are equal, and the new weights are not (loss, gradients or optimizer)"


def _differing_metrics(theirs: Mapping[str, float], mine: Mapping[str, float]) -> str:
    """Say which metrics differ in single precision, as Lightning keeps them."""
    found = []
    for name, value in theirs.items():
        other = mine.get(name)
        if other is None or not np.array_equal(np.float32(value), np.float32(other), equal_nan=True):
            found.append(f"{name} is {value} in the script, {'not there' if other is None else other} in the project")
    return "; ".join(found)


def _distance(theirs: Path, mine: Path) -> float:
    """Return the largest difference of two weights, as a share of the largest weight."""
    there, here = (torch.load(path, weights_only=True) for path in (theirs, mine))
    if there.keys() != here.keys():
        return float("inf")
    pairs = [(there[name].double(), here[name].double()) for name in there if there[name].numel()]
    largest = max((one.abs().max().item() for one, _ in pairs), default=0.0)
    return max(((one - other).abs().max().item() for one, other in pairs), default=0.0) / (largest or 1.0)
