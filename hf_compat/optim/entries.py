"""What one optimizer name stands for: where its class comes from, which options it takes, what it is built with.

`plain_optimizers.py` and `model_optimizers.py` make the entries; `optimizers.py` puts them into one table. HF words and
torch only; no optimizer's package is imported before one of its names is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_compat.errors import ArgumentError, MissingOptimizer
from hf_compat.hf.argument_values import read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames
from hf_compat.hf.value_types import Range, ValueType, number, whole_number
from hf_compat.runtime.text import did_you_mean, need

# An optimizer's options, of types that differ by optimizer.
Keywords: TypeAlias = dict[str, Any]
OptimizerClass: TypeAlias = type[torch.optim.Optimizer]
ClassAndKeywords: TypeAlias = tuple[OptimizerClass, Keywords]

_NOT_GIVEN = object()
FINITE = number()
NOT_NEGATIVE = number(Range(low=0))
BELOW_1 = number(Range(low=0, high=1, excludes_high=True))
COUNT = whole_number(Range(low=1))


@dataclass(frozen=True, slots=True)
class Option:
    """One option that an optimizer takes from `optim_args`.

    Args:
        kind: What it may be.
        default: Its value where it is not given; without one, the optimizer's own default counts.
    """

    kind: ValueType
    default: object = _NOT_GIVEN


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassSource:
    """Where an optimizer's class comes from.

    Args:
        modules: The module that has it, and those that had it in earlier releases.
        name: The class.
        install: What `pip install` takes to bring it.
    """

    modules: tuple[str, ...]
    name: str
    install: str

    @property
    def package(self) -> str:
        """The package that the class belongs to."""
        return self.modules[0].partition(".")[0]

    def load(self, for_what: str) -> OptimizerClass:
        """Import the class.

        Args:
            for_what: The optimizer that needs it; the error begins with it.

        Raises:
            MissingOptimizer: The package is missing, or is a release without this class.
        """
        found: OptimizerClass
        reasons = []
        for module in self.modules:
            try:
                found = getattr(need(module, self.install, for_what), self.name)
            except (AttributeError, ImportError) as error:
                reasons.append(error)
                continue
            return found
        raise MissingOptimizer(
            f"{for_what} needs {self.name} of the package {self.package}, which cannot be imported: "
            f"{reasons[0].__cause__ or reasons[0]}.\n\nHint: pip install {self.install}",
            name=self.package,
        ) from reasons[0]


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """What one optimizer is asked for.

    Args:
        args: The run's arguments.
        model: The model that is trained; None where it is not known yet.
        options: Those of `optim_args`, read by their types; defaults of the table are filled in.
    """

    args: TrainingArguments
    model: nn.Module | None
    options: Keywords

    @property
    def name(self) -> str:
        """The optimizer's name."""
        return OptimizerNames(self.args.optim).value

    @property
    def adam(self) -> Keywords:
        """The keywords of every Adam: `betas` and `eps`."""
        return {"betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}


# From a request and the loaded class to what the optimizer is built with; `lr` is added where it is missing.
Chooser = Callable[[OptimizerRequest, OptimizerClass], ClassAndKeywords]


def with_options(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the class with the options of `optim_args` alone."""
    return found, dict(request.options)


def with_adam(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the class with the betas and the epsilon of the arguments, and the options."""
    return found, {**request.adam, **request.options}


def with_adam_and_decay(request: OptimizerRequest, found: OptimizerClass) -> ClassAndKeywords:
    """Choose the same with the weight decay, which the optimizer does not take from its groups alone."""
    return found, {**request.adam, "weight_decay": request.args.weight_decay, **request.options}


def no_check(request: OptimizerRequest) -> None:
    """Refuse nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """One optimizer name.

    Args:
        source: Where its class comes from.
        options: What it takes from `optim_args`, by name.
        choose: Makes class and keywords.
        check: Refuses what cannot be trained; asked when a Trainer is made, with its model where there is one.
        needs_model: Class and keywords can only be made with the model.
        device: What the optimizer's kernels need besides a CPU; empty where a CPU does.
        refused_with: `fsdp` or `deepspeed`, and why the optimizer cannot train with it.
    """

    source: ClassSource
    options: Mapping[str, Option] = field(default_factory=dict)
    choose: Chooser = with_options
    check: Callable[[OptimizerRequest], None] = no_check
    needs_model: bool = False
    device: str = ""
    refused_with: Mapping[str, str] = field(default_factory=dict)


def read_options(args: TrainingArguments, entry: OptimizerEntry) -> Keywords:
    """Read `optim_args` as the options of an entry.

    Raises:
        ArgumentError: A part that is no `key=value`, an option that the optimizer does not take, or a value of
            another type.
    """
    given = parse_optim_args(args.optim_args)
    for name in given:
        if name not in entry.options:
            takes = f"takes {', '.join(entry.options)}" if entry.options else "takes no options"
            others = (
                "the learning rate, the weight decay, and the betas and epsilon of Adam are arguments of their own."
            )
            raise ArgumentError(
                f"`optim_args={args.optim_args!r}` has {name}, but `optim={OptimizerNames(args.optim).value!r}` "
                f"{takes}.\n\nHint: {did_you_mean(name, entry.options, others)}"
            )
    read: Keywords = {
        name: option.default for name, option in entry.options.items() if option.default is not _NOT_GIVEN
    }
    for name, text in given.items():
        read[name] = read_as(f"optim_args: {name}", entry.options[name].kind, text)
    return read


def parse_optim_args(optim_args: str | None) -> dict[str, str]:
    """Split `key=value,key=value`.

    Raises:
        ArgumentError: A part without an equals sign, or a key that stands there twice.
    """
    parsed: dict[str, str] = {}
    for part in (optim_args or "").replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if part and not (equals and key):
            raise ArgumentError(
                f"`optim_args={optim_args!r}` has the part {part!r}.\n\nHint: write key=value,key=value."
            )
        if parsed.get(key, value) != value:
            raise ArgumentError(f"`optim_args={optim_args!r}` has {key} twice.\n\nHint: write it once.")
        if part:
            parsed[key] = value
    return parsed
