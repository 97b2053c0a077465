"""Calls that make training arguments and trainers, and dicts that they take by `**`."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from libcst.metadata import Access, Assignment

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.elements import edited_dict
from hf_compat.tools.migration.old_arguments import Decision, Item, decide, is_renamed, read_constant, today
from hf_compat.tools.migration.source import Source
from hf_compat.tools.migration.things import Thing, Things, instance_of
from hf_compat.tools.migration.trainer_calls import (
    call_change,
    is_call_of_train,
    is_super_call,
    own_parameters,
    rewrite_adamw,
    rewrite_train,
    rewrite_trainer,
)

_OTHERS_OWN = "the class is not known here: if it makes training arguments, "


def rewrite_calls(source: Source, things: Things) -> None:
    """Have all calls of one source rewritten."""
    for call in source.of(cst.Call):
        kind = _makes(call, source, things)
        if kind is Thing.ARGUMENTS:
            _rewrite_arguments(call, source, things)
        elif kind is Thing.TRAINER:
            rewrite_trainer(call, source, _own_parameters(call, source))
        elif things.of(call.func) is Thing.ADAMW:
            rewrite_adamw(call, source)
        elif is_call_of_train(call, things):
            rewrite_train(call, source)
        elif is_call_of_parse_dict(call, things) and isinstance(call.args[0].value, cst.Dict):
            display = call.args[0].value
            _rewrite_dict(display, dict(_entries(display)), source, {})
        elif kind is None:
            _list_unknown(call, source, things)


def _makes(call: cst.Call, source: Source, things: Things) -> Thing | None:
    """Return what a call makes; for `super().__init__(…)` in a class, what the class makes."""
    made = things.of(call)
    if source.imported(call.func) == "functools.partial" and call.args:
        return instance_of(things.of(call.args[0].value))
    function = next((one for one in source.bound_nodes(call.func) if isinstance(one, cst.FunctionDef)), None)
    if function is not None:
        return Thing.ARGUMENTS if hands_keywords_on(function, source, things) else None
    if made is None and is_super_call(call, "__init__"):
        owner = owner_of(call, source, things)
        return instance_of(owner)
    return made


def owner_of(node: cst.CSTNode, source: Source, things: Things) -> Thing | None:
    """Return what the class makes that a node stands in."""
    found = next((one for one in source.above(node) if isinstance(one, cst.ClassDef)), None)
    return None if found is None else things.local_classes.get(found)


def hands_keywords_on(function: cst.FunctionDef, source: Source, things: Things) -> bool:
    """Return whether a function gives its `**keywords` to a class of training arguments."""
    rest = function.params.star_kwarg
    for binding in source.assignments(rest.name) if rest is not None else ():
        for access in binding.references:
            argument = source.parent(access.node)
            call = source.parent(argument) if isinstance(argument, cst.Arg) and argument.star == "**" else None
            if isinstance(call, cst.Call) and things.of(call.func) is Thing.ARGUMENTS_CLASS:
                return True
    return False


def own_fields(call: cst.Call, source: Source, things: Things) -> frozenset[str]:
    """Return the fields that the called class, and those it is made from in this source, declares itself."""
    node = local_class(call.func, source)
    found: set[str] = set()
    while node is not None and node in things.local_classes:
        found |= set(fields_of(node))
        node = next((up for base in node.bases if (up := local_class(base.value, source)) is not None), None)
    return frozenset(found)


def fields_of(node: cst.ClassDef) -> Iterator[str]:
    """Yield the names of a dataclass's fields."""
    for statement in node.body.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                yield small.target.value


def _own_parameters(call: cst.Call, source: Source) -> frozenset[str]:
    """Return what the called class, and those of this source that it is made from, take by themselves."""
    node = local_class(call.func, source)
    seen: set[cst.ClassDef] = set()
    found: set[str] = set()
    while node is not None and node not in seen:
        seen.add(node)
        found |= own_parameters(node)
        node = next((up for base in node.bases if (up := local_class(base.value, source)) is not None), None)
    return frozenset(found)


def is_call_of_parse_dict(call: cst.Call, things: Things) -> bool:
    """Return whether a call is HfArgumentParser's `parse_dict`, with arguments."""
    func = call.func
    is_named = isinstance(func, cst.Attribute) and func.attr.value == "parse_dict" and bool(call.args)
    return is_named and isinstance(func, cst.Attribute) and things.of(func.value) is Thing.PARSER


def local_class(node: cst.BaseExpression, source: Source) -> cst.ClassDef | None:
    """Return the class of this source that a name stands for."""
    return next((one for one in source.bound_nodes(node) if isinstance(one, cst.ClassDef)), None)


def _rewrite_arguments(call: cst.Call, source: Source, things: Things) -> None:
    function = next((one for one in source.bound_nodes(call.func) if isinstance(one, cst.FunctionDef)), None)
    own = () if function is None else (*function.params.params, *function.params.kwonly_params)
    kept = {one.name.value for one in own}
    kept |= {name for name in own_fields(call, source, things) if name in OLD_NAMES and not is_renamed(name)}
    places = [index for index, one in enumerate(call.args) if one.keyword is not None]
    items = [Item(one.keyword.value, one.value) for one in call.args if one.keyword is not None]
    dicts = list(_given_by_stars(call, source))
    elsewhere = {item.name: item.value for _, entries in dicts for item in entries.values()}
    decision = decide([Item("", i.value) if i.name in kept else i for i in items], source.target, elsewhere)
    _note(source, decision, {n: (call.args[places[n]], items[n].name) for n, _ in decision.notes})
    edits = {places[n]: edit for n, edit in decision.edits.items()}
    if edits:
        source.change(call, call_change(source, call, edits))
    for name, place in ((items[n].name, places[n]) for n in decision.edits if items[n].name not in kept):
        refused = today(name) if name in OLD_NAMES else "its value is no longer one that it may have"
        source.mend_for_5(call.args[place], f"{name}=", f"transformers 5 refuses it: {refused}")
    given = {item.name: item.value for item in items}
    for display, entries in dicts:
        _rewrite_dict(display, entries, source, given)
    if function is None and source.imported(call.func) != "functools.partial":
        _list_places(call, source)


def _note(source: Source, decision: Decision, nodes: dict[int, tuple[cst.CSTNode, str]]) -> None:
    for place, reason in decision.notes:
        node, _ = nodes[place]
        source.list(node, source.code(node).strip().rstrip(","), reason)


def _list_places(call: cst.Call, source: Source) -> None:
    """List positional arguments after the first: other ones stood there in earlier releases."""
    positional = [one for one in call.args if one.keyword is None and not one.star]
    is_copy = isinstance(call.func, (cst.Name, cst.Attribute)) and source.imported(call.func) == "dataclasses.replace"
    if len(positional) > 1 and not is_copy:
        reason = "positional arguments after output_dir have changed their places: name them"
        source.list(call, source.code(positional[1].value), reason)


def _given_by_stars(call: cst.Call, source: Source) -> Iterator[tuple[cst.Dict, dict[int, Item]]]:
    """Yield the dict displays that a call takes by `**`, with their entries by place."""
    for argument in call.args:
        if argument.star != "**":
            continue
        display = argument.value if isinstance(argument.value, cst.Dict) else _dict_named(argument, source)
        if display is not None:
            yield display, dict(_entries(display))


def _entries(display: cst.Dict) -> Iterator[tuple[int, Item]]:
    for index, element in enumerate(display.elements):
        key = read_constant(element.key) if isinstance(element, cst.DictElement) else None
        if key is not None and isinstance(key.value, str):
            yield index, Item(key.value, element.value)


def _dict_named(argument: cst.Arg, source: Source) -> cst.Dict | None:
    """Return the dict display that a name is bound to, once, where nothing but such calls reads it."""
    name = argument.value
    if not isinstance(name, cst.Name):
        return None
    bindings = source.assignments(name)
    display = _display_of(bindings[0], source) if len(bindings) == 1 and isinstance(bindings[0], Assignment) else None
    if display is None:
        return None
    others = [access for access in bindings[0].references if not _is_plain_use(access, source)]
    if not others:
        return display
    if any(item.name in OLD_NAMES for _, item in _entries(display)):
        reason = "holds old names of training arguments, and is used elsewhere, too: rename its keys by hand"
        source.list(display, name.value, reason)
    return None


def _display_of(assignment: Assignment, source: Source) -> cst.Dict | None:
    statement = source.parent(assignment.node)
    if isinstance(statement, cst.AssignTarget):
        statement = source.parent(statement)
    value = statement.value if isinstance(statement, (cst.Assign, cst.AnnAssign)) else None
    return value if isinstance(value, cst.Dict) else None


def _is_plain_use(access: Access, source: Source) -> bool:
    """Return whether a dict is handed on by `**`, or one of its entries read or set by a constant key of today."""
    outer = source.parent(access.node)
    if isinstance(outer, cst.Arg):
        return outer.star == "**"
    if not isinstance(outer, cst.Subscript):
        return False
    index = outer.slice[0].slice
    key = read_constant(index.value) if isinstance(index, cst.Index) else None
    return key is not None and key.value not in OLD_NAMES


def _rewrite_dict(
    display: cst.Dict, entries: dict[int, Item], source: Source, given: dict[str, cst.BaseExpression]
) -> None:
    places = list(entries)
    decision = decide(list(entries.values()), source.target, given)
    _note(source, decision, {n: (display.elements[places[n]], entries[places[n]].name) for n, _ in decision.notes})
    edits = {places[n]: edit for n, edit in decision.edits.items()}

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Dict)
        return edited_dict(node, edits)

    if edits and not source.is_changed(display):
        source.change(display, change)


def _list_unknown(call: cst.Call, source: Source, things: Things) -> None:
    """List old names that a class is given which this source does not know."""
    if isinstance(call.func, cst.Name) and call.func.value == "dict":
        # Who takes it is not looked up
        for argument in call.args:
            keyword = "" if argument.keyword is None else argument.keyword.value
            if keyword in OLD_NAMES and keyword not in ATTRIBUTES_ONLY:
                reason = f"if it is for training arguments, {today(keyword)}"
                source.list(argument, f"dict({keyword}=…)", reason)
    name = source.imported(call.func)
    last = (name or "").rpartition(".")[2]
    if name is None or not last[:1].isupper():
        return
    for argument in call.args:
        keyword = "" if argument.keyword is None else argument.keyword.value
        if keyword in OLD_NAMES and last.endswith(("Arguments", "Config", "Args")):
            source.list(argument, f"{last}({keyword}=…)", f"{_OTHERS_OWN}{today(keyword)}")
        elif keyword == "tokenizer" and last.endswith("Trainer"):
            reason = "the class is not known here: most trainers call it processing_class today"
            source.list(argument, f"{last}(tokenizer=…)", reason)
