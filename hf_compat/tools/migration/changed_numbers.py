"""Find code that gives other numbers than under 4.x: losses that nothing divides, and fractions of updates."""

from __future__ import annotations

import ast
import functools
import re

import libcst as cst

from hf_compat.tools.migration.calls import ancestries
from hf_compat.tools.migration.constant_arguments import constant_of
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing
from hf_compat.tools.migration.installed_names import installed_names
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, keyword, methods_of

ACCUMULATION = "gradient_accumulation_steps"
# Heads of most of whose models in 5.23 this holds, as far as the class is chosen by a checkpoint
_HEADS = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    "ForNextSentencePrediction", "ForPreTraining", "ForImageClassification", "ForSemanticSegmentation",
)  # fmt: skip
# Each of them says how a loss is divided, or has another one computed
_OWN = ("compute_loss", "training_step")
_SETTINGS = ("compute_loss_func", "label_smoothing_factor", "accepts_loss_kwargs", "loss_is_scaled_for_ga")


def list_undivided(source: Source, things: ExpressionTypes) -> None:
    """List accumulations of a number above 1 beside a model whose loss is divided by nothing under transformers 5."""
    methods = (one.name.value for kind in things.local_classes for one in methods_of(kind))
    names = {one.value for one in source.of(cst.Name)}
    makers = (one.func for one in source.of(cst.Call) if things.of(one.func) is Thing.TRAINER_CLASS)
    has_trainer = any(not _computes_losses(one, source) for one in makers)
    if not has_trainer or not names.isdisjoint(_SETTINGS) or not set(methods).isdisjoint(_OWN):
        return
    counts = [
        (argument, constant.value)
        for call in source.of(cst.Call)
        if things.made_by(call) is Thing.ARGUMENTS
        for argument in call.args
        if keyword(argument) == ACCUMULATION and (constant := constant_of(argument.value, source)) is not None
    ]
    for model in sorted(_models(source)) if counts else ():
        effect = _effect_of(model)
        for argument, count in counts if effect is not None else ():
            if isinstance(count, int) and count > 1:
                means = "of most such models" if model.startswith("Auto") else f"of {model}"
                reason = (
                    f"transformers 5 divides the loss {means}, a mean, neither by micro-batches nor by items: loss and "
                    f"gradients are {count} times those of 4.45. Set `model.accepts_loss_kwargs = False`"
                )
                source.list(argument, f"{ACCUMULATION}={count}", reason, effect or Effect.LOOK)


def _computes_losses(maker: cst.BaseExpression, source: Source) -> bool:
    """Whether a trainer's class comes from another file that has a loss of its own."""
    bodies = (kind.body for one in ancestries(maker, source) for kind in one.classes)
    return any(isinstance(one, ast.FunctionDef) and one.name in _OWN for body in bodies for one in body)


def list_fractions(source: Source, things: ExpressionTypes) -> None:
    """List a `warmup_steps` that the source sets to a product or quotient, which may be a fraction of updates."""
    for node in source.of(cst.Assign):
        target, value = node.targets[0].target, node.value
        if not (isinstance(target, cst.Attribute) and target.attr.value == "warmup_steps"):
            continue
        is_fraction = isinstance(value, cst.BinaryOperation) and isinstance(value.operator, (cst.Multiply, cst.Divide))
        if is_fraction and things.of(target.value) is Thing.ARGUMENTS:
            reason = (
                "a fraction above 1 is cut to whole updates, as in transformers 5 (4.2 is 4). Releases 4.x warmed up "
                "over 4.2 updates. A number below 1 is a share of all updates"
            )
            source.list(node, source.code(target), reason)


def _models(source: Source) -> set[str]:
    """Names of transformers' models with a head that the source makes."""
    made = set()
    for call in source.of(cst.Call):
        whole = source.imported(call.func)
        name = whole.removesuffix(".from_pretrained").removesuffix(".from_config").rpartition(".")[2]
        if whole.partition(".")[0] == "transformers" and re.match(r"[A-Z]\w*For[A-Z]", name):
            made.add(name)
    return made


@functools.cache
def _effect_of(model: str) -> Effect | None:
    """Whether a model's loss is divided by nothing: certainly, perhaps, or not at all (None)."""
    if model.startswith("Auto"):
        return Effect.LOOK if model.endswith(_HEADS) else None
    names = installed_names("transformers")
    forward = None if names is None or names.version.startswith("4.") else names.forward_of(model)
    if forward is None or forward.args.kwarg is None:
        return None
    text = ast.unparse(forward)
    is_counted = "num_items_in_batch" in text or re.search(r"loss_function\([^)]*\*\*", text) is not None
    return None if is_counted or "loss" not in text else Effect.DIFFERS
