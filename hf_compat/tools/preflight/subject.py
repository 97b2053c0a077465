"""The Trainer as the checks know it, and a copy of its arguments that lets nothing out of a scratch folder."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from hf_compat.callbacks.callback_set import CallbackSet
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.callbacks import Callback, CallbackHandler
from hf_compat.hf.enums import IntervalStrategy
from hf_compat.hf.metrics import TrainOutput
from hf_compat.tools.isolation.plan import real_path
from hf_compat.trainer import Trainer

# Trains from a checkpoint, as the Trainer's own `train` does, whatever a subclass makes of that method.
Train = Callable[[str | None], TrainOutput]

# Arguments that reach beyond an update, or beyond the scratch folder.
_QUIET: Mapping[str, object] = {
    "async_save": False,
    "auto_find_batch_size": False,
    "debug": [],
    "enable_jit_checkpoint": False,
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "restore_callback_states_from_checkpoint": False,
    "save_total_limit": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
}


def overrides(trainer: Trainer, name: str) -> bool:
    """Return whether a method is the user's: in a subclass, on this object, or in the place of one of our class."""
    return name in vars(trainer) or not getattr(type(trainer), name).__module__.startswith("hf_compat.")


def enter_scratch(trainer: Trainer, folder: str, callbacks: list[Callback]) -> None:
    """Let a Trainer work as in a run, and reach nobody: what it saves goes into a folder, and it logs nothing.

    Args:
        trainer: The Trainer; whoever calls this puts it back afterwards.
        folder: The scratch folder.
        callbacks: The callbacks that are called; those of the Trainer, of both kinds, are left out.
    """
    trainer.args = quiet_arguments(trainer.args, folder)
    trainer.state, trainer.control = copy.deepcopy(trainer.state), copy.deepcopy(trainer.control)
    handler = CallbackHandler([], trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)
    handler.requestable_kwargs["trainer"] = trainer
    trainer.callback_handler = handler
    trainer._callbacks = CallbackSet(trainer)
    for one in callbacks:
        handler.add_callback(one)
        trainer._callbacks.order.append(one)
    vars(trainer)["log"] = _leave_out


def _leave_out(logs: Mapping[str, float], start_time: float | None = None) -> None:
    """Log nothing: an override may report to a tracker."""


def quiet_arguments(args: TrainingArguments, folder: str) -> TrainingArguments:
    """Return a copy of the arguments that saves into a folder, and reports and pushes nothing."""
    quiet = object.__new__(type(args))
    known = {name: value for name, value in _QUIET.items() if name in vars(args)}
    vars(quiet).update(vars(args), **known, output_dir=folder)
    return quiet


def without_workers(args: TrainingArguments) -> None:
    """Let a copy of arguments read its data in this process: the update has the workers, and one start is enough."""
    vars(args).update(
        dataloader_num_workers=0,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_multiprocessing_context=None,
    )


def without_evaluation(args: TrainingArguments) -> None:
    """Let a copy of arguments evaluate nothing: evaluations are a check of their own."""
    vars(args)["eval_strategy"] = IntervalStrategy.NO


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave out logs and warnings: what is worth saying becomes a finding, and the run says the rest itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def place_for_scratch(args: TrainingArguments, bytes_needed: int) -> str | None:
    """Return a folder that has room: that of temporary files, else the one that the output folder stands in."""
    for place in (tempfile.gettempdir(), real_path(existing_parent(str(args.output_dir)))):
        if os.access(place, os.W_OK) and shutil.disk_usage(place).free > bytes_needed:
            return place
    return None


def existing_parent(folder: str) -> str:
    """Return the nearest folder of a path that is there, also without the isolation that a check is in."""
    path = os.path.abspath(folder)
    while not os.path.isdir(real_path(path)) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def weights_in_bytes(model: nn.Module) -> int:
    """Return what a model's weights take in memory."""
    return sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
