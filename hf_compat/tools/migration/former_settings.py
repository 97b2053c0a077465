"""List settings of configurations, members of tokenizers and forms of caches that 4.x had and transformers 5 lacks."""

from __future__ import annotations

import re

import libcst as cst

from hf_compat.tools.migration.gone_names import FORMER_SETTINGS, REFUSED_SETTINGS, WITHOUT_EFFECT
from hf_compat.tools.migration.names import is_beside_older
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted, keyword

_OF_PYTHON = "gone in transformers 5, whose tokenizers are Rust's"
_OF_TOKENIZERS = {
    "max_len": "gone since 4.0: `model_max_length`",
    "max_model_input_sizes": "gone in transformers 5: `model_max_length`",
    "unique_no_split_tokens": _OF_PYTHON,
    "encoder": f"{_OF_PYTHON}: `get_vocab()`",
    "ids_to_tokens": f"{_OF_PYTHON}: `convert_ids_to_tokens`",
    "basic_tokenizer": _OF_PYTHON,
    "wordpiece_tokenizer": _OF_PYTHON,
    "byte_decoder": _OF_PYTHON,
    "bpe_ranks": _OF_PYTHON,
    "prepare_for_tokenization": _OF_PYTHON,
}
# Names of classes whose instances are models.
_MODEL = re.compile(r"^AutoModel|Model$|For[A-Z]|HeadModel")
_FORMER_LABELS = ("masked_lm_labels", "lm_labels")
_CACHE = "past_key_values"


def list_former_settings(source: Source) -> None:
    """List what a source reads from, and writes to, configurations in vain. An installed 4.x has all of it."""
    if is_beside_older(source.target):
        return
    written = {one.target for one in source.of(cst.AssignTarget)}
    own = {one.attr.value for one in written if isinstance(one, cst.Attribute)}
    for node in source.of(cst.Attribute):
        name = node.attr.value
        if "config" not in _last(node.value):
            continue
        if node in written:
            _list_written(node, source)
        elif name in FORMER_SETTINGS and name not in own and not _is_quoted(name, source):
            effect = Effect.FAILS if name == "rope_theta" else Effect.LOOK
            source.list(node, source.code(node), FORMER_SETTINGS[name], effect)
    for call in source.of(cst.Call):
        _list_given(call, source)


def _list_given(call: cst.Call, source: Source) -> None:
    """List the settings that a call gives to a configuration in vain, or to a model, which refuses them."""
    verb = dotted(call.func).rpartition(".")[2]
    path = source.imported(call.func)
    maker = path.removesuffix(f".{verb}").rpartition(".")[2]
    is_loading = "_pretrained" in verb and path.startswith("transformers.")
    is_config = path.startswith("transformers.") and (maker.endswith("Config") or verb.endswith("Config"))
    for argument in call.args:
        name = keyword(argument)
        what = f"{source.code(call.func)}({name}=…)"
        if is_config or verb == "from_encoder_decoder_pretrained":
            is_read = name == "rope_theta" and not is_loading  # the class itself takes it
            if name in WITHOUT_EFFECT and not is_read and _has_effect(argument.value):
                source.list(argument, what, WITHOUT_EFFECT[name], Effect.DIFFERS)
        elif is_loading and name in REFUSED_SETTINGS and _MODEL.search(maker):
            source.list(argument, what, "a TypeError in transformers 5: set it in the configuration", Effect.FAILS)


def _list_written(node: cst.Attribute, source: Source) -> None:
    statement = source.parent(source.parent(node))
    name, value = node.attr.value, statement.value if isinstance(statement, cst.Assign) else None
    if name in WITHOUT_EFFECT and value is not None and _has_effect(value):
        source.list(node, source.code(node), WITHOUT_EFFECT[name], Effect.DIFFERS)
    elif name == "rope_scaling" and isinstance(value, cst.Dict) and "rope_theta" not in source.text:
        reason = "replaces the base, too, in transformers 5: put `rope_theta` into the dict"
        source.list(node, source.code(node), reason, Effect.FAILS)


def _has_effect(value: cst.BaseExpression) -> bool:
    """Whether a value may be another one than that which holds without it."""
    held = read_constant(value)
    return held is None or (bool(held.value) and held.value != "absolute")


def list_former_tokenizers(source: Source) -> None:
    """List members of tokenizers that are gone, and that other objects have, too."""
    if is_beside_older(source.target):
        return
    for node in source.of(cst.Attribute):
        name = node.attr.value
        if name in _OF_TOKENIZERS and _last(node.value) in ("tokenizer", "tok") and not _is_quoted(name, source):
            is_target = isinstance(source.parent(node), cst.AssignTarget)
            # Python's tokenizers, which few models still have, keep all but the first
            effect = Effect.FAILS if name.startswith("max_") else Effect.LOOK
            if not is_target:
                source.list(node, source.code(node), _OF_TOKENIZERS[name], effect)


def list_former_forwards(source: Source) -> None:
    """List labels by their names of 3.x, and caches that are read and made as tuples."""
    if is_beside_older(source.target):
        return
    for call in source.of(cst.Call):
        for argument in call.args if "model" in _last(call.func) else ():
            if keyword(argument) in _FORMER_LABELS:
                reason = "is labels since 4.0: a TypeError, or no loss"
                source.list(argument, f"{source.code(call.func)}({keyword(argument)}=…)", reason, Effect.FAILS)
    for node in source.of(cst.Subscript):
        owner = node.value
        if isinstance(owner, cst.Attribute) and owner.attr.value == _CACHE and dotted(owner.value) != "self":
            reason = "a cache of transformers 5 has no index: `.layers[n].keys` and `.layers[n].values`"
            source.list(node, source.code(owner), reason, Effect.FAILS)
    for statement in source.of(cst.Assign) if "Cache" not in source.text else ():
        target, maker = statement.targets[0].target, getattr(statement.value, "func", None)
        if _last(target) == _CACHE and isinstance(maker, cst.Attribute) and maker.attr.value == "split":
            reason = "transformers 5 takes no tuple: `DynamicCache(…)` makes a cache of it"
            source.list(statement, source.code(target), reason, Effect.FAILS)


def _last(node: cst.CSTNode) -> str:
    return dotted(node).rpartition(".")[2].lower()


def _is_quoted(name: str, source: Source) -> bool:
    """Whether a source asks for a name, as `hasattr(config, "name")` does."""
    return f'"{name}"' in source.text or f"'{name}'" in source.text
