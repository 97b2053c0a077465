"""`TrainingArguments` with HF's 114 fields, and `Seq2SeqTrainingArguments` with five more for generation.

Types are in `argument_values.py`, and rules over several fields in `arguments_rules.py`. Properties, dumps and the
`set_*` methods are in `arguments_views.py`. Old names are in `legacy.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from hf_compat.errors import ArgumentError, InertArgumentWarning, warn_user
from hf_compat.hf import argument_values as values
from hf_compat.hf import arguments_rules as rules
from hf_compat.hf import inert as when
from hf_compat.hf import legacy
from hf_compat.hf.argument_values import ArgumentCheck, ArgumentValue, checks_of, default_of, read_all
from hf_compat.hf.arguments_views import ArgumentViews
from hf_compat.hf.fields import arg, declare
from hf_compat.hf.legacy import OLD_NAMES, OldAttributes, Translation
from hf_compat.hf.rows import OWN_ARGUMENTS, Row
from hf_compat.hf.value_types import options_value
from hf_compat.runtime.launch import environment, read_launch
from hf_compat.runtime.text import nearest, shown
from hf_compat.runtime.tracebacks import with_brief_traceback


class AcceptOldNames(type):
    """Metaclass whose constructor accepts every old argument name, in subclasses too, and reads the values.

    One error lists everything wrong with a call, before a subclass's `__post_init__` runs.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's names, which scripts read with `inspect.signature` to filter their settings."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]  # of this very class
        return own.replace(parameters=list(own.parameters.values())[1:])

    @with_brief_traceback
    def __call__(cls, *args: ArgumentValue, **kwargs: ArgumentValue) -> Any:  # an instance of the class
        takes = _interface_of(cls)
        by_place = dict(zip(takes.places, args, strict=False))
        if not by_place.keys().isdisjoint(kwargs):
            return super().__call__(*args, **kwargs)  # Python raises, because a value is given twice
        caller = sys._getframe(2)  # beyond the decorator
        source = legacy.source_of_replace(cls, caller) if caller.f_code is legacy.REPLACE else None
        if source is not None:
            of_source = {name: getattr(source, name) for name in takes.own}
            of_source.pop("output_store", None)  # it follows the output folder
            kwargs = of_source | legacy.without_outdated(source, kwargs, takes.checks)
        launch = read_launch()
        if launch.process_index > 0:  # only rank 0 warns about arguments. The user's filters take precedence
            warnings.simplefilter("ignore", InertArgumentWarning, append=True)
        kwargs = rules.with_store(source, by_place, kwargs)
        # Read all values
        given, problems = read_all(takes.checks, by_place | kwargs)
        own_names = takes.own & kwargs.keys() & given.keys()
        own = dict(zip(own_names, map(given.pop, own_names), strict=True))
        # Translate them into current names
        old: Translation = {}
        known = takes.known | (given.keys() - OLD_NAMES.keys() if takes.any_name else set())
        if not given.keys() <= known:
            # Options before parsing, because an old name may add missing ones
            config = kwargs.get("accelerator_config")
            written = {"accelerator_config": config} if values.holds_options(config) else {}
            given, old = legacy.translate_legacy({**given, **written}, known, takes.checks)
        if problems:
            raise ArgumentError("\n\n".join([*problems, *further_problems(given)]))
        # Add the defaults of the generation that the call, the environment or the replaced release sets
        compat, defaults = rules.read_profile(
            own.pop("compat", None), given, known, takes.checks, TrainingArguments._checks
        )
        given.update(defaults)
        places = [*map(given.pop, by_place), *args[len(by_place) :]]
        instance: ArgumentValue = cls.__new__(cls, *places, **given)  # type: ignore[arg-type]  # of the class
        instance.__dict__["_launch"] = launch
        if compat != values.NEWEST or defaults:
            instance.__dict__.update({"compat": compat, "_defaults_of_profile": tuple(defaults)})
        if source is not None:
            legacy.hand_over_old(source, instance, kwargs)
        if old:
            legacy.remember(instance, old)  # a subclass's `__post_init__` reads old names, too
        instance.__init__(*places, **given)
        for name, value in own.items():
            setattr(instance, name, value)
        rules.keep_direction(source, instance)
        return instance


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interface:
    """The parameters of a class of arguments, whose `__init__` may be a subclass's."""

    places: tuple[str, ...]  # names by position
    known: frozenset[str]  # all names
    any_name: bool  # whether it accepts any other name
    own: Set[str]  # our own arguments that the class does not have as fields
    checks: Mapping[str, ArgumentCheck]  # checks of its arguments


@functools.lru_cache(maxsize=64)
def _interface_of(kind: type) -> _Interface:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]  # of this very class
    return _Interface(
        places=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        known=frozenset({f.name for f in fields(kind) if f.init} | {p.name for p in parameters}),
        any_name=any(p.kind is p.VAR_KEYWORD for p in parameters),
        own=OWN_ARGUMENTS.keys() - {f.name for f in fields(kind)},
        checks=kind._checks(),  # type: ignore[attr-defined]  # a subclass of TrainingArguments
    )


def further_problems(good: Mapping[str, object], unknown: Collection[str] = ()) -> list[str]:
    """List the errors of the rules over several fields, for values that are allowed by themselves.

    Args:
        good: The values. Other fields have their defaults.
        unknown: Fields and properties whose value is not known. A rule that reads one ends there.
    """
    trial, problems = _Trial.__new__(_Trial), []
    try:
        for known in fields(TrainingArguments):
            setattr(trial, known.name, good.get(known.name, default_of(known)))
        rules.normalise_arguments(trial)
        rules.fill_in(trial)
    except ArgumentError as error:
        return [str(error)]
    trial.__dict__["_unknown"] = unknown
    for rule in rules.RULES:
        with contextlib.suppress(_UnknownValue):
            for problem in rule(trial):
                problems.append(problem)  # noqa: PERF402  # those before an unknown value count
    return problems


@dataclass(repr=False)
class TrainingArguments(ArgumentViews, OldAttributes, metaclass=AcceptOldNames):
    """How to train, evaluate and save.

    Every argument name of `transformers` 3.0 to 5.23 is accepted. The current names are the fields below, and
    `hf/legacy.py` translates or explains the older ones.

    Raises:
        UnknownArgument: No release has had the name (a `TypeError`).
        ArgumentError: A value, or a combination of values, cannot work (a `ValueError`).
        UnsupportedArgument: A value is not supported.

    Mirrors:
        `transformers.TrainingArguments`. Names, defaults and properties are the same.

    Examples:
        >>> args = TrainingArguments("out", evaluation_strategy="steps", eval_steps=5, use_cpu=True)
        >>> args.eval_strategy.value, args.eval_steps
        ('steps', 5)
    """

    @classmethod
    def _checks(cls) -> Mapping[str, ArgumentCheck]:
        return checks_of(cls, next(base for base in cls.__mro__ if base.__module__ == __name__))

    def __setattr__(self, name: str, value: object) -> None:
        """Set an argument, or any other attribute.

        Raises:
            ArgumentError: The argument cannot have that value, and keeps its old one.
        """
        takes = _interface_of(type(self))
        is_complete = "mixed_precision" in self.__dict__  # the last one set. Afterwards fields keep their form
        if name in OLD_NAMES:
            is_ours = name == "place_model_on_device" or not hasattr(type(self), name)  # not a subclass's
            if is_ours and name not in takes.checks:
                legacy.assign_old(self, value, name=name)
                return
            if is_complete:
                legacy.follow_declared(self, name, value)
        if name == "compat" and name in takes.own:
            raise ArgumentError(
                f"`{shown(name, value)}` comes too late: it gives the defaults while the arguments are made.\n\n"
                'Hint: `TrainingArguments(…, compat="4")`.'
            )
        check = takes.checks.get(name)
        if check is None and is_complete and name[0] != "_" and not hasattr(self, name):
            near = nearest(name, takes.checks, cutoff=0.85)
            if near is not None:
                told = f"`args.{shown(name, value)}` sets no argument. It is kept as an attribute."
                warn_user(f"{told}\n\nHint: did you mean `{near}`?")
        if check is not None and value is not check.default and not check.is_lenient:
            value = check.read(value)
        if is_complete:
            value = rules.formed(self, name, value)
        if name == "greater_is_better" and self._infers_direction:
            self._infers_direction = False
        super().__setattr__(name, value)

    def __setstate__(self, state: Mapping[str, ArgumentValue]) -> None:
        legacy.read_old_state(self, state)

    def __post_init__(self) -> None:
        from hf_compat.hf.process_state import has_state, may_be_asked, share_deepspeed

        if legacy.declared_old_names(type(self)):
            legacy.obey_declared(self)
        if rules.generation_beside() == "4":  # 4.x sets it when arguments are made, whatever a launcher has passed
            self.local_rank = self._launch.local_process_index
        _ = self.device  # fixes the rank of this process
        rules.normalise_arguments(self)
        rules.fill_in(self)
        rules.follow_machine(self)
        # JSON text that a command line gave becomes a dict
        for name in set(self._VALID_DICT_FIELDS) - set(TrainingArguments._VALID_DICT_FIELDS):
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                setattr(self, name, ArgumentCheck(name, options_value, None).read(value))
        self._validate_args()
        rules.choose_tf32(self)
        config: ArgumentValue = self.accelerator_config  # an object by now
        if config.use_configured_state:
            if not has_state():
                raise ArgumentError(
                    "`accelerator_config`'s `use_configured_state=True` keeps Accelerate's state: there is none.\n\n"
                    "Hint: make an `accelerate.Accelerator()` before the arguments, or leave the option out."
                )
        elif may_be_asked():
            _ = self.distributed_state
        if self.deepspeed or environment.get("ACCELERATE_USE_DEEPSPEED"):
            share_deepspeed(self)

    def _validate_args(self) -> None:
        """Check the arguments together. Subclasses may extend this method.

        Raises:
            ArgumentError: Values that cannot work together.

        Mirrors:
            `transformers.TrainingArguments._validate_args`.
        """
        problems = [problem for rule in rules.RULES for problem in rule(self)]
        if problems:
            raise ArgumentError("\n\n".join(problems))


declare(TrainingArguments)


class _UnknownValue(Exception):
    """A rule reads a value that is not known."""


class _Trial(TrainingArguments):
    """Arguments that are only checked, and of which some are unknown."""

    def __getattribute__(self, name: str) -> object:
        if name in object.__getattribute__(self, "__dict__").get("_unknown", ()):
            raise _UnknownValue(name)
        return super().__getattribute__(name)


# A `transformers.GenerationConfig`; transformers may be absent when command lines are made from these hints.
GenerationOptions: TypeAlias = Any


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """How to train, evaluate and save a model that is evaluated on what it generates.

    Raises:
        ArgumentError: A value, or a combination of values, that cannot work (a `ValueError`).

    Mirrors:
        `transformers.Seq2SeqTrainingArguments`. Names, order and defaults are the same.

    Differs:
        `generation_config` may also be a dict of options, or its JSON. `sortish_sampler` changes nothing, as in
        transformers, and says so.

    Examples:
        >>> args = Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_num_beams=4, use_cpu=True)
        >>> args.to_dict()["generation_num_beams"]
        4
    """

    # fmt: off
    sortish_sampler: bool = arg(
        False, "Sort samples roughly by length. Today `train_sampling_strategy` does that.", Row(
        "nothing", "nothing",
        inert=(when.NO_SUCH_SAMPLER,)))
    predict_with_generate: bool = arg(False, "Evaluate and predict on what the model generates (ROUGE, BLEU).", Row(
        "`generate` in evaluations and predictions", "taken", inert=(when.CANNOT_GENERATE,)))
    generation_max_length: int | None = arg(None, "`max_length` of generations; None is the model's own.", Row(
        "`max_length` of `generate` in evaluations and predictions", "taken", allowed=values.COUNT,
        inert=(when.NO_GENERATION, when.CANNOT_GENERATE)))
    generation_num_beams: int | None = arg(None, "`num_beams` of generations; None is the model's own.", Row(
        "`num_beams` of `generate` in evaluations and predictions", "taken", allowed=values.COUNT,
        inert=(when.NO_GENERATION, when.CANNOT_GENERATE)))
    generation_config: str | Path | GenerationOptions | None = arg(
        None, "Generation options: a model's name, a folder, a JSON file, or an object.", Row(
        "model.generation_config", "taken", kind=values.generation_config,
        inert=(when.NO_GENERATION, when.CANNOT_GENERATE)))
    # fmt: on

    def to_dict(self) -> dict[str, ArgumentValue]:
        """Return the fields as plain values. A generation config becomes a dict, and a path its text.

        Mirrors:
            `transformers.Seq2SeqTrainingArguments.to_dict`.
        """
        values = super().to_dict()
        config = values["generation_config"]
        if callable(getattr(config, "to_dict", None)):
            values["generation_config"] = config.to_dict()
        elif isinstance(config, os.PathLike):
            values["generation_config"] = os.fspath(config)
        return values


declare(Seq2SeqTrainingArguments)
