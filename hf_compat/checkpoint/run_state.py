"""What a run needs to go on as if it had not stopped, beyond HF's files: `run_state.pt`. Both vocabularies.

Plain values and tensors only, so that it loads with `weights_only=True`: where the data stands (random states and the
batch that was read ahead included), the loss since the last log, Lightning's progress and its callbacks' states.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning
import lightning.pytorch as pl

from hf_compat.checkpoint.layout import of_rank
from hf_compat.checkpoint.lightning_io import RUN_STATE_NAME, RUN_STATE_VERSION
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.engine.internals import loops_state
from hf_compat.engine.windows import Windows
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)


def collect_run_state(run: Any, trainer: pl.Trainer, windows: Windows, closing: bool) -> dict[str, Any]:
    """Return the state of a run that is under way.

    Args:
        run: The Trainer.
        trainer: Its Lightning trainer.
        windows: Its data.
        closing: The epoch is about to be left.
    """
    return {
        "version": RUN_STATE_VERSION,
        "lightning_version": lightning.__version__,
        "world_size": run.args.world_size,
        "samples_of_a_micro_batch": run._train_batch_size * run.args.world_size,
        "windows": windows.state_dict(closing),
        "tr_loss": run._tr_loss.detach().cpu().clone(),
        "total_loss": run._total_loss_scalar,
        "last_logged": run._globalstep_last_logged,
        "first_update": run._initial_global_step,
        "nonfinite_steps": int(run._nonfinite_steps),
        "scalars": run._step_averages.state_dict(),
        "loops": loops_state(trainer),
        "callbacks": {callback.state_key: callback.state_dict() for callback in run._lightning_callbacks},
        "current_epoch": trainer.current_epoch,
    }


def read_run_state(checkpoint: str, rank: int = 0, world_size: int = 1) -> dict[str, Any] | None:
    """Read a checkpoint's run state of a process; None where it has none (it is another program's).

    Raises:
        CheckpointError: There is one, and it is not readable.
    """
    path = os.path.join(checkpoint, of_rank(RUN_STATE_NAME, rank, world_size))
    if not os.path.isfile(path):
        # of another number of processes: the first one's says how far they were together
        others = sorted(
            name for name in os.listdir(checkpoint) if name.startswith("run_state") and name.endswith(".pt")
        )
        if not others:
            return None
        path = os.path.join(checkpoint, others[0])
    state = read_torch_file(path)
    if not isinstance(state, dict) or state.get("version") != RUN_STATE_VERSION:
        raise CheckpointError(f"{path} is of another version of hf_compat, or no run state at all.")
    return state


def fits(state: dict[str, Any], windows: Windows, world_size: int, samples_of_a_micro_batch: int) -> bool:
    """Say whether a run's data can go on from a state: it has to be cut into the same windows, for as many processes.

    Args:
        state: The run state of the checkpoint.
        windows: The data now.
        world_size: Processes now.
        samples_of_a_micro_batch: Samples of a micro-batch of all processes together, now.
    """
    before = state.get("world_size", 1), state.get("samples_of_a_micro_batch", samples_of_a_micro_batch)
    if before != (world_size, samples_of_a_micro_batch):
        logger.warning(
            "The checkpoint is of %d process(es) with micro-batches of %d samples in all, now there are %d with %d: "
            "the data goes on after as many samples; random numbers are not those of the uninterrupted run.",
            *before,
            world_size,
            samples_of_a_micro_batch,
        )
        return False
    then = state["windows"].get("micro_batches_per_epoch"), state["windows"].get("window_size")
    same = then == (windows.micro_batches_per_epoch, windows.window_size)
    if not same:
        logger.warning(
            "The checkpoint's epochs had %s micro-batches in windows of %s, now they have %s in windows of %s: "
            "the data goes on after as many updates, but the run is not the one that was interrupted.",
            *then,
            windows.micro_batches_per_epoch,
            windows.window_size,
        )
    return same


def place_by_samples(state: dict[str, Any], updates: int, windows: Windows, samples_of_a_micro_batch: int) -> None:
    """Let the data go on after as many samples as were trained, however they were cut.

    Args:
        state: The run state of the checkpoint.
        updates: Updates done.
        windows: The data now.
        samples_of_a_micro_batch: Samples of a micro-batch of all processes together, now.
    """
    cut = state["windows"]
    size = state.get("samples_of_a_micro_batch", samples_of_a_micro_batch)
    updates_of_an_epoch = -(-cut["micro_batches_per_epoch"] // cut["window_size"])
    epoch, rest = divmod(updates, updates_of_an_epoch)
    windows.next_epoch = epoch
    windows.skip_micro_batches = rest * cut["window_size"] * size // samples_of_a_micro_batch


def give_back_losses(run: Any, state: dict[str, Any]) -> None:
    """Let a run go on summing up its loss where it stood, so that its logs go on too."""
    run._tr_loss = state["tr_loss"].to(run.args.device)
    run._total_loss_scalar = state["total_loss"]
    run._globalstep_last_logged = state["last_logged"]
    run._initial_global_step = state["first_update"]
    run._nonfinite_steps = state.get("nonfinite_steps", 0)
    if "scalars" in state:
        run._step_averages.load_state_dict(state["scalars"])


def give_back_callbacks(
    callbacks: list[pl.Callback], state: dict[str, Any], trainer: pl.Trainer, module: pl.LightningModule
) -> None:
    """Give Lightning callbacks the states that they had, and what they had put into the checkpoint."""
    extras = state.get("extras")
    for callback in callbacks:
        saved = state["callbacks"].get(callback.state_key)
        if saved:
            callback.load_state_dict(saved)
        if extras and _overrides(callback, "on_load_checkpoint"):
            callback.on_load_checkpoint(trainer, module, {"state_dict": module.state_dict(), **extras})


def ask_callbacks(
    callbacks: list[pl.Callback], trainer: pl.Trainer, module: pl.LightningModule
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Let Lightning callbacks add to a checkpoint, and change its weights: averages are what should be used.

    Returns:
        The model's weights where a callback has put others in their place, else None; and what was added.
    """
    asked = [callback for callback in callbacks if _overrides(callback, "on_save_checkpoint")]
    if not asked:
        return None, {}
    weights = module.state_dict()
    checkpoint: dict[str, Any] = {"state_dict": weights}
    for callback in asked:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    replaced = checkpoint.pop("state_dict")
    if replaced is weights:
        return None, checkpoint
    return {name.removeprefix("model."): value for name, value in replaced.items()}, checkpoint


def _overrides(callback: pl.Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(pl.Callback, hook) or hook in vars(callback)
