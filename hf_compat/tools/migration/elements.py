"""Edit the arguments of a call and the entries of a dict. Layout and comments stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import libcst as cst

from hf_compat.tools.migration.source import Source

Listed = TypeVar("Listed", cst.Arg, cst.Param)
Whitespace: TypeAlias = cst.BaseParenthesizableWhitespace
COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A change of one argument."""

    name: str | None = None  # its new name. None keeps the name
    value: Callable[[cst.BaseExpression], cst.BaseExpression] | None = None  # makes the new one of the old one
    drop: bool = False


def constant(value: object) -> cst.BaseExpression:
    """Make the literal of a value, strings in double quotes."""
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


def edit_call(
    source: Source, call: cst.Call, edits: Mapping[int, Edit], added: Sequence[tuple[str, cst.BaseExpression]] = ()
) -> None:
    """Change the arguments of a call."""

    def change(node: cst.Call) -> cst.Call:
        args = []
        for index, argument in enumerate(node.args):
            edit = edits.get(index, Edit())
            if edit.name is not None:
                argument = argument.with_changes(keyword=cst.Name(edit.name))
            args.append(argument if edit.value is None else argument.with_changes(value=edit.value(argument.value)))
        dropped = [index for index in range(len(args)) if index in edits and edits[index].drop]
        before, args = _without(node.whitespace_before_args, args, dropped)
        for name, value in added:
            args = inserted(args, len(args), cst.Arg(keyword=cst.Name(name), value=value, equal=EQUAL))
        return node.with_changes(args=args, whitespace_before_args=before)

    source.change(call, change)


def edited_dict(node: cst.Dict, edits: Mapping[int, Edit]) -> cst.Dict:
    """Change the entries of a dict display by position."""
    elements = list(node.elements)
    for index, edit in edits.items():
        element = cast("cst.DictElement", elements[index])
        key = element.key
        if edit.name is not None and isinstance(key, cst.SimpleString):
            element = element.with_changes(key=key.with_changes(value=f"{key.prefix}{key.quote}{edit.name}{key.quote}"))
        if edit.value is not None and not edit.drop:
            element = element.with_changes(value=edit.value(element.value))
        elements[index] = element
    kept = [element for index, element in enumerate(elements) if not (index in edits and edits[index].drop)]
    if kept and kept[-1] is not elements[-1]:
        kept[-1] = kept[-1].with_changes(comma=elements[-1].comma)
    return node.with_changes(elements=kept)


def _argument_end(argument: cst.Arg) -> Whitespace:
    comma = argument.comma
    return comma.whitespace_after if isinstance(comma, cst.Comma) else argument.whitespace_after_arg


def _without(before: Whitespace, args: list[cst.Arg], dropped: Sequence[int]) -> tuple[Whitespace, list[cst.Arg]]:
    """Remove arguments. Comments above the remaining ones stay above them."""

    def joined(first: Whitespace, second: Whitespace) -> Whitespace:
        if isinstance(first, cst.ParenthesizedWhitespace) and isinstance(second, cst.ParenthesizedWhitespace):
            lines = [*first.empty_lines, *second.empty_lines]
            return first.with_changes(empty_lines=lines, indent=second.indent, last_line=second.last_line)
        return first if isinstance(first, cst.ParenthesizedWhitespace) else second

    for index in sorted(dropped, reverse=True):
        end = _argument_end(args[index])
        if index == 0:
            before = joined(before, end)
        else:
            previous = args[index - 1]
            end = joined(_argument_end(previous), end)
            if index == len(args) - 1 and not isinstance(end, cst.ParenthesizedWhitespace):
                bare = cst.SimpleWhitespace("")
                previous = previous.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=bare)
            elif isinstance(previous.comma, cst.Comma):
                previous = previous.with_changes(comma=previous.comma.with_changes(whitespace_after=end))
            else:
                previous = previous.with_changes(whitespace_after_arg=end)
            args[index - 1] = previous
        del args[index]
    return before, args


def inserted(elements: Sequence[Listed], place: int, new: Listed) -> list[Listed]:
    """Add an argument or parameter before a place or at the end, in the layout of the others."""
    if not elements:
        return [new]
    if place < len(elements):
        comma = elements[place - 1].comma if place else COMMA
        return cast("list[Listed]", [*elements[:place], new.with_changes(comma=comma), *elements[place:]])
    *others, last = elements
    between: cst.Comma | cst.MaybeSentinel = others[-1].comma if others else COMMA
    if isinstance(last.comma, cst.Comma):  # one a line, or others of another kind follow
        last, new = last.with_changes(comma=between if others else last.comma), new.with_changes(comma=last.comma)
    else:
        end = "whitespace_after_arg" if isinstance(last, cst.Arg) else "whitespace_after_param"
        kept = {end: getattr(last, end)}
        last, new = last.with_changes(comma=between, **{end: cst.SimpleWhitespace("")}), new.with_changes(**kept)
    return cast("list[Listed]", [*others, last, new])
