"""Lines that a change has made too long, broken as formatters break them: at the brackets, then one a line."""

from __future__ import annotations

from typing import TypeVar, cast

import libcst as cst

from hf_compat.tools.migration.source import Source

Listed = TypeVar("Listed", cst.Arg, cst.Param)
_DEEPER = "    "


def fitted_call(source: Source, before: cst.BaseExpression, after: cst.Call) -> cst.Call:
    """Return a call as it is, or broken where its line would be too long.

    Args:
        source: Where it stands.
        before: What stands in the source.
        after: The call in its place.
    """
    if not after.args or not source.outgrows(before, after):
        return after
    pad = source.indent_within_block(before)
    alone = ", ".join(source.code(one.with_changes(comma=cst.MaybeSentinel.DEFAULT)).strip() for one in after.args)
    args = _broken(list(after.args), pad, one_a_line=not source.fits(before, f"{_DEEPER}{alone}"))
    return after.with_changes(args=args, whitespace_before_args=_line(pad + _DEEPER))


def fitted_function(source: Source, before: cst.FunctionDef, after: cst.FunctionDef) -> cst.FunctionDef:
    """Return a function as it is, or with its parameters on lines of their own where its line would be too long."""
    params = after.params
    others = (*params.kwonly_params, *params.posonly_params, *([params.star_kwarg] if params.star_kwarg else []))
    if others or not params.params or not source.outgrows(before.params, params):
        return after
    pad = source.indent_within_block(before)
    one_a_line = not source.fits(before, f"{_DEEPER}{source.code(params)}")
    broken = params.with_changes(params=_broken(list(params.params), pad, one_a_line=one_a_line))
    return after.with_changes(params=broken, whitespace_before_params=_line(pad + _DEEPER))


def _line(indent: str) -> cst.ParenthesizedWhitespace:
    return cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))


def _broken(elements: list[Listed], pad: str, *, one_a_line: bool) -> list[Listed]:
    """Return arguments or parameters after which a line ends: the last one, or each."""
    if one_a_line:
        within: cst.Comma = cst.Comma(whitespace_after=_line(pad + _DEEPER))
        last = elements[-1].with_changes(comma=cst.Comma(whitespace_after=_line(pad)))
        return cast("list[Listed]", [*(one.with_changes(comma=within) for one in elements[:-1]), last])
    end = "whitespace_after_arg" if isinstance(elements[-1], cst.Arg) else "whitespace_after_param"
    return cast("list[Listed]", [*elements[:-1], elements[-1].with_changes(**{end: _line(pad)})])
