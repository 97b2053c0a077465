"""One update, as training makes it, and one checkpoint of it: forward, backward, step, save, load."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.errors import CheckpointError, HfCompatError
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import gather_objects
from hf_compat.tools.preflight.data_checks import removed_column
from hf_compat.tools.preflight.explaining import line_of
from hf_compat.tools.preflight.session import Session
from hf_compat.tools.preflight.subject import without_evaluation, without_workers

UPDATE, SAVE, LOAD = "update", "save", "load"
_MOST_NAMES = 8


class Probe(TrainerCallback):
    """The one callback of a preflight: looks at an update, has it saved, and ends the training after it.

    Args:
        saves: Whether a checkpoint is written.

    Attributes:
        losses: Of the micro-batches.
        without_gradient: Names of parameters that are trained and got no gradient.
        norms: The gradients' norms, by parameter.
        has_stepped: Whether the optimizer has made its step.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.losses: list[float] = []
        self.without_gradient: list[str] = []
        self.norms: dict[str, float] = {}
        self.has_stepped = False

    def on_substep_end(
        self, args: Args, state: TrainerState, control: TrainerControl, loss: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        self._take(loss)

    def on_pre_optimizer_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                self.without_gradient.append(name)
            elif parameter.grad is not None:
                self.norms[name] = float(parameter.grad.detach().float().norm())

    def on_step_end(
        self, args: Args, state: TrainerState, control: TrainerControl, loss: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        self._take(loss)
        self.has_stepped = True
        control.should_save, control.should_training_stop = self.saves, True

    def _take(self, loss: object) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(float(loss))


def check_update(session: Session) -> None:
    """Make the first update and its checkpoint, and load that."""
    reason = _reason_to_leave_out(session)
    if any(gather_objects(reason)):
        session.leave_out(UPDATE, reason or "another process cannot make it")
        _save_alone(session)
        return
    if _fails_on_one_rank(session):
        _save_alone(session)
        return
    probe = Probe()
    with session.on_a_copy(probe) as place:
        without_evaluation(session.trainer.args)
        if session.has_error("workers"):  # told already, and no reason to look no further
            without_workers(session.trainer.args)
        try:
            session.train(None)
        except Exception as error:
            _tell_of_error(session, probe, error)
        else:
            session.checked += [UPDATE, SAVE]
            if session.compiles:
                session.leave_out("compilation", "the update was made by the model as it is: compiling takes minutes")
            _load(session, names.checkpoint_path(place, 1))
    # Say what is odd about an update that went through
    bad = [loss for loss in probe.losses if not math.isfinite(loss)]
    if bad:
        session.error(
            UPDATE,
            f"The loss of the first update is {bad[0]}."
            + (
                " `logging_nan_inf_filter=True` would hide it in the log."
                if bool(session.trainer.args.logging_nan_inf_filter)
                else ""
            ),
            "look at the batch, the learning rate and the precision; a division by 0 or a log of 0 is the usual cause",
        )
    _judge_gradients(session, probe, is_finite=not bad)
    if not probe.has_stepped:
        _save_alone(session)


def _fails_on_one_rank(session: Session) -> bool:
    """Return whether a process of several fails on its own part of the data: the others would wait for it in vain.

    Each runs forward and backward by itself first, where nobody waits.
    """
    trainer, failed = session.trainer, ""
    if trainer.args.world_size == 1:
        return False
    with session.on_a_copy(name="alone"):
        try:
            for inputs in session.batches:
                trainer.training_step(trainer.model, inputs)
        except Exception as error:
            failed = line_of(error)
            session.raised(error, UPDATE, "The first update fails", _way_out(session, error))
    others = [f"rank {rank}: {told}" for rank, told in enumerate(gather_objects(failed)) if told]
    if others and not failed:
        session.leave_out(UPDATE, f"another process cannot make it ({'; '.join(others)})")
    return bool(others)


def _reason_to_leave_out(session: Session) -> str:
    """Return why no update can be made; empty where one can."""
    trainer = session.trainer
    if session.strategy in ("fsdp2", "deepspeed"):
        return "FSDP and DeepSpeed take the model apart, and it could not be put back as it was"
    if not session.batches:
        return "the first training batch cannot be made" if session.has_error("training data") else "no batch was read"
    if session.has_error("numbers") and trainer.args.device.type == "cuda":
        return "indices are out of range, with which a GPU would stop for good"
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()) and trainer.model_init is None:
        return "no parameter is trained"
    return ""


def _tell_of_error(session: Session, probe: Probe, error: Exception) -> None:
    if probe.has_stepped:
        session.checked.append(UPDATE)
        session.raised(error, SAVE, "The first checkpoint cannot be written")
        session.leave_out(LOAD, "no checkpoint was written")
        return
    if session.has_error("numbers") and isinstance(error, (IndexError, RuntimeError)):
        session.leave_out(UPDATE, "it fails on the numbers that are out of range (above)")
        return
    if "wandb.init" in str(error) or "wandb" in str(type(error).__module__):
        session.leave_out(UPDATE, f"it reports to wandb by itself, and no run was begun ({error})")
        return
    session.raised(error, UPDATE, "The first update fails", _way_out(session, error))
    callbacks = session.trainer.callback_handler.callbacks
    own = [type(one).__name__ for one in callbacks if _is_users(one)]
    if own:
        session.note(
            UPDATE,
            f"The callbacks {', '.join(own)} were not called: where one of them prepares what the step needs, the run "
            "may go through all the same.",
        )


def _way_out(session: Session, error: Exception) -> str:
    """Name the column that is missing because it is removed, where that is what the error says."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(error, HfCompatError) or not isinstance(key, str):
        return ""
    if key in session.dropped_columns:
        return removed_column(session, key, "the step")[0] + f" So {removed_column(session, key, '')[1]}"
    has = ", ".join(map(str, session.batches[0])) if isinstance(session.batches[0], Mapping) else "no names"
    return f"the batch has {has}: let the collator give {key!r}, or ask for what is there"


def _is_users(callback: object) -> bool:
    return not type(callback).__module__.startswith(("hf_compat.", "transformers."))


def _judge_gradients(session: Session, probe: Probe, is_finite: bool) -> None:
    odd = [name for name, norm in probe.norms.items() if not math.isfinite(norm)]
    if odd and is_finite and not session.trainer.args.fp16:  # its scaler looks for a scale at first
        session.error(
            UPDATE,
            f"The gradients of {_listed(odd)} are not finite, though the loss is.",
            "look for a root, a norm or a division at 0 in the forward",
        )
    elif probe.norms and not odd and is_finite and not any(probe.norms.values()):
        session.warn(
            UPDATE,
            "All gradients are 0: the loss does not depend on what is trained.",
            "compute the loss from what the model gives, without `detach`, `argmax` or `item`",
        )
    if probe.without_gradient:
        _judge_unused(session, probe.without_gradient)


def _judge_unused(session: Session, unused: list[str]) -> None:
    problem = f"{len(unused)} parameters get no gradient in the first update: {_listed(unused)}."
    args = session.trainer.args
    looks = args.ddp_find_unused_parameters
    if args.world_size > 1 and looks is False:
        session.error(
            UPDATE, f"{problem} DDP waits for them.", "set `ddp_find_unused_parameters=True`, or freeze or remove them"
        )
    else:
        session.note(
            UPDATE, problem, "freeze them (`requires_grad_(False)`), if that is meant; DDP has to look for them"
        )


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return ", ".join(found[:_MOST_NAMES]) + more


def _load(session: Session, checkpoint: str) -> None:
    """Measure a checkpoint, and load it: weights, optimizer, schedule."""
    trainer = session.trainer
    if not trainer.args.should_save or not os.path.isdir(checkpoint):
        return
    session.checkpoint_bytes = bytes_below(checkpoint)
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    try:
        trainer._load_from_checkpoint(checkpoint)
        if not trainer.args.save_only_model:
            trainer._load_optimizer_and_scheduler(checkpoint)
    except Exception as error:
        session.raised(error, LOAD, "What was saved cannot be loaded again")
        return
    session.checked.append(LOAD)
    _compare(session, before, trainer.model)


def _compare(session: Session, before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    after: Mapping[str, torch.Tensor] = model.state_dict()
    changed = [name for name, tensor in before.items() if not _is_same(tensor, after[name])]
    lacking = list(session.trainer._weights_not_loaded)
    if lacking:
        session.warn(
            LOAD,
            f"A checkpoint does not hold {_listed(lacking)}: a run that goes on from it begins with other values.",
            "let `state_dict` or `save_pretrained` of the model write them",
        )
    elif changed:
        session.warn(
            LOAD,
            f"{_listed(changed)} are not what they were after they were saved and loaded.",
            "look at what `_save`, `save_pretrained` and `state_dict` do with them",
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    same = one == other.to(one.dtype)
    return bool((same | (one.isnan() & other.isnan())).all()) if one.is_floating_point() else bool(same.all())


def _save_alone(session: Session) -> None:
    """Save the model without an update: what cannot be saved shows all the same."""
    saves: Callable[[str], None] = session.trainer.save_model
    with session.on_a_copy(name="model") as place:
        try:
            saves(place)
        except Exception as error:
            session.raised(error, SAVE, "The model cannot be saved")
            return
        session.checked.append(SAVE)
        session.leave_out(LOAD, "no update was made whose checkpoint could be loaded")


def bytes_below(folder: str) -> int:
    """Return what the files in a folder take."""
    found = (os.path.join(place, file) for place, _, files in os.walk(folder) for file in files)
    return sum(os.path.getsize(path) for path in found)


def check_resumption(session: Session) -> None:
    """Load the checkpoint that the run will go on from, and make the update after it."""
    wanted = session.resume_from_checkpoint
    if not wanted:
        return
    if isinstance(wanted, str) and not os.path.exists(wanted):
        session.error("resume", f"There is no checkpoint {wanted}.", "name a `checkpoint-N` folder that is there")
        return
    if session.has_error("training data", UPDATE, "numbers") or not session.batches:
        session.leave_out("resume", "no update could be made, without a checkpoint either")
        return
    probe = Probe(saves=False)
    with session.on_a_copy(probe, name="resumed"):
        without_evaluation(session.trainer.args)
        vars(session.trainer.args)["ignore_data_skip"] = True
        try:
            session.train(_chosen(session, wanted))
        except Exception as error:
            session.raised(error, "resume", f"The run cannot go on from {wanted}")
            return
    session.checked.append("resume")
    if not probe.has_stepped:
        session.warn(
            "resume",
            f"The checkpoint {wanted} is at the end of this run: no update would be made.",
            "set more epochs or a higher `max_steps`, or train without `resume_from_checkpoint`",
        )


def _chosen(session: Session, wanted: str | bool) -> str:
    """Return the folder that is asked for; True takes the newest of the output folder, in which nothing is changed."""
    if isinstance(wanted, str):
        return wanted
    folder = session.output_dir
    newest = manifest.newest_checkpoint(folder, session.trainer._resumer.problems) if os.path.isdir(folder) else None
    if newest is None:
        raise CheckpointError(
            f"No valid checkpoint found in output directory ({folder}).\n\n"
            "Hint: train without `resume_from_checkpoint`, or name a folder."
        )
    session.trainer._resumer.refuse_misfits(newest)
    return newest
