"""Keywords of training arguments, of any release, as they are written today. Decides; changes no tree.

The rows of `hf/legacy.py` say what an old name means. Constants are translated by them; an expression is wrapped where
that is exact, and left to a person where it is not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import libcst as cst

from hf_compat.hf.argument_values import OLD_OPTIMIZERS
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES, is_harmless
from hf_compat.hf.value_types import TRUTH_VALUE
from hf_compat.tools.migration.elements import Edit, constant, wrapped
from hf_compat.tools.migration.report import Target

# What an argument of today is where an old flag is off: its default in every release.
OFF: dict[str, object] = {
    "eval_strategy": "no",
    "train_sampling_strategy": "random",
    "include_for_metrics": [],
    "include_num_input_tokens_seen": "no",
}
GONE_IN_5 = {
    "logging_dir": "5.15 has no such argument: set the environment variable TENSORBOARD_LOGGING_DIR to it",
    "overwrite_output_dir": "5.x has no such argument, and never wipes the folder",
    "place_model_on_device": "5.x has no such argument: override the property of that name",
    "push_to_hub_organization": "5.x has no such argument: put it before hub_model_id, with a slash",
}
# The largest ratio: `warmup_steps=1.0` would be a single update.
_WHOLE_RUN = "0.9999999999999999"


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that the source spells out."""

    value: object


def read_constant(node: cst.BaseExpression | None) -> Constant | None:
    """Return the value of a literal; None for any other expression."""
    if node is None:
        return None
    try:
        return Constant(ast.literal_eval(cst.Module([]).code_for_node(node).strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Item:
    """One keyword and its value."""

    name: str
    value: cst.BaseExpression


@dataclass(slots=True)
class Decision:
    """What becomes of the keywords of one call or dict.

    Args:
        edits: By place.
        notes: Place and reason of what a person has to look at.
    """

    edits: dict[int, Edit] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)


_DROP = Edit(drop=True)


def today(name: str) -> str:
    """Say what an old name is today, or that it is nothing any longer."""
    means = OLD_NAMES[name].means
    why = means.removeprefix("nothing: ")
    return f"this is {means} today" if why == means else f"this has no meaning any longer: {why}"


def is_renamed(name: str) -> bool:
    """Return whether an old name is only spelled differently today."""
    return OLD_NAMES[name].means.isidentifier()


def is_flag(name: str) -> bool:
    """Return whether an old name is a switch for a value of another argument."""
    row = OLD_NAMES[name]
    return row.kind is TRUTH_VALUE and not row.inert and name not in ATTRIBUTES_ONLY


def switched_on(name: str) -> tuple[str, object]:
    """Return what an old flag sets: an argument of today and its value."""
    ((today, value),) = OLD_NAMES[name].translate(True).items()
    return today, value


class _Call:
    """The keywords that are decided about together."""

    def __init__(self, items: Sequence[Item], target: Target, given: Mapping[str, cst.BaseExpression]) -> None:
        self.items = items
        self.target = target
        self.given = {**given, **{item.name: item.value for item in items}}
        self.decision = Decision()
        self.in_configs: dict[str, int] = {}

    def edit(self, place: int, edit: Edit) -> None:
        self.decision.edits[place] = edit

    def note(self, place: int, reason: str) -> None:
        self.decision.notes.append((place, reason))

    def gives_otherwise(self, place: int, today: str, value: Constant | None) -> bool:
        """Say that today's name is given as well; what is given twice alike goes once."""
        if today not in self.given:
            return False
        other = read_constant(self.given[today])
        if value is not None and other == value:
            self.edit(place, _DROP)
        else:
            self.note(place, f"`{today}` is given, too: decide which one counts")
        return True


def decide(items: Sequence[Item], target: Target, given: Mapping[str, cst.BaseExpression]) -> Decision:
    """Return what becomes of the keywords of a call, or of the entries of a dict that it takes.

    Args:
        items: Keywords and values, by place.
        target: What the result is for.
        given: What the same call is given elsewhere.
    """
    call = _Call(items, target, given)
    for place, item in enumerate(items):
        if place not in call.decision.edits:  # another one has taken it in
            _rule_for(item.name)(call, place, item)
    return call.decision


_Rule: TypeAlias = Callable[[_Call, int, Item], None]


def _rule_for(name: str) -> _Rule:
    if name in _RULES:
        return _RULES[name]
    if name not in OLD_NAMES:
        return _leave
    if is_renamed(name):
        return _rename
    if OLD_NAMES[name].inert:
        return _drop_inert
    return _flag if is_flag(name) else _into_config


def _leave(call: _Call, place: int, item: Item) -> None:
    pass


def _rename(call: _Call, place: int, item: Item) -> None:
    today = OLD_NAMES[item.name].means
    value = read_constant(item.value)
    if value is not None and (value.value is None or (item.name == "no_cuda" and not value.value)):
        call.edit(place, _DROP)
    elif not call.gives_otherwise(place, today, value):
        call.edit(place, Edit(name=today))


def _flag(call: _Call, place: int, item: Item) -> None:
    today, on = switched_on(item.name)
    value = read_constant(item.value)
    if value is not None and not value.value:
        call.edit(place, _DROP)
    elif value is not None:
        if not call.gives_otherwise(place, today, Constant(on)):
            call.edit(place, Edit(name=today, value=lambda _: constant(on)))
    elif today in OFF and today not in call.given:
        spelled = (cst.Module([]).code_for_node(constant(one)) for one in (on, OFF[today]))
        call.edit(place, Edit(name=today, value=wrapped(*(f"{next(spelled)} if ", f" else {next(spelled)}"))))
    else:
        call.note(place, f"`{today}={on!r}` where it is true: the default where it is not depends on the release")


def _warmup_ratio(call: _Call, place: int, item: Item) -> None:
    ratio, steps = read_constant(item.value), read_constant(call.given.get("warmup_steps"))
    if "warmup_steps" in call.given and (steps is None or not steps.value):
        call.note(place, "`warmup_steps` is given, too: a count of updates wins over the ratio, 0 does not")
    elif "warmup_steps" in call.given or (ratio is not None and not ratio.value):
        call.edit(place, _DROP)
    elif ratio is None:
        call.edit(place, Edit(name="warmup_steps", value=wrapped("min(", f", {_WHOLE_RUN})")))
    elif isinstance(ratio.value, (int, float)) and ratio.value >= 1:
        call.edit(place, Edit(name="warmup_steps", value=lambda _: cst.parse_expression(_WHOLE_RUN)))
    else:
        call.edit(place, Edit(name="warmup_steps"))


def _into_config(call: _Call, place: int, item: Item) -> None:
    """Put an argument into the options that hold it today."""
    value = read_constant(item.value)
    asked = OLD_NAMES[item.name].translate(1 if value is None else value.value)
    if not asked:
        call.edit(place, _DROP)
        return
    ((config, options),) = asked.items()
    (key,) = options
    if config in call.given:
        call.note(place, f"goes into `{config}`, which is given: {{{key!r}: …}}")
    elif config in call.in_configs:
        first = call.in_configs[config]
        call.edit(first, Edit(name=config, value=_with_entry(call.decision.edits[first].value, key, item.value)))
        call.edit(place, _DROP)
    else:
        call.in_configs[config] = place
        call.edit(place, Edit(name=config, value=_with_entry(None, key, item.value)))


def _with_entry(
    before: Callable[[cst.BaseExpression], cst.BaseExpression] | None, key: str, value: cst.BaseExpression
) -> Callable[[cst.BaseExpression], cst.BaseExpression]:
    def make(first: cst.BaseExpression) -> cst.BaseExpression:
        if before is None:
            return cst.Dict([cst.DictElement(constant(key), first)])
        made = before(first)
        assert isinstance(made, cst.Dict)
        return made.with_changes(elements=[*made.elements, cst.DictElement(constant(key), value)])

    return make


def _drop_inert(call: _Call, place: int, item: Item) -> None:
    value = read_constant(item.value)
    reason = OLD_NAMES[item.name].means.removeprefix("nothing: ")
    if value is None:
        call.note(place, f"has no effect any longer: {reason}")
        return
    call.edit(place, _DROP)
    if not is_harmless(item.name, value.value):
        call.note(place, f"taken out, it has no effect any longer: {reason}")


def _drop_for_5(call: _Call, place: int, item: Item) -> None:
    """Take out what this package keeps as an attribute, and transformers 5 does not know."""
    if call.target is Target.HF_COMPAT:
        return
    value = read_constant(item.value)
    if value is None or value.value not in (None, False):
        call.note(place, f"taken out: {GONE_IN_5[item.name]}" if value is not None else GONE_IN_5[item.name])
    if value is not None:
        call.edit(place, _DROP)


def _report_to(call: _Call, place: int, item: Item) -> None:
    """Ask for all trackers by their name, where nothing was: transformers 5 takes None for a tracker's name."""
    value = read_constant(item.value)
    if call.target is Target.TRANSFORMERS_5 and value is not None and value.value is None:
        call.edit(place, Edit(value=lambda _: constant("all")))


def _organization(call: _Call, place: int, item: Item) -> None:
    """Put the organization before the repository's name."""
    owner = read_constant(item.value)
    named = next((n for n in ("hub_model_id", "push_to_hub_model_id") if n in call.given), None)
    names = [one.name for one in call.items]
    model = None if named is None else read_constant(call.given[named])
    if owner is None or model is None or named not in names:
        _drop_for_5(call, place, item)
        return
    full = f"{owner.value}/{str(model.value).rpartition('/')[2]}"
    call.edit(place, _DROP)
    call.edit(names.index(named), Edit(name="hub_model_id", value=lambda _: constant(full)))


def _debug(call: _Call, place: int, item: Item) -> None:
    value = read_constant(item.value)
    if value is not None and value.value is False:
        call.edit(place, _DROP)
    elif value is not None and value.value is True:
        call.edit(place, Edit(value=lambda _: constant("tpu_metrics_debug")))


def _optim(call: _Call, place: int, item: Item) -> None:
    value = read_constant(item.value)
    if value is not None and isinstance(value.value, str) and value.value in OLD_OPTIMIZERS:
        today = OLD_OPTIMIZERS[value.value]
        call.edit(place, Edit(value=lambda _: constant(today)))
        call.note(place, f'is "{today}" now: {value.value} is gone, and its last digits differ')


_RULES: dict[str, _Rule] = {
    "warmup_ratio": _warmup_ratio,
    "logging_dir": _drop_for_5,
    "overwrite_output_dir": _drop_for_5,
    "place_model_on_device": _drop_for_5,
    "push_to_hub_organization": _organization,
    "debug": _debug,
    "optim": _optim,
    "report_to": _report_to,
}
