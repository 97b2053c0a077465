"""Models that a script defines: what transformers 5 asks of them, and a trainer."""

from __future__ import annotations

import libcst as cst

from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing
from hf_compat.tools.migration.gone_names import OF_POST_INIT
from hf_compat.tools.migration.names import is_beside_older
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted, methods_of, walk


def rewrite_own_models(source: Source) -> None:
    """Rewrite or list what transformers 5 asks of a model that inherits from a `…PreTrainedModel`. 4.x does not ask."""
    if is_beside_older(source.target):
        return
    for model in source.of(cst.ClassDef):
        bases = [source.imported(one.value) for one in model.bases]
        if any(one.startswith("transformers.") and one.endswith("PreTrainedModel") for one in bases):
            _list_tied_weights(model, source)
            _finish_making(model, source)


def _list_tied_weights(model: cst.ClassDef, source: Source) -> None:
    for node in walk(model.body):
        if not (isinstance(node, cst.Assign) and isinstance(node.value, cst.List)):
            continue
        if dotted(node.targets[0].target) == "_tied_weights_keys":
            reason = "transformers 5 takes a dict here: the tied weight, and that of which it is"
            source.list(node, f"{model.name.value}._tied_weights_keys", reason, Effect.FAILS)


def _finish_making(model: cst.ClassDef, source: Source) -> None:
    """Make the first call that finishes `__init__` one of `post_init`. Without any, `from_pretrained` fails."""
    methods = {one.name.value: one for one in methods_of(model)}
    if "__init__" not in methods or "init_weights" in methods:
        return
    calls = [one for one in walk(methods["__init__"].body) if isinstance(one, cst.Call)]
    ends = [one for one in calls if dotted(one.func) in ("self.init_weights", "self.post_init")]
    if not ends:
        is_loaded = f"{model.name.value}.from_pretrained(" in source.text
        effect = Effect.FAILS if is_loaded else Effect.LOOK
        source.list(
            methods["__init__"], f"{model.name.value}.__init__", f"{OF_POST_INIT}: `from_pretrained` fails", effect
        )
    elif dotted(ends[0].func) == "self.init_weights":
        if len(ends) == 1 and isinstance(ends[0].func, cst.Attribute):
            source.rename(ends[0].func.attr, "post_init")
            source.mend(ends[0], "self.init_weights", OF_POST_INIT)
        else:
            source.list(ends[0], "self.init_weights", OF_POST_INIT, Effect.FAILS)


def list_nameless_forwards(source: Source, things: ExpressionTypes) -> None:
    """List a model whose `forward` names no column, in a source with a trainer that is not told to keep the columns."""
    has_trainer = any(things.of(one.func) is Thing.TRAINER_CLASS for one in source.of(cst.Call))
    if not has_trainer or "remove_unused_columns" in source.text:
        return
    for model in source.of(cst.ClassDef):
        if not any(source.imported(one.value).endswith(("nn.Module", "PreTrainedModel")) for one in model.bases):
            continue
        for forward in (one for one in methods_of(model) if one.name.value == "forward"):
            given = forward.params
            named = [*given.posonly_params, *given.params[1:], *given.kwonly_params]
            if given.star_kwarg is not None and not named:
                reason = (
                    "a trainer gives a model the columns that its forward names: remove_unused_columns=False keeps all"
                )
                source.list(forward, f"{model.name.value}.forward", reason)
