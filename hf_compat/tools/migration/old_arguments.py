"""Write keywords of training arguments of any release as they are written today.

The rows of `hf/legacy.py` say what an old name means. A constant is translated by them. An expression is wrapped
if that is exact, and otherwise left to a person.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

import libcst as cst

from hf_compat.hf.argument_values import OLD_OPTIMIZERS
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES, is_harmless
from hf_compat.hf.value_types import truth_value
from hf_compat.tools.migration.elements import Edit, constant
from hf_compat.tools.migration.report import Target

# The value of a current argument if an old flag is off: its default in every release.
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


class Constant(NamedTuple):
    """A value that the source spells out."""

    value: object


def read_constant(node: cst.BaseExpression | None) -> Constant | None:
    """Read the value of a literal. None for any other expression."""
    try:
        return None if node is None else Constant(ast.literal_eval(cst.Module([]).code_for_node(node).strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class Item(NamedTuple):
    """One keyword and its value."""

    name: str
    value: cst.BaseExpression


@dataclass(slots=True)
class Decision:
    """The fate of the keywords of one call or dict."""

    edits: dict[int, Edit] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)


_DROP = Edit(drop=True)


def today(name: str) -> str:
    """Explain what an old name is today, or that it has no meaning any longer."""
    means = OLD_NAMES[name].means
    why = means.removeprefix("nothing: ")
    return f"this is {means} today" if why == means else f"this has no meaning any longer: {why}"


def is_renamed(name: str) -> bool:
    """Whether an old name is only spelled differently today."""
    return OLD_NAMES[name].means.isidentifier()


def is_flag(name: str) -> bool:
    """Whether an old name is a switch for a value of another argument."""
    row = OLD_NAMES[name]
    return row.kind is truth_value and not row.inert and name not in ATTRIBUTES_ONLY


def switched_on(name: str) -> tuple[str, object]:
    """The current argument and its value that an old flag sets."""
    ((today, value),) = OLD_NAMES[name].translate(True).items()
    return today, value


class _Call(Decision):
    def __init__(self, items: Sequence[Item], target: Target, given: Mapping[str, cst.BaseExpression]) -> None:
        super().__init__()
        self.items = items
        self.target = target
        self.given = {**given, **{item.name: item.value for item in items}}
        self.in_configs: dict[str, int] = {}

    def note(self, place: int, reason: str) -> None:
        self.notes.append((place, reason))

    def gives_otherwise(self, place: int, today: str, value: Constant | None) -> bool:
        """Deal with a keyword whose current name is also given. Equal values are written once."""
        if today not in self.given:
            return False
        if value is not None and read_constant(self.given[today]) == value:
            self.edits[place] = _DROP
        else:
            self.note(place, f"`{today}` is given, too: decide which one counts")
        return True


def decide(items: Sequence[Item], target: Target, given: Mapping[str, cst.BaseExpression]) -> Decision:
    """Decide what to write for the keywords of a call, or for the entries of a dict that it takes."""
    call = _Call(items, target, given)
    for place, (name, given_value) in enumerate(items):
        if place in call.edits or (name not in _RULES and name not in OLD_NAMES):  # edits: another one has taken it in
            continue
        value = read_constant(given_value)
        if name in _RULES:
            _RULES[name](call, place, name, value)
        elif is_renamed(name):
            if value is not None and (value.value is None or (name == "no_cuda" and not value.value)):
                call.edits[place] = _DROP
            elif not call.gives_otherwise(place, OLD_NAMES[name].means, value):
                call.edits[place] = Edit(name=OLD_NAMES[name].means)
        elif OLD_NAMES[name].inert:
            reason = f"has no effect any longer: {OLD_NAMES[name].means.removeprefix('nothing: ')}"
            if value is None:
                call.note(place, reason)
                continue
            call.edits[place] = _DROP
            if not is_harmless(name, value.value):
                call.note(place, f"taken out, it {reason}")
        else:
            (_flag if is_flag(name) else _into_config)(call, place, name, value)
    return call


_Rule: TypeAlias = Callable[[_Call, int, str, Constant | None], None]


def _wrapped(before: str, after: str) -> Callable[[cst.BaseExpression], cst.BaseExpression]:
    """Put an expression into another one, in parentheses if it needs them."""

    def wrap(value: cst.BaseExpression) -> cst.BaseExpression:
        code = cst.Module([]).code_for_node(value)
        is_open = isinstance(value, (cst.IfExp, cst.Lambda, cst.NamedExpr, cst.Yield)) and not value.lpar
        return cst.parse_expression(before + (f"({code})" if is_open else code) + after)

    return wrap


def _flag(call: _Call, place: int, name: str, value: Constant | None) -> None:
    today, on = switched_on(name)
    if value is not None and not value.value:
        call.edits[place] = _DROP
    elif value is not None:
        if not call.gives_otherwise(place, today, Constant(on)):
            call.edits[place] = Edit(name=today, value=lambda _: constant(on))
    elif today in OFF and today not in call.given:
        is_on, is_off = (cst.Module([]).code_for_node(constant(one)) for one in (on, OFF[today]))
        call.edits[place] = Edit(name=today, value=_wrapped(f"{is_on} if ", f" else {is_off}"))
    else:
        call.note(place, f"`{today}={on!r}` where it is true: the default where it is not depends on the release")


def _warmup_ratio(call: _Call, place: int, name: str, ratio: Constant | None) -> None:
    steps = read_constant(call.given.get("warmup_steps"))
    if "warmup_steps" in call.given and (steps is None or not steps.value):
        call.note(place, "`warmup_steps` is given, too: a count of updates wins over the ratio, 0 does not")
    elif "warmup_steps" in call.given or (ratio is not None and not ratio.value):
        call.edits[place] = _DROP
    elif ratio is None:
        call.edits[place] = Edit(name="warmup_steps", value=_wrapped("min(", f", {_WHOLE_RUN})"))
    elif isinstance(ratio.value, (int, float)) and ratio.value >= 1:
        call.edits[place] = Edit(name="warmup_steps", value=lambda _: cst.parse_expression(_WHOLE_RUN))
    else:
        call.edits[place] = Edit(name="warmup_steps")


def _into_config(call: _Call, place: int, name: str, value: Constant | None) -> None:
    """Put an argument into the options that hold it today."""
    asked = OLD_NAMES[name].translate(1 if value is None else value.value)
    if not asked:
        call.edits[place] = _DROP
        return
    ((config, (key,)),) = asked.items()
    if config in call.given:
        call.note(place, f"goes into `{config}`, which is given: {{{key!r}: …}}")
        return
    first = call.in_configs.setdefault(config, place)
    before, added = call.edits[first].value if first != place else None, call.items[place].value

    def entries(old: cst.BaseExpression) -> cst.Dict:
        held = () if before is None else cast("cst.Dict", before(old)).elements
        return cst.Dict([*held, cst.DictElement(constant(key), old if before is None else added)])

    call.edits[place] = _DROP
    call.edits[first] = Edit(name=config, value=entries)


def _drop_for_5(call: _Call, place: int, name: str, value: Constant | None) -> None:
    """Remove an argument that this package keeps as an attribute and that transformers 5 does not know."""
    if call.target is Target.HF_COMPAT:
        return
    if value is None or value.value not in (None, False):
        call.note(place, f"taken out: {GONE_IN_5[name]}" if value is not None else GONE_IN_5[name])
    if value is not None:
        call.edits[place] = _DROP


def _organization(call: _Call, place: int, name: str, owner: Constant | None) -> None:
    """Put the organization before the name of the repository."""
    named = next((n for n in ("hub_model_id", "push_to_hub_model_id") if n in call.given), "")
    names = [one.name for one in call.items]
    model = read_constant(call.given.get(named))
    if owner is None or model is None or named not in names:
        _drop_for_5(call, place, name, owner)
        return
    full = f"{owner.value}/{str(model.value).rpartition('/')[2]}"
    call.edits[place] = _DROP
    call.edits[names.index(named)] = Edit(name="hub_model_id", value=lambda _: constant(full))


OPTIMIZER_DIFFERS = 'is "{new}" now: {old} is gone, and its last digits differ'


def _may_be_none(node: cst.BaseExpression) -> bool:
    """Whether an expression is None, or None in one of its cases."""
    if isinstance(node, cst.IfExp):
        return _may_be_none(node.body) or _may_be_none(node.orelse)
    value = read_constant(node)
    return value is not None and value.value is None


def _all_for_none(node: cst.BaseExpression) -> cst.BaseExpression:
    """Write "all", which None meant, where transformers 5 takes None for a tracker's name."""
    if isinstance(node, cst.IfExp):
        return node.with_changes(body=_all_for_none(node.body), orelse=_all_for_none(node.orelse))
    return constant("all") if _may_be_none(node) else node


def _other_value(call: _Call, place: int, name: str, value: Constant | None) -> None:
    """Replace a value that is written differently today."""
    held = None if value is None else value.value
    if name == "report_to" and call.target is Target.TRANSFORMERS_5:
        if _may_be_none(call.given[name]):
            call.edits[place] = Edit(value=_all_for_none)
    elif name == "debug" and isinstance(held, bool):
        call.edits[place] = Edit(value=lambda _: constant("tpu_metrics_debug")) if held else _DROP
    elif name == "optim" and isinstance(held, str) and held in OLD_OPTIMIZERS:
        today = OLD_OPTIMIZERS[held]
        call.edits[place] = Edit(value=lambda _: constant(today))
        call.note(place, OPTIMIZER_DIFFERS.format(old=held, new=today))


_RULES: dict[str, _Rule] = {
    "warmup_ratio": _warmup_ratio,
    "logging_dir": _drop_for_5,
    "overwrite_output_dir": _drop_for_5,
    "place_model_on_device": _drop_for_5,
    "push_to_hub_organization": _organization,
    "debug": _other_value,
    "optim": _other_value,
    "report_to": _other_value,
}
