"""The optimizer with its groups and the schedule of the learning rate, as statements of `configure_optimizers`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import SchedulerType
from hf_compat.hf.value_types import plain
from hf_compat.runtime.inspection import is_replaced
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.sources import Import
from hf_compat.trainer import Trainer
from hf_compat.trainer_methods.steps import StepMethods

_MAKERS = ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler")
_PLACE = "`configure_optimizers` in `module.py`"
# The schedules that `schedule.jinja` writes.
_WRITTEN = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
    "inverse_sqrt", "polynomial",
)  # fmt: skip


@dataclass(slots=True)
class SchedulePart:
    """The schedule: one that the template `schedule.jinja` knows, or statements."""

    lines: list[str] = field(default_factory=list)
    kind: str = ""
    options: dict[str, str] = field(default_factory=dict)  # their values as Python
    takes_warmup: bool = False
    is_left: bool = False
    interval: str = "step"

    @staticmethod
    def of_arguments(args: TrainingArguments, updates: int, write: Expressions, findings: Findings) -> SchedulePart:
        """Make the schedule that the arguments name."""
        kind = SchedulerType(plain(args.lr_scheduler_type))
        warmup = args.get_warmup_steps(updates)
        if kind not in _WRITTEN:
            what = f"`lr_scheduler_type={kind.value!r}` has no short form in plain PyTorch here"
            return SchedulePart(findings.leave(what, _PLACE), is_left=True)
        # The options of the schedule, and its defaults
        given: dict[str, object] = dict(args.lr_scheduler_kwargs) if isinstance(args.lr_scheduler_kwargs, dict) else {}
        cycles = 1 if kind == SchedulerType.COSINE_WITH_RESTARTS else 0.5
        options = {"num_cycles": cycles, "timescale": warmup or 10_000, "lr_end": 1e-7, "power": 1.0, **given}
        options["num_cycles"] = float(options["num_cycles"])  # type: ignore[arg-type]  # a number
        least = options.pop("min_lr", None)
        if isinstance(least, (int, float)):
            options["min_lr_rate"] = least / args.learning_rate
        written = {name: write.of(value) for name, value in options.items()}
        return SchedulePart(kind=kind.value, options=written, takes_warmup=kind != SchedulerType.CONSTANT)


@dataclass
class OptimizerPart:
    """The body of `configure_optimizers`."""

    schedule: SchedulePart
    group_lines: list[str] = field(default_factory=list)
    optimizer_call: str = ""
    has_decay: bool = False  # whether weight decay divides the parameters into two groups
    no_decay: list[str] | None = None  # names without decay. None if vectors are those

    def take_arguments(
        self, trainer: Trainer, optimizer: torch.optim.Optimizer, write: Expressions, findings: Findings
    ) -> None:
        """Write the optimizer that `optim` names, with the groups that weight decay makes."""
        args, model = trainer.args, trainer.model
        kind, keywords = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, model)
        if kind is not type(optimizer) or len(optimizer.param_groups) > 2:
            self.take_given(model, optimizer, write)
            return
        if any(name in keywords for name in ("params", "model", "optimizer_dict")):
            raise CannotBeWritten("it brings parameter groups of its own")
        self.has_decay = args.weight_decay != 0
        if self.has_decay:  # two groups: matrices decay, or all but a list of names
            decaying = {id(p) for p in optimizer.param_groups[0]["params"]}
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            if any((p.ndim > 1) != (id(p) in decaying) for _, p in trained):
                self.no_decay = [name for name, p in trained if id(p) not in decaying]
        groups = "groups" if self.has_decay else "self.model.parameters()"
        if not self.has_decay and not all(p.requires_grad for p in model.parameters()):
            groups = "[p for p in self.model.parameters() if p.requires_grad]"
        options = {name: value for name, value in keywords.items() if name != "lr"}
        defaults = inspect.signature(kind).parameters
        if not self.has_decay and "weight_decay" in defaults and defaults["weight_decay"].default != 0:
            options["weight_decay"] = 0.0
        shown = [f"{name}={write.of(value)}" for name, value in options.items()]
        self.optimizer_call = (
            f"{_named_optimizer(optimizer, write)}({', '.join([groups, 'lr=self.learning_rate', *shown])})"
        )
        if type(optimizer).__module__.startswith("hf_compat"):
            findings.inexact.append(f"{kind.__name__} is transformers' own there")

    def take_given(self, model: nn.Module, optimizer: torch.optim.Optimizer, write: Expressions) -> None:
        """Write an optimizer that the script has made, with its groups by the names of the parameters."""
        names = {id(p): name for name, p in model.named_parameters()}
        defaults = optimizer.defaults
        self.group_lines = ["named = dict(self.model.named_parameters())", "groups: list[dict[str, Any]] = ["]
        for group in optimizer.param_groups:
            if not all(id(p) in names for p in group["params"]):
                raise CannotBeWritten("it steps parameters that the model does not have")
            members = [names[id(p)] for p in group["params"]]
            # a schedule that is made already has set the rate of the first update
            begun = {**group, "lr": group.get("initial_lr", group["lr"])}
            told = {name: value for name, value in begun.items() if name in defaults and value != defaults[name]}
            options = "".join(f', "{name}": {write.of(value)}' for name, value in told.items())
            chosen_names = f'"params": [named[name] for name in {write.of(members)}]'
            self.group_lines += ["    {", f"        {chosen_names}{options}", "    },"]
        self.group_lines.append("]")
        known = inspect.signature(type(optimizer)).parameters
        chosen = [name for name in defaults if name in known and name != "lr" and defaults[name] != known[name].default]
        shown = [f"{name}={write.of(defaults[name])}" for name in chosen if defaults[name] is not None]
        words = ["groups", f"lr={write.of(defaults['lr'])}", *shown]
        self.optimizer_call = f"{_named_optimizer(optimizer, write)}({', '.join(words)})"


def describe_optimizer(trainer: Trainer, updates: int, write: Expressions, findings: Findings) -> OptimizerPart:
    """Find out how the run's optimizer and schedule are made."""
    part = OptimizerPart(SchedulePart())
    own_optimizer, own_schedule, own_both = (is_replaced(trainer, name, StepMethods) for name in _MAKERS)
    given = trainer.optimizer is not None or own_optimizer or own_both
    schedule_given = trainer.lr_scheduler is not None or own_both
    if own_both:
        trainer.create_optimizer_and_scheduler(updates)
        schedule_given = trainer.lr_scheduler is not None
    optimizer = trainer.optimizer if trainer.optimizer is not None else trainer.create_optimizer()
    try:
        if given:
            part.take_given(trainer.model, optimizer, write)
        else:
            part.take_arguments(trainer, optimizer, write, findings)
    except CannotBeWritten as error:
        what = f"The optimizer, a {type(optimizer).__name__}, cannot be written: {error}"
        return OptimizerPart(SchedulePart(findings.leave(what, _PLACE), is_left=True))
    if not (schedule_given or own_schedule):
        part.schedule = SchedulePart.of_arguments(trainer.args, updates, write, findings)
        return part
    schedule = trainer.lr_scheduler or trainer.create_scheduler(updates, optimizer) or trainer.lr_scheduler
    write.known[id(optimizer)] = "optimizer"
    try:
        # It is written by the call that made it, so its state must be the first one
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            raise CannotBeWritten("it follows a metric, or is not an `LRScheduler` of torch")
        if getattr(schedule, "optimizer", optimizer) is not optimizer:
            raise CannotBeWritten("it sets the rates of another optimizer")
        if getattr(schedule, "last_epoch", 0) != 0:
            raise CannotBeWritten(f"it has been stepped {schedule.last_epoch} times before `train()`")
        part.schedule = SchedulePart([f"scheduler = {write.of(schedule)}"])
    except CannotBeWritten as error:
        what = f"The schedule is a {type(schedule).__name__} that the script has made, and cannot be written: {error}"
        part.schedule = SchedulePart(findings.leave(what, _PLACE), is_left=True)
    finally:
        del write.known[id(optimizer)]
    return part


def _named_optimizer(optimizer: torch.optim.Optimizer, write: Expressions) -> str:
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        write.import_(Import("torch", None, "torch"))
        return f"torch.optim.{kind.__name__}"
    if kind.__name__ == "Adafactor" and kind.__module__.startswith("hf_compat"):
        return write.named("transformers.optimization", "Adafactor")
    return write.of(kind)
