"""Note what the first updates of a run are made of: its batches, what the model gives, learning rates and weights.

The script's run is watched by `proof.py`. This file watches the project's: `python witness.py RESULT UPDATES` in its
folder. There hf_compat cannot be imported, so this file imports nothing of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn

if TYPE_CHECKING:
    from hashlib import _Hash

# The script's Trainer counts the targets of an update and hands the count on. The project does so where it needs it.
_NO_DATA = ("num_items_in_batch",)


class Update(NamedTuple):
    """What an update was made of: digests, the losses that the model gave, and the learning rates."""

    batch: str
    result: str
    loss: list[float]
    rate: list[float]
    weights: str


class Witness:
    """Watches a model while it is trained.

    Args:
        model: The model.
        updates: How many updates to watch.
    """

    def __init__(self, model: nn.Module, updates: int) -> None:
        self.model, self.updates = model, updates
        self.rows: list[Update] = []
        self.metrics: dict[str, float] = {}
        self._given, self._gave = hashlib.sha256(), hashlib.sha256()
        self._losses: list[float] = []
        self._rates: list[float] = []
        self._hooks = [
            model.register_forward_pre_hook(self._note_batch, with_kwargs=True),
            model.register_forward_hook(self._note_result),
        ]

    @property
    def has_all(self) -> bool:
        return len(self.rows) >= self.updates

    def note_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rates with which the optimizer is about to step."""
        self._rates = sorted({float(group["lr"]) for group in optimizer.param_groups})

    def note_update(self) -> None:
        """Note an update that has just been made."""
        weights = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            _add(weights, name, tensor)
        given, gave = self._given.hexdigest(), self._gave.hexdigest()
        self.rows.append(Update(given, gave, self._losses, self._rates, weights.hexdigest()))
        self._given, self._gave, self._losses = hashlib.sha256(), hashlib.sha256(), []

    def save(self, result: Path) -> None:
        """Write what was noted, and the weights, beside each other."""
        for hook in self._hooks:
            hook.remove()
        torch.save({name: tensor.cpu() for name, tensor in self.model.state_dict().items()}, f"{result}.pt")
        result.write_text(
            json.dumps({"rows": [row._asdict() for row in self.rows], "metrics": self.metrics}), encoding="utf-8"
        )

    def _note_batch(self, model: nn.Module, positional: tuple[object, ...], named: Mapping[str, object]) -> None:
        if model.training:
            for name, tensor in _tensors((*positional, {key: named[key] for key in named if key not in _NO_DATA})):
                _add(self._given, name, tensor)

    def _note_result(self, model: nn.Module, _: object, result: object) -> None:
        if model.training:
            for name, tensor in _tensors(result):
                _add(self._gave, "", tensor)
                if name.endswith("loss") and tensor.numel() == 1:
                    self._losses.append(tensor.item())


def _tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested data, those of a mapping in the order of its keys."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], str(key))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, name)


def _add(digest: _Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _Blocked:
    """Refuses to import what a project does without."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "hf_compat":
            raise ImportError("The project imports hf_compat, which it has to do without.")


class _Enough(Exception):
    """Ends a fit after the updates that are watched."""


class _Watch(Callback):
    """Watches the fit of a project.

    Args:
        updates: How many updates to watch.
    """

    command: LightningCLI
    witness: Witness | None = None

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.witness = Witness(pl_module.get_submodule("model"), self.updates)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.witness is not None:
            self.witness.note_rates(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert self.witness is not None
        if trainer.global_step > len(self.witness.rows):
            self.witness.note_update()
        if self.witness.has_all:
            raise _Enough  # before anything that the end of a run does


def _fit(result: Path, updates: int) -> None:
    """Train the project in the working folder for some updates, and evaluate it."""
    sys.meta_path.insert(0, _Blocked())
    sys.path.insert(0, ".")
    watch = _Watch(updates)

    def before_fit(command: LightningCLI) -> None:
        watch.command = command
        command.trainer.callbacks.insert(0, watch)  # type: ignore[attr-defined]  # as Lightning sets it

    setattr(LightningCLI, "before_fit", before_fit)  # noqa: B010 - it has none
    with contextlib.suppress(_Enough):
        importlib.import_module("main").main(
            ["fit", "--config", "config.yaml", "--trainer.enable_progress_bar", "false"]
        )
    command, seen = watch.command, watch.witness
    assert seen is not None
    if command.trainer.limit_val_batches:
        command.trainer.validate(command.model, datamodule=command.datamodule, verbose=False)
        found = command.trainer.callback_metrics
        seen.metrics = {name: float(value) for name, value in found.items() if name.startswith("eval_")}
    seen.save(result)
    command.after_fit()  # type: ignore[attr-defined]  # the project's, in which saving the model may fail, too


if __name__ == "__main__":
    _fit(Path(sys.argv[1]), int(sys.argv[2]))
