"""Rewrite calls that make training arguments, trainers and optimizers, and dicts that they take by `**`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import TypeGuard

import libcst as cst
from libcst.metadata import Assignment

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.tools.migration.class_graph import Ancestry
from hf_compat.tools.migration.elements import Edit, edit_call, edited_dict
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing
from hf_compat.tools.migration.old_arguments import Decision, Item, decide, is_renamed, read_constant, today
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted, fields_of, is_super_call, keyword, methods_of

# The parameters of a trainer by place. Since 4.46 `compute_loss_func` stands before `compute_metrics`.
_TRAINER_PLACES = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init",
    "compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
)  # fmt: skip
_MOVED_FROM = _TRAINER_PLACES.index("compute_loss_func")
_GONE_KEYWORDS = {
    "prediction_loss_only": "an argument of TrainingArguments since 3.1",
    "tb_writer": "gone: give a TensorBoardCallback(tb_writer) among the callbacks",
}
# The parameters of transformers' AdamW, and those of its defaults that differ from torch's.
_ADAMW_PLACES = ("params", "lr", "betas", "eps", "weight_decay", "correct_bias", "no_deprecation_warning")
_ADAMW_DEFAULTS = {"eps": "1e-6", "weight_decay": "0.0"}
_MODEL_PATH = "is resume_from_checkpoint now: a folder with only a model cannot be resumed from"


def rewrite_training_calls(source: Source, things: ExpressionTypes) -> None:
    """Rewrite calls of a trainer's `train()`, and the dicts that a parser makes arguments of."""
    for call in source.of(cst.Call):
        func, first = call.func, call.args[0].value if call.args else None
        owner, method = (func.value, func.attr.value) if isinstance(func, cst.Attribute) else (func, "")
        if method == "train" and (is_super_call(call, "train") or things.of(owner) is Thing.TRAINER):
            for place, argument in (one for one in enumerate(call.args) if keyword(one[1]) == "model_path"):
                edit_call(source, call, {place: Edit(name="resume_from_checkpoint")})
                source.list(argument, source.code(argument).strip().rstrip(","), _MODEL_PATH)
        elif method == "parse_dict" and isinstance(first, cst.Dict) and things.of(owner) is Thing.PARSER:
            _rewrite_dict(first, source, {})


def lineage_of(node: cst.BaseExpression, source: Source) -> Iterator[cst.ClassDef]:
    """Yield the class of this source that a name stands for, and its bases in this source."""
    seen: set[cst.ClassDef] = set()
    found = source.bound(node, cst.ClassDef)
    while found is not None and found not in seen:
        seen.add(found)
        yield found
        found = next((up for base in found.bases if (up := source.bound(base.value, cst.ClassDef)) is not None), None)


def ancestries(node: cst.BaseExpression, source: Source) -> Iterator[Ancestry]:
    """Yield the classes of other files that a class, or one of its bases in this source, leads to."""
    bases = [node, *(base.value for one in lineage_of(node, source) for base in one.bases)]
    yield from (found for one in bases if (found := source.graph.ancestry(source.imported(one))) is not None)


def rewrite_arguments(source: Source, things: ExpressionTypes) -> set[cst.Dict | cst.Call]:
    """Rewrite the calls that make arguments, and the dicts that these take. Return the dicts."""
    taken: set[cst.Dict | cst.Call] = set()
    for call in (one for one in source.of(cst.Call) if things.made_by(one) is Thing.ARGUMENTS):
        function = source.bound(call.func, cst.FunctionDef)
        own = () if function is None else (*function.params.params, *function.params.kwonly_params)
        kept = {one.name.value for one in own}
        for node in itertools.takewhile(things.local_classes.__contains__, lineage_of(call.func, source)):
            names = (target.value for _, target in fields_of(node))
            kept |= {name for name in names if name in OLD_NAMES and not is_renamed(name)}
        kept |= {name for one in ancestries(call.func, source) for name in one.own_fields if name in OLD_NAMES}
        places = [index for index, one in enumerate(call.args) if one.keyword is not None]
        items = [Item(keyword(call.args[place]), call.args[place].value) for place in places]
        dicts = [display for one in call.args if one.star == "**" and (display := display_of(one, source)) is not None]
        elsewhere = {item.name: item.value for display in dicts for item in entries_of(display).values()}
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
        positional = [one for one in call.args if one.keyword is None and not one.star]
        is_other = function is not None or source.imported(call.func) in ("functools.partial", "dataclasses.replace")
        # Earlier releases had other arguments at these places
        if len(positional) > 1 and not is_other:
            reason = "positional arguments after output_dir have changed their places: name them"
            source.list(call, source.code(positional[1].value), reason)
        taken.update(dicts)
    return taken


def _note(source: Source, decision: Decision, nodes: Sequence[cst.Arg | cst.BaseDictElement]) -> None:
    for place, reason in decision.notes:
        source.list(nodes[place], source.code(nodes[place]).strip().rstrip(","), reason)


def entries_of(display: cst.Dict | cst.Call) -> dict[int, Item]:
    """The constant keys of a dict with their values, by their places."""
    if isinstance(display, cst.Call):
        return {n: Item(keyword(one), one.value) for n, one in enumerate(display.args) if one.keyword is not None}
    found = {}
    for index, element in enumerate(display.elements):
        key = read_constant(element.key) if isinstance(element, cst.DictElement) else None
        if key is not None and isinstance(key.value, str):
            found[index] = Item(key.value, element.value)
    return found


def display_of(argument: cst.Arg, source: Source) -> cst.Dict | cst.Call | None:
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
    is_plain = True
    for outer, key in source.keys(bindings):
        # Forwarded by `**`, or an entry read or set by a current constant key
        held = read_constant(key) if isinstance(outer, cst.Subscript) else None
        is_current = held is not None and held.value not in OLD_NAMES
        is_plain &= outer.star == "**" if isinstance(outer, cst.Arg) else is_current
    if is_plain:
        return display
    if any(item.name in OLD_NAMES for item in entries_of(display).values()):
        reason = "holds old names of training arguments, and is used elsewhere, too: rename its keys by hand"
        source.list(display, dotted(name), reason)
    return None


def _is_dict(node: cst.CSTNode | None, source: Source) -> TypeGuard[cst.Dict | cst.Call]:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "dict":
        return not any(isinstance(one, Assignment) for one in source.assignments(node.func))  # else a name of its own
    return isinstance(node, cst.Dict)


def _rewrite_dict(display: cst.Dict | cst.Call, source: Source, given: dict[str, cst.BaseExpression]) -> None:
    entries = entries_of(display)
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


def list_unknown_calls(source: Source, things: ExpressionTypes, taken: Container[cst.CSTNode]) -> None:
    """List old names that are given to `dict`, or to an imported class of unknown kind."""
    calls = (one for one in source.of(cst.Call) if one not in taken and things.made_by(one) is None)
    for call, argument in ((one, argument) for one in calls for argument in one.args):
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


def rewrite_trainer_calls(source: Source, things: ExpressionTypes) -> None:
    """Rewrite the calls that make trainers."""
    for call in (one for one in source.of(cst.Call) if things.made_by(one) is Thing.TRAINER):
        _list_moved_places(call, call.args, source)
        # The parameters that the `__init__` of a class in this source names, or takes out of its `**keywords`
        makers = (m for one in lineage_of(call.func, source) for m in methods_of(one) if m.name.value == "__init__")
        own: set[object] = set()
        for params in (one.params for one in makers):
            own |= {one.name.value for one in (*params.params, *params.kwonly_params)}
            keys = (key for _, key in source.keys(source.bindings_of(params.star_kwarg)))
            own |= {key.evaluated_value for key in keys if isinstance(key, cst.SimpleString)}
        own |= {name for one in ancestries(call.func, source) for name in one.own_parameters}
        names = [keyword(one) for one in call.args]
        if "tokenizer" in own:
            continue
        if "tokenizer" in names and "processing_class" not in names:
            place = names.index("tokenizer")
            edit_call(source, call, {place: Edit(name="processing_class")})
            source.mend_for_5(call.args[place], "tokenizer=", "transformers 5's trainers call it processing_class")
        for index, name in enumerate(names):
            if name in _GONE_KEYWORDS:
                source.list(call.args[index], f"{name}=", _GONE_KEYWORDS[name])


def list_moved_places_of_bases(source: Source, things: ExpressionTypes) -> None:
    """List moved positional arguments in `Trainer.__init__(self, …)`."""
    for call in source.of(cst.Call):
        if (
            isinstance(call.func, cst.Attribute)
            and _is_init_of_base(call)
            and (things.of(call.func.value) is Thing.TRAINER_CLASS)
        ):
            _list_moved_places(call, call.args[1:], source)


def _list_moved_places(call: cst.Call, args: Sequence[cst.Arg], source: Source) -> None:
    """List a call of a trainer's constructor whose positional arguments have another meaning since 4.46."""
    given = [dotted(one.value).rpartition(".")[2] for one in args if one.keyword is None and not one.star]
    if len(given) <= _MOVED_FROM:
        return
    owner = next((one for one in source.above(call) if isinstance(one, cst.ClassDef)), None)
    bases = [base.value for base in owner.bases] if owner is not None and _is_init_of_base(call) else [call.func]
    own = {name for one in bases for name in _own_places(one, source)}
    moved = [
        name
        for name, today_here in zip(given[_MOVED_FROM:], _TRAINER_PLACES[_MOVED_FROM:], strict=False)
        if name in _TRAINER_PLACES and name != today_here and name not in own
    ]
    if moved:
        reason = f"since 4.46 {moved[0]} stands one place later, and others after it: a TypeError; name the arguments"
        source.list(call, source.code(call.func), reason, Effect.FAILS)
    else:
        source.list(call, source.code(call.func), "positional arguments from the eighth on have moved: name them")


def _is_init_of_base(call: cst.Call) -> bool:
    """Whether a call is `super().__init__(…)` or `Base.__init__(self, …)`."""
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "__init__"


def _own_places(maker: cst.BaseExpression, source: Source) -> Iterator[str]:
    """Yield the parameters that constructors of a class's own lineage name."""
    for one in lineage_of(maker, source):
        yield from (
            param.name.value for m in methods_of(one) if m.name.value == "__init__" for param in m.params.params
        )
    yield from (name for one in ancestries(maker, source) for name in one.own_parameters)


def rewrite_adamw(source: Source, things: ExpressionTypes) -> None:
    """Give torch's AdamW the defaults of transformers' AdamW, which it replaces."""
    for call in (one for one in source.of(cst.Call) if things.of(one.func) is Thing.ADAMW):
        if any(one.star for one in call.args):
            source.list(
                call, source.code(call.func), "torch's AdamW has other defaults: give eps=1e-6, weight_decay=0.0"
            )
            continue
        names = [keyword(one) or _ADAMW_PLACES[n] for n, one in enumerate(call.args[:7])]
        edits: dict[int, Edit] = {}
        for place, name in enumerate(names):
            value = read_constant(call.args[place].value)
            if name == "no_deprecation_warning" or (
                name == "correct_bias" and value is not None and value.value is True
            ):
                edits[place] = Edit(drop=True)
            elif name == "correct_bias":
                source.list(call.args[place], "AdamW(correct_bias=…)", "torch's AdamW always corrects the bias")
        added = [(name, cst.parse_expression(value)) for name, value in _ADAMW_DEFAULTS.items() if name not in names]
        edit_call(source, call, edits, added)
