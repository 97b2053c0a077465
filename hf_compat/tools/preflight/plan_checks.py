"""What the arguments say of a run, against the counts of its data: nothing is started."""

from __future__ import annotations

from collections.abc import Iterator

from hf_compat.hf.builtin_callbacks import EarlyStoppingCallback
from hf_compat.hf.callbacks import is_callback_of
from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.hf.state import TrainerState
from hf_compat.runtime.inspection import has_length
from hf_compat.tools.preflight.session import Session

CHECK = "plan"


def check_plan(session: Session) -> None:
    """Compare epochs, updates, warmup and intervals."""
    counts = session.counts
    if counts is None:
        session.leave_out(CHECK, "the training data does not say how many updates there are")
        return
    with session.checking(CHECK):
        updates = counts.max_updates
        if updates <= 0:
            session.error(
                CHECK,
                f"The run has 0 updates (`num_train_epochs={session.trainer.args.num_train_epochs}`, "
                f"`max_steps={session.trainer.args.max_steps}`): nothing would be trained.",
                "set `num_train_epochs` or `max_steps`",
            )
            return
        args = session.trainer.args
        warmup = args.get_warmup_steps(updates)
        if warmup >= updates:
            session.warn(
                CHECK,
                f"The warmup takes {warmup} updates and the run has {updates}: the learning rate never reaches "
                f"`learning_rate={args.learning_rate}`.",
                f"set `warmup_steps` well below {updates}",
            )
        args, steps = session.trainer.args, intervals(session, updates)
        consequences = {
            "logging": "nothing is logged but the summary at the end",
            "eval": "only the last update is evaluated",
            "save": "only the last update is saved",
        }
        for name, consequence in consequences.items():
            strategy = getattr(args, f"{name}_strategy")
            if strategy == "steps" and steps[name] > updates:
                session.note(
                    CHECK, f"`{name}_steps={getattr(args, f'{name}_steps')}` and the run has {updates} updates: "
                    f"{consequence}.", f"set `{name}_steps` below {updates}, if you want more",
                )  # fmt: skip
        by_steps = args.eval_strategy == IntervalStrategy.STEPS and args.save_strategy == SaveStrategy.STEPS
        if args.metric_for_best_model is not None and by_steps and steps["save"] % max(steps["eval"], 1):
            session.note(
                CHECK,
                f"`save_steps={steps['save']:g}` is no multiple of `eval_steps={steps['eval']:g}`: the update with the "
                f"best {args.metric_for_best_model!r} may not be among those that are saved.",
                "let checkpoints follow evaluations: make `save_steps` a multiple of `eval_steps`",
            )
        _check_dropped(session)
        _check_window(session)


def intervals(session: Session, updates: int) -> dict[str, float]:
    """Return the updates between logs, evaluations and saves; a share of the run is one of its updates here."""
    state = TrainerState()
    state.compute_steps(session.trainer.args, updates)
    return {"logging": state.logging_steps, "eval": state.eval_steps, "save": state.save_steps}


def _check_dropped(session: Session) -> None:
    """Say how much of an epoch `dataloader_drop_last` leaves out."""
    trainer, counts = session.trainer, session.counts
    data = trainer.train_dataset
    if counts is None or not trainer.args.dataloader_drop_last or not has_length(data):
        return
    used = counts.micro_batches_per_epoch * trainer._train_batch_size * trainer.args.world_size
    left_out = len(data) - used
    if left_out > len(data) / 4:
        session.warn(
            CHECK,
            f"`dataloader_drop_last=True` leaves {left_out} of {len(data)} training samples out of every epoch.",
            "use a smaller `per_device_train_batch_size`, or keep the last batch",
        )


def _check_window(session: Session) -> None:
    counts, window = session.counts, session.trainer.args.gradient_accumulation_steps
    if counts is not None and not counts.is_endless and counts.micro_batches_per_epoch < window:
        session.note(
            CHECK,
            f"An epoch has {counts.micro_batches_per_epoch} micro-batches, and `gradient_accumulation_steps={window}`: "
            "each epoch makes one update of fewer.",
            "accumulate fewer, if more updates are wanted",
        )


def check_metric_followers(session: Session) -> None:
    """Look whether what follows a metric has one: early stopping, a schedule, the best model."""
    with session.checking("followed metric"):
        for who in _followers(session):
            args = session.trainer.args
            if args.metric_for_best_model is None:
                session.error(
                    "followed metric",
                    f"{who} follows a metric, and `metric_for_best_model` names none.",
                    'set `metric_for_best_model="loss"`, say',
                )
            if args.eval_strategy == IntervalStrategy.NO:
                session.error(
                    "followed metric",
                    f"{who} follows a metric, and `eval_strategy='no'` makes no evaluation.",
                    'set `eval_strategy="epoch"`, say',
                )


def _followers(session: Session) -> Iterator[str]:
    trainer = session.trainer
    if any(is_callback_of(one, EarlyStoppingCallback) for one in trainer.callback_handler.callbacks):
        yield "EarlyStoppingCallback"
    kind = getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type)
    if trainer.lr_scheduler is None and kind in ("reduce_lr_on_plateau", "greedy"):
        yield f"`lr_scheduler_type={kind!r}`"
