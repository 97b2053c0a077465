"""Rewrite calls that make training arguments, trainers and optimizers, and dicts that they take by `**`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import libcst as cst
from libcst.metadata import Access, Assignment

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.elements import Edit, edit_call, edited_dict
from hf_compat.tools.migration.old_arguments import Decision, Item, decide, is_renamed, read_constant, today
from hf_compat.tools.migration.source import Source, dotted, fields_of, keyword, methods_of, walk
from hf_compat.tools.migration.things import Thing, Things, instance_of

# Later releases put another parameter of the trainer at this place, so the following ones are given by keyword.
_TRAINER_PLACES = 7
_GONE_KEYWORDS = {
    "prediction_loss_only": "an argument of TrainingArguments since 3.1",
    "tb_writer": "gone: give a TensorBoardCallback(tb_writer) among the callbacks",
}
# The parameters of transformers' AdamW, and those of its defaults that differ from torch's.
_ADAMW_PLACES = ("params", "lr", "betas", "eps", "weight_decay", "correct_bias", "no_deprecation_warning")
_ADAMW_DEFAULTS = {"eps": "1e-6", "weight_decay": "0.0"}
_MODEL_PATH = "is resume_from_checkpoint now: a folder with only a model cannot be resumed from"


def rewrite_calls(source: Source, things: Things) -> None:
    """Rewrite all calls of one source."""
    others: list[cst.Call] = []
    taken: set[cst.CSTNode] = set()
    for call in source.of(cst.Call):
        kind, func = _makes(call, source, things), call.func
        owner, method = (func.value, func.attr.value) if isinstance(func, cst.Attribute) else (func, "")
        if kind is Thing.ARGUMENTS:
            taken |= _rewrite_arguments(call, source, things)
        elif kind is Thing.TRAINER:
            _rewrite_trainer(call, source)
        elif things.of(func) is Thing.ADAMW:
            _rewrite_adamw(call, source)
        elif method == "train" and (is_super_call(call, "train") or things.of(owner) is Thing.TRAINER):
            for place, argument in (one for one in enumerate(call.args) if keyword(one[1]) == "model_path"):
                edit_call(source, call, {place: Edit(name="resume_from_checkpoint")})
                source.list(argument, source.code(argument).strip().rstrip(","), _MODEL_PATH)
        elif method == "parse_dict" and call.args and things.of(owner) is Thing.PARSER:
            if isinstance(call.args[0].value, cst.Dict):
                _rewrite_dict(call.args[0].value, source, {})
        elif kind is None:
            others.append(call)
    _list_unknown(others, taken, source)


def _makes(call: cst.Call, source: Source, things: Things) -> Thing | None:
    """The kind of a call's result. For `super().__init__(…)` in a class it is the kind of its instances."""
    if source.imported(call.func) == "functools.partial" and call.args:
        return instance_of(things.of(call.args[0].value))
    function = source.bound(call.func, cst.FunctionDef)
    if function is not None:
        # A function that gives its `**keywords` to a class of training arguments makes some
        rest = function.params.star_kwarg
        bindings = source.assignments(rest.name) if rest is not None else ()
        for argument in (source.parent(read) for binding in bindings for read in source.reads(binding)):
            outer = source.parent(argument) if isinstance(argument, cst.Arg) and argument.star == "**" else None
            if isinstance(outer, cst.Call) and things.of(outer.func) is Thing.ARGUMENTS_CLASS:
                return Thing.ARGUMENTS
        return None
    made = things.of(call)
    if made is None and is_super_call(call, "__init__"):
        owner = next((one for one in source.above(call) if isinstance(one, cst.ClassDef)), None)
        return None if owner is None else instance_of(things.local_classes.get(owner))
    return made


def is_super_call(call: cst.Call, method: str) -> bool:
    """Whether a call is `super().METHOD(…)`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != method or not isinstance(func.value, cst.Call):
        return False
    return dotted(func.value.func) == "super"


def _lineage(node: cst.BaseExpression, source: Source) -> Iterator[cst.ClassDef]:
    """Yield the class of this source that a name stands for, and its bases in this source."""
    seen: set[cst.ClassDef] = set()
    found = source.bound(node, cst.ClassDef)
    while found is not None and found not in seen:
        seen.add(found)
        yield found
        found = next((up for base in found.bases if (up := source.bound(base.value, cst.ClassDef)) is not None), None)


def _rewrite_arguments(call: cst.Call, source: Source, things: Things) -> set[cst.Dict | cst.Call]:
    """Rewrite a call that makes arguments, and the dicts that it takes. Return these."""
    function = source.bound(call.func, cst.FunctionDef)
    own = () if function is None else (*function.params.params, *function.params.kwonly_params)
    kept = {one.name.value for one in own}
    for node in itertools.takewhile(things.local_classes.__contains__, _lineage(call.func, source)):
        names = (target.value for _, target in fields_of(node))
        kept |= {name for name in names if name in OLD_NAMES and not is_renamed(name)}
    places = [index for index, one in enumerate(call.args) if one.keyword is not None]
    items = [Item(keyword(call.args[place]), call.args[place].value) for place in places]
    dicts = [display for one in call.args if one.star == "**" and (display := _display(one, source)) is not None]
    elsewhere = {item.name: item.value for display in dicts for item in _entries(display).values()}
    decision = decide([Item("", i.value) if i.name in kept else i for i in items], source.target, elsewhere)
    _note(source, decision, [call.args[place] for place in places])
    edits = {places[n]: edit for n, edit in decision.edits.items()}
    if edits:
        edit_call(source, call, edits)
    for place in edits:
        name = keyword(call.args[place])
        if name not in kept:
            refused = today(name) if name in OLD_NAMES else "its value is no longer allowed"
            source.mend_for_5(call.args[place], f"{name}=", f"transformers 5 refuses it: {refused}")
    for display in dicts:
        _rewrite_dict(display, source, dict(items))
    imported = source.imported(call.func)
    positional = [one for one in call.args if one.keyword is None and not one.star]
    # Earlier releases had other arguments at these places
    if function is None and imported not in ("functools.partial", "dataclasses.replace") and len(positional) > 1:
        reason = "positional arguments after output_dir have changed their places: name them"
        source.list(call, source.code(positional[1].value), reason)
    return set(dicts)


def _note(source: Source, decision: Decision, nodes: Sequence[cst.Arg | cst.BaseDictElement]) -> None:
    for place, reason in decision.notes:
        source.list(nodes[place], source.code(nodes[place]).strip().rstrip(","), reason)


def _entries(display: cst.Dict | cst.Call) -> dict[int, Item]:
    if isinstance(display, cst.Call):
        return {n: Item(keyword(one), one.value) for n, one in enumerate(display.args) if one.keyword is not None}
    found = {}
    for index, element in enumerate(display.elements):
        key = read_constant(element.key) if isinstance(element, cst.DictElement) else None
        if key is not None and isinstance(key.value, str):
            found[index] = Item(key.value, element.value)
    return found


def _display(argument: cst.Arg, source: Source) -> cst.Dict | cst.Call | None:
    """The display or `dict(…)` that a call takes by `**`, directly or by a name that only such calls read."""
    name = argument.value
    if _is_dict(name, source):
        return name
    bindings = source.assignments(name)
    if len(bindings) != 1 or not isinstance(bindings[0], Assignment):
        return None
    statement = source.parent(bindings[0].node)
    if isinstance(statement, cst.AssignTarget):
        statement = source.parent(statement)
    display = statement.value if isinstance(statement, (cst.Assign, cst.AnnAssign)) else None
    if not _is_dict(display, source):
        return None
    if all(_is_plain_use(access, source) for access in bindings[0].references):
        return display
    if any(item.name in OLD_NAMES for item in _entries(display).values()):
        reason = "holds old names of training arguments, and is used elsewhere, too: rename its keys by hand"
        source.list(display, dotted(name), reason)
    return None


def _is_dict(node: cst.CSTNode | None, source: Source) -> TypeGuard[cst.Dict | cst.Call]:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "dict":
        return not any(isinstance(one, Assignment) for one in source.assignments(node.func))  # else a name of its own
    return isinstance(node, cst.Dict)


def _is_plain_use(access: Access, source: Source) -> bool:
    """Whether a use forwards a dict by `**`, or reads or sets an entry by a current constant key."""
    outer = source.parent(access.node)
    if isinstance(outer, cst.Arg):
        return outer.star == "**"
    index = outer.slice[0].slice if isinstance(outer, cst.Subscript) else None
    key = read_constant(index.value) if isinstance(index, cst.Index) else None
    return key is not None and key.value not in OLD_NAMES


def _rewrite_dict(display: cst.Dict | cst.Call, source: Source, given: dict[str, cst.BaseExpression]) -> None:
    entries = _entries(display)
    places = list(entries)
    decision = decide(list(entries.values()), source.target, given)
    parts = display.args if isinstance(display, cst.Call) else display.elements
    _note(source, decision, [parts[place] for place in places])
    edits = {places[n]: edit for n, edit in decision.edits.items()}
    if not edits or source.is_changed(display):
        return
    if isinstance(display, cst.Call):
        edit_call(source, display, edits)
    else:
        source.change(display, lambda node: edited_dict(node, edits))


def _list_unknown(calls: list[cst.Call], taken: set[cst.CSTNode], source: Source) -> None:
    """List old names that are given to `dict`, or to an imported class of unknown kind."""
    for call, argument in ((one, argument) for one in calls if one not in taken for argument in one.args):
        is_dict = isinstance(call.func, cst.Name) and call.func.value == "dict"
        last = source.imported(call.func).rpartition(".")[2]
        name = keyword(argument)
        if is_dict and name in OLD_NAMES and name not in ATTRIBUTES_ONLY:
            source.list(argument, f"dict({name}=…)", f"if it is for training arguments, {today(name)}")
        if last[:1].isupper() and name in OLD_NAMES and last.endswith(("Arguments", "Config", "Args")):
            reason = f"the class is not known here: if it makes training arguments, {today(name)}"
            source.list(argument, f"{last}({name}=…)", reason)
        elif last[:1].isupper() and name == "tokenizer" and last.endswith("Trainer"):
            reason = "the class is not known here: most trainers call it processing_class today"
            source.list(argument, f"{last}(tokenizer=…)", reason)


def _rewrite_trainer(call: cst.Call, source: Source) -> None:
    if len([one for one in call.args if one.keyword is None and not one.star]) > _TRAINER_PLACES:
        source.list(call, source.code(call.func), "positional arguments from the eighth on have moved: name them")
    if any("tokenizer" in _own_parameters(one) for one in _lineage(call.func, source)):
        return
    names = [keyword(one) for one in call.args]
    if "tokenizer" in names and "processing_class" not in names:
        place = names.index("tokenizer")
        edit_call(source, call, {place: Edit(name="processing_class")})
        source.mend_for_5(call.args[place], "tokenizer=", "transformers 5's trainers call it processing_class")
    for index, name in enumerate(names):
        if name in _GONE_KEYWORDS:
            source.list(call.args[index], f"{name}=", _GONE_KEYWORDS[name])


def _own_parameters(node: cst.ClassDef) -> Iterator[str]:
    """Yield the parameters that a class's own `__init__` names, or takes out of its `**keywords`."""
    method = next((one for one in methods_of(node) if one.name.value == "__init__"), None)
    if method is None:
        return
    params = method.params
    yield from (one.name.value for one in (*params.params, *params.kwonly_params))
    rest = params.star_kwarg.name.value if params.star_kwarg is not None else ""
    for inner in walk(method.body) if rest else ():
        # `rest["key"]`, `rest.get("key")`, `rest.pop("key")`, `"key" in rest`
        key: cst.CSTNode | None = None
        if isinstance(inner, cst.Subscript) and dotted(inner.value) == rest:
            index = inner.slice[0].slice
            key = index.value if isinstance(index, cst.Index) else None
        elif isinstance(inner, cst.Call) and dotted(inner.func) in (f"{rest}.get", f"{rest}.pop", f"{rest}.setdefault"):
            key = inner.args[0].value if inner.args else None
        elif isinstance(inner, cst.Comparison) and any(dotted(one.comparator) == rest for one in inner.comparisons):
            key = inner.left
        if isinstance(key, cst.SimpleString):
            yield str(key.evaluated_value)


def _rewrite_adamw(call: cst.Call, source: Source) -> None:
    """Give torch's AdamW the defaults of transformers' AdamW, which it replaces."""
    if any(one.star for one in call.args):
        source.list(call, source.code(call.func), "torch's AdamW has other defaults: give eps=1e-6, weight_decay=0.0")
        return
    names = [keyword(one) or _ADAMW_PLACES[n] for n, one in enumerate(call.args[:7])]
    edits: dict[int, Edit] = {}
    for place, name in enumerate(names):
        value = read_constant(call.args[place].value)
        if name == "no_deprecation_warning" or (name == "correct_bias" and value is not None and value.value is True):
            edits[place] = Edit(drop=True)
        elif name == "correct_bias":
            source.list(call.args[place], "AdamW(correct_bias=…)", "torch's AdamW always corrects the bias")
    added = [(name, cst.parse_expression(value)) for name, value in _ADAMW_DEFAULTS.items() if name not in names]
    edit_call(source, call, edits, added)
