"""Check what the arguments ask of a run: its length, intervals, followed metric, devices and checkpoints."""

from __future__ import annotations

import math
import os
import shutil

import torch

from hf_compat.data.loader import PreparedDataLoader
from hf_compat.errors import HfCompatError
from hf_compat.hf.callbacks import EarlyStoppingCallback, is_callback_of
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.state import TrainerState
from hf_compat.plan.translate import translate
from hf_compat.runtime.inspection import has_length
from hf_compat.tools.isolation.plan import real_path
from hf_compat.tools.preflight.session import Session, existing_parent, weights_in_bytes

CHECK, FOLLOWED, DEVICES, SPACE = "plan", "followed metric", "devices", "disk space"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
# The consequence of an interval that is longer than the run.
_TOO_LONG = {
    "logging": "nothing is logged but the summary at the end",
    "eval": "only the last update is evaluated",
    "save": "only the last update is saved",
}


def check_plan(session: Session) -> None:
    """Compare epochs, updates and intervals."""
    counts, args = session.counts, session.trainer.args
    if counts is None:
        session.leave_out(CHECK, "the training data does not say how many updates there are")
        return
    with session.checking(CHECK):
        updates = counts.max_updates
        if updates <= 0:
            session.error(
                CHECK,
                f"The run has 0 updates (`num_train_epochs={args.num_train_epochs}`, "
                f"`max_steps={args.max_steps}`): nothing would be trained.",
                "set `num_train_epochs` or `max_steps`",
            )
            return
        steps = _intervals(session, updates)
        for name, consequence in _TOO_LONG.items():
            if getattr(args, f"{name}_strategy") == "steps" and steps[name] > updates:
                given = f"`{name}_steps={getattr(args, f'{name}_steps')}`"
                problem = f"{given} and the run has {updates} updates: {consequence}."
                session.note(CHECK, problem, f"set `{name}_steps` below {updates}, if you want more")
        by_steps = args.eval_strategy == IntervalStrategy.STEPS and args.save_strategy == SaveStrategy.STEPS
        if args.metric_for_best_model is not None and by_steps and steps["save"] % max(steps["eval"], 1):
            session.note(
                CHECK,
                f"`save_steps={steps['save']:g}` is not a multiple of `eval_steps={steps['eval']:g}`: the update with "
                f"the best {args.metric_for_best_model!r} may not be among those that are saved.",
                "let checkpoints follow evaluations: make `save_steps` a multiple of `eval_steps`",
            )
        _check_dropped(session, counts.micro_batches_per_epoch)
        window = args.gradient_accumulation_steps
        if not counts.is_endless and counts.micro_batches_per_epoch < window:
            session.note(
                CHECK,
                f"An epoch has {counts.micro_batches_per_epoch} micro-batches, and "
                f"`gradient_accumulation_steps={window}`: each epoch makes one update of fewer.",
                "accumulate fewer, if more updates are wanted",
            )


def _check_dropped(session: Session, batches: int) -> None:
    """Count the samples of an epoch that the run's own loader leaves out."""
    loader = session.loader
    if not isinstance(loader, PreparedDataLoader) or not loader.drops_last or not has_length(loader.dataset):
        return
    samples, size = loader.total_dataset_length, loader.total_batch_size
    if size is not None and samples - batches * size > samples / 4:
        session.warn(
            CHECK,
            f"`dataloader_drop_last=True` leaves {samples - batches * size} of {samples} training samples out of every "
            "epoch.",
            "use a smaller `per_device_train_batch_size`, or keep the last batch",
        )


def _intervals(session: Session, updates: int) -> dict[str, float]:
    """The updates between logs, evaluations and saves. A share of the run becomes a number of updates."""
    state = TrainerState()
    state.compute_steps(session.trainer.args, updates)
    return {"logging": state.logging_steps, "eval": state.eval_steps, "save": state.save_steps}


def check_metric_followers(session: Session) -> None:
    """Check that early stopping gets a metric."""
    args, callbacks = session.trainer.args, session.trainer.callback_handler.callbacks
    with session.checking(FOLLOWED):
        if not any(is_callback_of(one, EarlyStoppingCallback) for one in callbacks):
            return
        told = "EarlyStoppingCallback follows a metric, and"
        if args.metric_for_best_model is None:
            problem = f"{told} `metric_for_best_model` names none."
            session.error(FOLLOWED, problem, 'set `metric_for_best_model="loss"`, say')
        if args.eval_strategy == IntervalStrategy.NO:
            problem = f"{told} `eval_strategy='no'` makes no evaluation."
            session.error(FOLLOWED, problem, 'set `eval_strategy="epoch"`, say')


def check_devices(session: Session) -> None:
    """Read the strategy off the plan, and compare processes with devices."""
    trainer, args = session.trainer, session.trainer.args
    with session.checking(DEVICES):
        try:
            plan = translate(args, session.counts, trainer.model)
        except HfCompatError as error:
            session.raised(error, DEVICES, "The run cannot be planned")
            return
        session.strategy = plan.strategy
        told = f" in {args.world_size} processes by {plan.strategy}" if args.world_size > 1 else ""
        session.measured.append(f"trains on {plan.device}{told}, precision {plan.precision}")
        visible = torch.cuda.device_count()
        if args.device.type == "cpu" and visible and not args.use_cpu:
            problem = f"{visible} GPUs are there, and the run is on the CPU."
            session.warn(DEVICES, problem, "look at CUDA_VISIBLE_DEVICES")
        elif visible > 1 and args.world_size == 1 and args.device.type == "cuda":
            problem = f"{visible} GPUs are visible, and one process uses one of them."
            session.note(DEVICES, problem, f"`hf-compat run --devices {visible} …` uses all")


def in_words(size: float) -> str:
    """Write a number of bytes with a unit."""
    place = min(int(math.log(size, 1024)), len(_UNITS) - 1) if size >= 1 else 0
    return f"{size / 1024**place:.{0 if place == 0 else 1}f} {_UNITS[place]}"


def check_space(session: Session) -> None:
    """Compare the checkpoints that the run keeps with the room for them, and check that it may write."""
    args, place = session.trainer.args, existing_parent(session.output_dir)
    counts, strategy = session.counts, SaveStrategy(args.save_strategy)
    is_best = strategy == SaveStrategy.BEST  # an evaluation that is not better is not saved
    when = args.eval_strategy if is_best else strategy
    saves = 0
    if counts is not None and when != "no" and counts.max_updates > 0:
        every = _intervals(session, counts.max_updates)["eval" if is_best else "save"]
        saves = max(math.ceil(counts.max_updates / every), 1) if every > 0 else 1
        if when == "epoch":
            saves = 1 if counts.is_endless else counts.num_train_epochs
    with session.checking(SPACE):
        if saves == 0:
            return
        if not os.access(real_path(place), os.W_OK):
            problem = f"`output_dir={session.output_dir!r}` cannot be written to."
            session.error(SPACE, problem, "name a folder that can be")
        size, how = session.checkpoint_bytes, "measured"
        if size is None:
            size = weights_in_bytes(session.trainer.model) * (1 if args.save_only_model else 3)
            how = "estimated by its weights"
        kept = saves
        if args.save_total_limit:
            # Old checkpoints are removed when a new one is whole
            best = 1 if args.load_best_model_at_end and args.save_total_limit == 1 else 0
            kept = min(args.save_total_limit + best + 1, saves)
        needed, free = size * kept, shutil.disk_usage(real_path(place)).free
        counted = f"{saves} checkpoint{'s' if saves != 1 else ''}"
        session.measured.append(
            f"a checkpoint takes {in_words(size)} ({how}); of {counted} {kept} are there at once: "
            f"{in_words(needed)} of the {in_words(free)} that are free in {place}"
        )
        if needed > free:
            fits = free // max(size, 1)
            limit = f"set `save_total_limit={max(fits - 2, 1)}`, save less often, or make room"
            more = "" if args.save_only_model else "; `save_only_model=True` leaves out what it takes to resume"
            report = session.warn if is_best else session.error
            report(
                SPACE,
                f"The run keeps {kept} checkpoints of {in_words(size)} at once (of {counted} that it writes"
                f"{' if each evaluation is better' if is_best else ''}): "
                f"{in_words(needed)}, and {in_words(free)} are free in {place}.",
                f"{limit if fits > 1 else 'make room'}{more}",
            )
