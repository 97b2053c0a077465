"""Calls of trainers and of transformers' AdamW: keywords of earlier releases become today's."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hf_compat.tools.migration.elements import Edit, edited_call
from hf_compat.tools.migration.layout import fitted_call
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.source import Change, Source, dotted
from hf_compat.tools.migration.things import Thing, Things

# Parameters of a trainer that a release has put another one before: from this place on they are given by keyword.
_TRAINER_PLACES = 7
_GONE_KEYWORDS = {
    "prediction_loss_only": "an argument of TrainingArguments since 3.1",
    "tb_writer": "gone: give a TensorBoardCallback(tb_writer) among the callbacks",
}
# What transformers' AdamW had where nothing was given; torch's differs.
_ADAMW_PLACES = ("params", "lr", "betas", "eps", "weight_decay", "correct_bias", "no_deprecation_warning")
_ADAMW_DEFAULTS = {"eps": "1e-6", "weight_decay": "0.0"}
_MODEL_PATH = "is resume_from_checkpoint now: a folder of a model alone is no place to go on from"


def call_change(source: Source, call: cst.Call, edits: dict[int, Edit]) -> Change:
    """Return the change that edits a call's arguments."""

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        return fitted_call(source, call, edited_call(node, edits))

    return change


def is_super_call(call: cst.Call, method: str) -> bool:
    """Return whether a call is `super().METHOD(…)`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != method or not isinstance(func.value, cst.Call):
        return False
    return isinstance(func.value.func, cst.Name) and func.value.func.value == "super"


def rewrite_trainer(call: cst.Call, source: Source, own: frozenset[str]) -> None:
    """Give a trainer's constructor today's keywords.

    Args:
        call: The call.
        source: Where it stands.
        own: Parameters that the called class's own `__init__` names.
    """
    if len([one for one in call.args if one.keyword is None and not one.star]) > _TRAINER_PLACES:
        source.list(call, source.code(call.func), "positional arguments from the eighth on have moved: name them")
    if "tokenizer" in own:
        return
    names = [one.keyword.value if one.keyword is not None else "" for one in call.args]
    if "tokenizer" in names and "processing_class" not in names:
        place = names.index("tokenizer")
        source.change(call, call_change(source, call, {place: Edit(name="processing_class")}))
        source.mend_for_5(call.args[place], "tokenizer=", "transformers 5's trainers call it processing_class")
    for index, name in enumerate(names):
        if name in _GONE_KEYWORDS:
            source.list(call.args[index], f"{name}=", _GONE_KEYWORDS[name])


def own_parameters(node: cst.ClassDef | None) -> frozenset[str]:
    """Return the parameters that a class's own `__init__` names, or takes out of its `**keywords`."""
    for statement in node.body.body if node is not None else ():
        if isinstance(statement, cst.FunctionDef) and statement.name.value == "__init__":
            params = statement.params
            rest = params.star_kwarg.name.value if params.star_kwarg is not None else ""
            return frozenset(
                (*(one.name.value for one in (*params.params, *params.kwonly_params)), *keys_read(statement.body, rest))
            )
    return frozenset()


def keys_read(body: cst.CSTNode, name: str) -> Iterator[str]:
    """Yield the constant keys of `name["key"]`, `name.get("key")`, `name.pop("key")`, `"key" in name`."""
    nodes = [body]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        key: cst.CSTNode | None = None
        if isinstance(node, cst.Subscript) and dotted(node.value) == name:
            index = node.slice[0].slice
            key = index.value if isinstance(index, cst.Index) else None
        elif isinstance(node, cst.Call) and dotted(node.func) in (f"{name}.get", f"{name}.pop", f"{name}.setdefault"):
            key = node.args[0].value if node.args else None
        elif isinstance(node, cst.Comparison) and any(dotted(one.comparator) == name for one in node.comparisons):
            key = node.left
        if isinstance(key, cst.SimpleString):
            yield str(key.evaluated_value)


def is_call_of_train(call: cst.Call, things: Things) -> bool:
    """Return whether a call is `trainer.train(…)`, or `super().train(…)`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "train":
        return False
    return is_super_call(call, "train") or things.of(func.value) is Thing.TRAINER


def rewrite_train(call: cst.Call, source: Source) -> None:
    """Give `train` the keyword that it has had since 4.3."""
    for place, argument in enumerate(call.args):
        if argument.keyword is not None and argument.keyword.value == "model_path":
            source.change(call, call_change(source, call, {place: Edit(name="resume_from_checkpoint")}))
            source.list(argument, source.code(argument).strip().rstrip(","), _MODEL_PATH)


def rewrite_adamw(call: cst.Call, source: Source) -> None:
    """Give torch's AdamW the defaults of transformers', whose place it takes."""
    if any(one.star for one in call.args):
        source.list(call, source.code(call.func), "torch's AdamW has other defaults: give eps=1e-6, weight_decay=0.0")
        return
    names = [one.keyword.value if one.keyword is not None else _ADAMW_PLACES[n] for n, one in enumerate(call.args[:7])]
    edits: dict[int, Edit] = {}
    for place, name in enumerate(names):
        value = read_constant(call.args[place].value)
        if name == "no_deprecation_warning" or (name == "correct_bias" and value is not None and value.value is True):
            edits[place] = Edit(drop=True)
        elif name == "correct_bias":
            source.list(call.args[place], "AdamW(correct_bias=…)", "torch's AdamW always corrects the bias")
    added = [(name, cst.parse_expression(value)) for name, value in _ADAMW_DEFAULTS.items() if name not in names]

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        return fitted_call(source, call, edited_call(node, edits, added))

    source.change(call, change)
