"""`explain`: the plan for people. What each argument becomes, and what Lightning is told."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum

from hf_compat.errors import ArgumentError, MissingOptimizer, UnsupportedArgument
from hf_compat.hf.argument_values import ALONE, ROWS, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.html_text import ShownAsPrinted
from hf_compat.hf.profiles import NEWEST, PROFILES, RELEASES, release_of
from hf_compat.hf.value_types import Range, number
from hf_compat.interop.arguments import as_our_arguments, unknown_arguments
from hf_compat.plan.argument_support import default_of
from hf_compat.plan.lightning_plan import LightningPlan
from hf_compat.plan.memory_estimate import size_of_run
from hf_compat.plan.optimization_checks import check_optimization
from hf_compat.plan.run_counts import RunCounts
from hf_compat.plan.translate import translate
from hf_compat.runtime.text import hide_secrets, is_secret, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedArgument:
    """One argument that was set away from its default.

    Args:
        name: Its name today.
        value: Its value.
        becomes: Where it goes, or why it goes nowhere.
    """

    name: str
    value: object
    becomes: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(ShownAsPrinted):
    """What a set of arguments means here. `print` it, or read `to_json()`.

    Args:
        arguments: The arguments that were set away from their defaults.
        plan: What Lightning is told; None where something is refused.
        refused: Why nothing would run; empty where it would.
        sizes: Memory, traffic and checkpoints, in words; empty where the model's size is not known.
        profile: The generation of transformers whose defaults count.
        other_defaults: Where they are in force, and not those of today.
    """

    arguments: tuple[ExplainedArgument, ...]
    plan: LightningPlan | None
    refused: str = ""
    sizes: tuple[str, ...] = ()
    profile: str = NEWEST
    other_defaults: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return everything as JSON."""
        plan = None if self.plan is None else asdict(self.plan)
        listed = [asdict(argument) for argument in self.arguments]
        told = {
            "arguments": listed,
            "plan": plan,
            "refused": self.refused,
            "sizes": self.sizes,
            "profile": self.profile,
            "other_defaults": self.other_defaults,
        }
        return json.dumps(told, indent=2, default=str)

    def __str__(self) -> str:
        names = [f"{argument.name}={argument.value!r}" for argument in self.arguments]
        width = min(max((len(name) for name in names), default=0), 48)
        lines = [f"  {name:<{width}}  → {a.becomes}" for name, a in zip(names, self.arguments, strict=True)]
        told = ["refused:", self.refused]
        if self.plan is not None:
            settings = {"precision": self.plan.precision, **self.plan.trainer_settings()}
            told = ["lightning.Trainer:", *(f"  {k}={value!r}" for k, value in settings.items() if value is not None)]
            if self.plan.world_size > 1:
                options = ", ".join(f"{k}={value!r}" for k, value in self.plan.strategy_options.items()) or "no options"
                told.append(f"  strategy={self.plan.strategy!r} over {self.plan.world_size} processes; {options}")
            told += [f"  {line}" for line in self.sizes]
            told.append(
                f"  one batch = one update = {self.plan.micro_batches_per_update} micro-batch(es) of "
                f"{self.plan.micro_batch_size}; clipping by the module at {self.plan.gradient_clip_norm}"
            )
        head = f"defaults of transformers {release_of(self.profile)} (compat={self.profile!r}):"
        defaults = [head, *(f"  {line}" for line in self.other_defaults or ("as today's",)), ""]
        shown_first = defaults if self.profile != NEWEST or self.other_defaults else []
        return "\n".join([*shown_first, "arguments set away from their defaults:", *(lines or ["  none"]), "", *told])


def explain(
    args: TrainingArguments,
    counts: RunCounts | None = None,
    parameters: float | None = None,
    trained: float | None = None,
) -> Explanation:
    """Explain the effect of arguments: the destination of each, and the settings of the Lightning trainer.

    Args:
        args: The training arguments, or `transformers`' own.
        counts: Counts of the run, where its data is known.
        parameters: Number of the model's parameters. Adds the sizes of a run on each device.
        trained: Number of trained parameters, those of LoRA's adapters, say. None means all.

    Returns:
        The explanation. Refused arguments are part of it, not raised.

    Raises:
        ArgumentError: `args` are not training arguments, or `parameters` is not a number.

    Examples:
        >>> explanation = explain(TrainingArguments("out", use_cpu=True, max_grad_norm=0.5))
        >>> [argument.name for argument in explanation.arguments if argument.value == 0.5]
        ['max_grad_norm']
    """
    unknown = unknown_arguments(args)
    args = as_our_arguments(args)
    if counts is not None and not isinstance(counts, RunCounts):
        raise ArgumentError(
            f"`{shown('counts', counts)}` is no RunCounts.\n\nHint: leave it out, or `make_run_counts`."
        )
    size, part = (
        None if given is None else float(str(read_as(name, number(Range(low=0)), given)))
        for name, given in (("parameters", parameters), ("trained", trained))
    )
    if size is not None and part is not None and part > size:
        raise ArgumentError(f"`trained={trained!r}` is more than `parameters={parameters!r}`.")
    plan: LightningPlan | None = None
    refused = ""
    try:
        check_optimization(args)
        plan = translate(args, counts)
    except (ArgumentError, MissingOptimizer, UnsupportedArgument) as error:
        refused = str(error)
    by_profile = tuple(vars(args).get("_defaults_of_profile", ()))
    todays = {field.name: default_of(field) for field in fields(args)} | PROFILES[NEWEST]
    sizes: tuple[str, ...] = ()
    if plan is not None and size:
        optim = str(getattr(args.optim, "value", args.optim))
        sizes = tuple(size_of_run(plan, size, part, optim, str(args.optim_args or "")).lines())
    return Explanation(
        arguments=(*_explained(args, unknown, by_profile), *_unknown(unknown)),
        plan=plan,
        refused=refused,
        sizes=sizes,
        profile=args.compat if args.compat in RELEASES else NEWEST,  # a subclass may have a field of that name
        other_defaults=tuple(
            f"{shown(name, getattr(args, name))}  (transformers {RELEASES[NEWEST]}: {todays[name]!r})"
            for name in by_profile
        ),
    )


def _unknown(values: Mapping[str, object]) -> Iterator[ExplainedArgument]:
    for name, value in values.items():
        told = "<hidden>" if is_secret(name) else hide_secrets(value)
        becomes = "nothing: an argument of a newer transformers, which this release of hf_compat does not know"
        yield ExplainedArgument(name=name, value=told, becomes=becomes)


def _explained(
    args: TrainingArguments, unknown: Collection[str], by_profile: Collection[str]
) -> Iterator[ExplainedArgument]:
    """Yield the arguments that are set away from today's defaults, by the user or by another generation's."""
    for field in fields(args):
        if field.name in unknown:
            continue
        value = getattr(args, field.name)
        value = value.value if isinstance(value, Enum) else value
        if field.name == "accelerator_config":  # an object by now
            is_default = value == type(value)()
        else:
            default = default_of(field)
            is_default = value is default or (default is not None and bool(value == default))
        if not is_default:
            told = "<hidden>" if is_secret(field.name) else hide_secrets(value)
            row = ROWS.get(field.name)
            if row is None:
                becomes = "a field of your subclass"
            elif row.inert == ALONE and args.world_size > 1:
                becomes = row.to
            else:
                becomes = row.inert or row.to
            if field.name in by_profile:
                becomes += f" (the default of transformers {release_of(args.compat)})"
            yield ExplainedArgument(name=field.name, value=told, becomes=becomes)
