"""Make the run's own optimizer and schedule, and step the schedule through the run."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim.lr_scheduler import LambdaLR

from hf_compat.hf.enums import IntervalStrategy
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule, follows_metric
from hf_compat.optim.stepping import LayerWiseDummyOptimizer, behaviour_of
from hf_compat.tools.preflight.session import Session
from hf_compat.trainer import Trainer

CHECK, FOLLOWED = "schedule", "followed metric"
_MOST_STEPS = 10_000  # that are made, whatever the length of the run
_ROUNDING = 1 - 1e-9


def check_schedule(session: Session) -> None:
    """Find a schedule that does not last for the run, that never reaches the rate, or that gets no metric."""
    trainer, counts, args = session.trainer, session.counts, session.trainer.args
    updates = 0 if counts is None else counts.max_updates
    if updates <= 0:
        session.leave_out(CHECK, "the training data does not say how many updates there are")
        return
    follower, highest = "", None
    try:
        with session.on_a_copy(name="schedule"):
            if trainer._created_lr_scheduler:  # by an earlier `train`; this one makes its own
                trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
            trainer.create_optimizer_and_scheduler(updates)
            behaviour_of(trainer.optimizer).detach()  # some optimizers hang hooks on the parameters
            if follows_metric(trainer.lr_scheduler):
                follower = type(trainer.lr_scheduler).__name__
            elif not isinstance(trainer.optimizer, LayerWiseDummyOptimizer):  # its schedule sets the logged rate alone
                highest = _highest_rate(trainer, updates)
    except Exception as error:
        if session.has_error("update"):
            session.leave_out(CHECK, "the first update fails, perhaps for the same reason")
        else:
            session.raised(error, CHECK, "The optimizer and its schedule do not last for the run")
        return
    session.checked.append(CHECK)
    if follower and args.eval_strategy == IntervalStrategy.NO:
        problem = f"{follower} follows a metric, and `eval_strategy='no'` makes no evaluation: the rate stays."
        session.warn(FOLLOWED, problem, 'set `eval_strategy="epoch"`, say')
    elif follower and args.metric_for_best_model is None:
        problem = f"{follower} follows a metric, and `metric_for_best_model` names none."
        session.error(FOLLOWED, problem, 'set `metric_for_best_model="loss"`, say')
    if highest is not None:
        rate, wanted, is_rising = highest
        told = f"`learning_rate={wanted}`" if wanted == args.learning_rate else f"the optimizer's {wanted}"
        warmup = args.get_warmup_steps(updates)
        by_warmup = is_rising and warmup >= updates
        why = f", as the warmup takes {warmup} updates" if by_warmup else ""
        session.warn(
            CHECK,
            f"The learning rate never reaches {told}: it is {rate:g} at most in {updates} updates{why}.",
            f"set `warmup_steps` well below {updates}" if by_warmup else "look at the schedule and its options",
        )


def _highest_rate(trainer: Trainer, updates: int) -> tuple[float, float, bool] | None:
    """Step the schedule through the run. None if a rate reaches the optimizer's, or if that is not known.

    Returns:
        The highest rate, the optimizer's, and whether it is the last one, too.
    """
    default = trainer.args.learning_rate if isinstance(trainer.lr_scheduler, DeepSpeedSchedule) else None
    wanted = [group.get("initial_lr", default) for group in trainer.optimizer.param_groups]
    if None in wanted:  # a schedule that is not torch's
        return None
    of_first: list[float] = []
    is_reached = False
    for rates in _rates(trainer, updates):  # to the end, as a schedule may raise there
        is_reached |= any(rate >= one * _ROUNDING for rate, one in zip(rates, wanted, strict=True))
        of_first.append(rates[0])
    is_known = len(of_first) != _MOST_STEPS or updates == _MOST_STEPS
    if is_reached or not is_known:
        return None
    return max(of_first), float(wanted[0]), max(of_first) == of_first[-1]


def _rates(trainer: Trainer, updates: int) -> Iterator[list[float]]:
    """Yield the rates of the run's updates by group, or of the first ones and of those that count."""
    schedule, groups = trainer.lr_scheduler, trainer.optimizer.param_groups
    for _ in range(min(updates, _MOST_STEPS)):
        yield [float(group["lr"]) for group in groups]
        schedule.step()
    if updates > _MOST_STEPS and trainer._created_lr_scheduler and isinstance(schedule, LambdaLR):
        # It knows the rate of any update. HF's schedules are highest after the warmup
        for update in (min(trainer.args.get_warmup_steps(updates), updates - 1), updates - 1):
            schedule.last_epoch = update - 1
            schedule.step()
            yield [float(group["lr"]) for group in groups]
