"""Check the first update as training makes it, and its checkpoint: forward, backward, step, save, load, resume."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import torch

from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.choice import newest_checkpoint
from hf_compat.checkpoint.hints import nothing_to_resume
from hf_compat.errors import HfCompatError
from hf_compat.hf.callbacks import Args, Kwarg, TrainerCallback
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.runtime.collectives import gather_objects
from hf_compat.tools.preflight.data_checks import removed_column
from hf_compat.tools.preflight.report import line_of
from hf_compat.tools.preflight.session import Session, without_workers
from hf_compat.trainer import Trainer

UPDATE, SAVE, LOAD = "update", "save", "load"
_MOST_NAMES = 8


class Probe(TrainerCallback):
    """The only callback of a preflight. It watches an update, saves it if asked to, and ends the training after it."""

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.losses: list[float] = []  # of the micro-batches
        self.without_gradient: list[str] = []  # trained parameters that got none
        self.norms: dict[str, float] = {}  # of the gradients, by parameter
        self.has_stepped = False  # whether the optimizer has made its step

    def on_substep_end(
        self, args: Args, state: TrainerState, control: TrainerControl, loss: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(float(loss))

    def on_pre_optimizer_step(self, args: Args, state: TrainerState, control: TrainerControl, **kwargs: Kwarg) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                self.without_gradient.append(name)
            elif parameter.grad is not None:
                self.norms[name] = float(parameter.grad.detach().float().norm())

    def on_step_end(
        self, args: Args, state: TrainerState, control: TrainerControl, loss: Kwarg = None, **kwargs: Kwarg
    ) -> None:
        self.on_substep_end(args, state, control, loss)
        self.has_stepped = True
        control.should_save, control.should_training_stop = self.saves, True


def check_update(session: Session) -> None:
    """Make the first update and its checkpoint, and load that. Without an update, only save the model."""
    reason, probe = _reason_to_leave_out(session), Probe()
    if any(gather_objects(reason)):
        session.leave_out(UPDATE, reason or "another process cannot make it")
    elif not _fails_on_one_rank(session):
        with session.on_a_copy(probe) as place:
            if session.has_error("workers"):  # a finding already, which need not stop this check
                without_workers(session.trainer.args)
            try:
                Trainer.train(session.trainer, False)  # even if a subclass overrides it
            except Exception as error:
                _report_error(session, probe, error)
            else:
                session.checked += [UPDATE, SAVE]
                if session.trainer._ignored_count is not None:
                    session.warn(UPDATE, *session.trainer._ignored_count)
                if session.compiles:
                    why = "the update was made by the model as it is: compiling takes minutes"
                    session.leave_out("compilation", why)
                _load(session, layout.checkpoint_path(place, 1))
        _judge(session, probe)
    if probe.has_stepped:
        return
    # A model that cannot be saved is found even without an update
    saves: Callable[[str], None] = session.trainer.save_model
    with session.on_a_copy(name="model") as place:
        try:
            saves(place)
        except Exception as error:
            session.raised(error, SAVE, "The model cannot be saved")
            return
        session.checked.append(SAVE)
        session.leave_out(LOAD, "no update was made whose checkpoint could be loaded")


def _fails_on_one_rank(session: Session) -> bool:
    """Whether one of several processes fails on its own data. The others would wait for it in vain.

    So each first runs forward and backward by itself.
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
    """The reason why no update can be made. Empty if one can."""
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


def _report_error(session: Session, probe: Probe, error: Exception) -> None:
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
    kinds = (type(one) for one in session.trainer.callback_handler.callbacks)
    own = [kind.__name__ for kind in kinds if not kind.__module__.startswith(("hf_compat.", "transformers."))]
    if own:
        session.note(
            UPDATE,
            f"The callbacks {', '.join(own)} were not called. If one of them prepares what the step needs, the run may "
            "succeed all the same.",
        )


def _way_out(session: Session, error: Exception) -> str:
    """For a missing key: name the removed column, or the keys of the batch."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(error, HfCompatError) or not isinstance(key, str):
        return ""
    if key in session.dropped_columns:
        return removed_column(session, key, "the step")[0] + f" So {removed_column(session, key, '')[1]}"
    has = ", ".join(map(str, session.batches[0])) if isinstance(session.batches[0], Mapping) else "no names"
    return f"the batch has {has}: let the collator give {key!r}, or ask for what is there"


def _judge(session: Session, probe: Probe) -> None:
    """Report odd losses and gradients of an update that succeeded."""
    args, unused = session.trainer.args, probe.without_gradient
    bad = [loss for loss in probe.losses if not math.isfinite(loss)]
    odd = [name for name, norm in probe.norms.items() if not math.isfinite(norm)]
    if bad:
        hidden = " `logging_nan_inf_filter=True` would hide it in the log." if args.logging_nan_inf_filter else ""
        session.error(
            UPDATE,
            f"The loss of the first update is {bad[0]}.{hidden}",
            "look at the batch, the learning rate and the precision; a division by 0 or a log of 0 is the usual cause",
        )
    elif odd and not args.fp16:  # its scaler searches for a scale at first
        session.error(
            UPDATE,
            f"The gradients of {_listed(odd)} are not finite, though the loss is.",
            "look for a root, a norm or a division at 0 in the forward",
        )
    elif probe.norms and not odd and not any(probe.norms.values()):
        session.warn(
            UPDATE,
            "All gradients are 0: the loss does not depend on what is trained.",
            "compute the loss from what the model gives, without `detach`, `argmax` or `item`",
        )
    problem = f"{len(unused)} parameters get no gradient in the first update: {_listed(unused)}."
    if unused and args.world_size > 1 and args.ddp_find_unused_parameters is False:
        way_out = "set `ddp_find_unused_parameters=True`, or freeze or remove them"
        session.error(UPDATE, f"{problem} DDP waits for them.", way_out)
    elif unused:
        way_out = "freeze them (`requires_grad_(False)`), if that is meant; DDP has to look for them"
        session.note(UPDATE, problem, way_out)


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return ", ".join(found[:_MOST_NAMES]) + more


def _load(session: Session, checkpoint: str) -> None:
    """Measure a checkpoint, load its weights, optimizer and schedule, and compare the weights."""
    trainer = session.trainer
    if not trainer.args.should_save or not os.path.isdir(checkpoint):
        return
    found = (os.path.join(place, file) for place, _, files in os.walk(checkpoint) for file in files)
    session.checkpoint_bytes = sum(os.path.getsize(path) for path in found)
    before = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    try:
        trainer._load_from_checkpoint(checkpoint)
        if not trainer.args.save_only_model:
            trainer._load_optimizer_and_scheduler(checkpoint)
    except Exception as error:
        session.raised(error, LOAD, "The saved checkpoint cannot be loaded again")
        return
    session.checked.append(LOAD)
    after: Mapping[str, torch.Tensor] = trainer.model.state_dict()
    changed = [name for name, tensor in before.items() if not _is_same(tensor, after[name])]
    lacking = list(trainer._weights_not_loaded)
    if lacking:
        session.warn(
            LOAD,
            f"A checkpoint does not hold {_listed(lacking)}: a run that resumes from it begins with other values.",
            "let `state_dict` or `save_pretrained` of the model write them",
        )
    elif changed:
        session.warn(
            LOAD,
            f"{_listed(changed)} have other values after they were saved and loaded.",
            "look at what `_save`, `save_pretrained` and `state_dict` do with them",
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    same = one == other.to(one.dtype)
    return bool((same | (one.isnan() & other.isnan())).all()) if one.is_floating_point() else bool(same.all())


def check_resumption(session: Session) -> None:
    """Load the checkpoint from which the run will resume, and make the update after it."""
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
        vars(session.trainer.args)["ignore_data_skip"] = True
        try:
            folder = session.output_dir
            manifest.recover(folder)  # as the run will
            newest, skipped = (wanted, {}) if isinstance(wanted, str) else newest_checkpoint(folder)
            if newest is None:
                raise nothing_to_resume(folder, skipped)
            Trainer.train(session.trainer, newest)
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
