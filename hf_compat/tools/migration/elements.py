"""Arguments of a call and entries of a dict, changed or taken out; layout and comments stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import libcst as cst

Listed = TypeVar("Listed", cst.Arg, cst.Param)
Whitespace: TypeAlias = cst.BaseParenthesizableWhitespace


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """What becomes of one argument.

    Args:
        name: Its name today; None leaves it.
        value: From its value to today's; None leaves it.
        drop: Whether it goes.
    """

    name: str | None = None
    value: Callable[[cst.BaseExpression], cst.BaseExpression] | None = None
    drop: bool = False


def constant(value: object) -> cst.BaseExpression:
    """Return the literal of a value, strings in double quotes."""
    return cst.parse_expression(_literal(value))


def _literal(value: object) -> str:
    if isinstance(value, str):
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def wrapped(before: str, after: str) -> Callable[[cst.BaseExpression], cst.BaseExpression]:
    """Return what puts an expression into another one; it gets parentheses where it needs some."""

    def wrap(value: cst.BaseExpression) -> cst.BaseExpression:
        code = cst.Module([]).code_for_node(value)
        is_open = isinstance(value, (cst.IfExp, cst.Lambda, cst.NamedExpr, cst.Yield)) and not value.lpar
        return cst.parse_expression(before + (f"({code})" if is_open else code) + after)

    return wrap


def edited_call(
    call: cst.Call, edits: Mapping[int, Edit], added: Sequence[tuple[str, cst.BaseExpression]] = ()
) -> cst.Call:
    """Return a call whose arguments have been edited, by place."""
    args = [_edited_argument(one, edits.get(index)) for index, one in enumerate(call.args)]
    dropped = [index for index in range(len(args)) if index in edits and edits[index].drop]
    before, args = _without(call.whitespace_before_args, args, dropped)
    for name, value in added:
        args = appended(args, keyword(name, value))
    return call.with_changes(args=args, whitespace_before_args=before)


def edited_dict(node: cst.Dict, edits: Mapping[int, Edit]) -> cst.Dict:
    """Return a dict display whose entries have been edited, by place."""
    elements = list(node.elements)
    for index, edit in edits.items():
        element = elements[index]
        assert isinstance(element, cst.DictElement)
        elements[index] = _edited_entry(element, edit)
    kept = [element for index, element in enumerate(elements) if not (index in edits and edits[index].drop)]
    if kept and kept[-1] is not elements[-1]:
        kept[-1] = kept[-1].with_changes(comma=elements[-1].comma)
    return node.with_changes(elements=kept)


def _edited_argument(argument: cst.Arg, edit: Edit | None) -> cst.Arg:
    if edit is None or edit.drop:
        return argument
    if edit.name is not None:
        argument = argument.with_changes(keyword=cst.Name(edit.name))
    return argument if edit.value is None else argument.with_changes(value=edit.value(argument.value))


def _edited_entry(element: cst.DictElement, edit: Edit) -> cst.DictElement:
    key = element.key
    if edit.name is not None and isinstance(key, cst.SimpleString):
        element = element.with_changes(key=key.with_changes(value=f"{key.prefix}{key.quote}{edit.name}{key.quote}"))
    return element if edit.value is None or edit.drop else element.with_changes(value=edit.value(element.value))


def _argument_end(argument: cst.Arg) -> Whitespace:
    comma = argument.comma
    return comma.whitespace_after if isinstance(comma, cst.Comma) else argument.whitespace_after_arg


def _set_argument_end(argument: cst.Arg, end: Whitespace) -> cst.Arg:
    comma = argument.comma
    if isinstance(comma, cst.Comma):
        return argument.with_changes(comma=comma.with_changes(whitespace_after=end))
    return argument.with_changes(whitespace_after_arg=end)


def _without(
    before: Whitespace,
    args: list[cst.Arg],
    dropped: Sequence[int],
) -> tuple[Whitespace, list[cst.Arg]]:
    """Take arguments out; comments above those that stay go on standing above them."""
    for index in sorted(dropped, reverse=True):
        end = _argument_end(args[index])
        is_last = index == len(args) - 1
        if index == 0:
            before = _joined(before, end)
        else:
            previous = _set_argument_end(args[index - 1], _joined(_argument_end(args[index - 1]), end))
            args[index - 1] = (
                previous.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=cst.SimpleWhitespace(""))
                if is_last and not isinstance(_argument_end(previous), cst.ParenthesizedWhitespace)
                else previous
            )
        del args[index]
    return before, args


def _joined(first: Whitespace, second: Whitespace) -> Whitespace:
    """Return the space before and the space after something that has gone, as one."""
    if isinstance(first, cst.ParenthesizedWhitespace) and isinstance(second, cst.ParenthesizedWhitespace):
        lines = [*first.empty_lines, *second.empty_lines]
        return first.with_changes(empty_lines=lines, indent=second.indent, last_line=second.last_line)
    return first if isinstance(first, cst.ParenthesizedWhitespace) else second


def appended(elements: list[Listed], new: Listed) -> list[Listed]:
    """Return arguments or parameters with one more at the end, laid out as the others are."""
    if not elements:
        return [new]
    *others, last = elements
    between: cst.Comma | cst.MaybeSentinel = others[-1].comma if others else _COMMA
    if isinstance(last.comma, cst.Comma):  # one a line, or others of another kind follow
        last, new = last.with_changes(comma=between if others else last.comma), new.with_changes(comma=last.comma)
    else:
        end = "whitespace_after_arg" if isinstance(last, cst.Arg) else "whitespace_after_param"
        bare = {end: cst.SimpleWhitespace("")}
        kept = {end: getattr(last, end)}
        last, new = last.with_changes(comma=between, **bare), new.with_changes(**kept)
    return cast("list[Listed]", [*others, last, new])


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Return the argument `name=value`."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(keyword=cst.Name(name), value=value, equal=equal)
