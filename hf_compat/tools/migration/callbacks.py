"""Keywords of callbacks' events that have another name today: `tokenizer` is `processing_class`."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from libcst.metadata import Assignment

from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, binding_node
from hf_compat.tools.migration.things import Thing, Things

_OLD, _TODAY = "tokenizer", "processing_class"


def rewrite_callbacks(source: Source, things: Things) -> None:
    """Have the events of one source's callbacks rewritten."""
    for owner, thing in things.local_classes.items():
        for method in owner.body.body if thing is Thing.CALLBACK_CLASS else ():
            if isinstance(method, cst.FunctionDef) and method.name.value.startswith("on_"):
                _rewrite_event(method, f"{owner.name.value}.{method.name.value}", source)


def _rewrite_event(method: cst.FunctionDef, what: str, source: Source) -> None:
    params = (*method.params.params, *method.params.kwonly_params)
    old = next((one for one in params if one.name.value == _OLD), None)
    if old is not None and any(one.name.value == _TODAY for one in params):
        source.list(old, what, f"takes {_OLD} and {_TODAY}: only the second is given since 4.46")
    elif old is not None:
        for name in (old.name, *_reads_of(old, source)):
            source.change(name, lambda node: node.with_changes(value=_TODAY))
        has_default = old.default is not None
        reason = f"transformers 5 gives {_TODAY}, and no {_OLD}" + (": the default stands" if has_default else "")
        source.mend_for_5(old, what, reason, Effect.DIFFERS if has_default else Effect.FAILS)
    rest = method.params.star_kwarg
    for read in _reads_of(rest, source) if rest is not None else ():
        # The key of `kwargs["key"]`, `kwargs.get("key")`, `kwargs.pop("key")`
        outer = source.parent(read)
        key: cst.BaseExpression | None
        if isinstance(outer, cst.Subscript) and isinstance(outer.slice[0].slice, cst.Index):
            key = outer.slice[0].slice.value
        else:
            call = (
                source.parent(outer)
                if isinstance(outer, cst.Attribute) and outer.attr.value in ("get", "pop")
                else None
            )
            key = call.args[0].value if isinstance(call, cst.Call) and call.func is outer and call.args else None
        constant = read_constant(key)
        if isinstance(key, cst.SimpleString) and constant is not None and constant.value == _OLD:
            source.change(key, _renamed_key)
            is_silent = isinstance(outer, cst.Attribute)
            reason = f"transformers 5 gives {_TODAY}, and no {_OLD}"
            source.mend_for_5(read, what, reason, Effect.DIFFERS if is_silent else Effect.FAILS)


def _renamed_key(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.SimpleString)
    return node.with_changes(value=f"{node.prefix}{node.quote}{_TODAY}{node.quote}")


def _reads_of(param: cst.Param, source: Source) -> Iterator[cst.Name]:
    for assignment in source.assignments(param.name):
        if isinstance(assignment, Assignment) and binding_node(assignment) is param:
            yield from (access.node for access in assignment.references if isinstance(access.node, cst.Name))
