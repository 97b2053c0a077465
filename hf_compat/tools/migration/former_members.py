"""Rewrite members and keywords of models, tokenizers and configurations that 4.x had and transformers 5 lacks."""

from __future__ import annotations

import libcst as cst

from hf_compat.tools.migration.calls import local_class
from hf_compat.tools.migration.elements import Edit, constant, edit_call
from hf_compat.tools.migration.gone_names import FORMER_KEYWORDS, FORMER_MEMBERS, OF_GENERATION
from hf_compat.tools.migration.names import is_beside_older
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted, keyword

# Other libraries use these words, too, so they count only for an object that is called a model.
_OF_MODELS = ("parallelize", "deparallelize", "prune_heads")
# Python tokenizers still have these.
_OF_SOME = ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences", "prepare_for_model",
            "truncate_sequences")  # fmt: skip
# Classes that silently accept an unknown keyword.
_TAKE_ANY = ("Tokenizer", "TokenizerFast", "Config", "Processor", "Extractor")


def rewrite_former_members(source: Source) -> None:
    """Rewrite or list members and keywords that transformers 5 lacks. An installed 4.x has them."""
    for call in source.of(cst.Call):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "from_pretrained":
            # The class of transformers, or that of which a class of this source is made
            own = local_class(call.func.value, source)
            names = map(source.imported, [call.func.value] if own is None else [one.value for one in own.bases])
            kinds = (one.rpartition(".")[2] for one in names if one.partition(".")[0] == "transformers")
            if (kind := next(kinds, "")) != "":
                _rewrite_loading(call, kind, source)
    if is_beside_older(source.target):
        return
    own_names = {one.name.value for one in source.of(cst.FunctionDef)}
    # `hasattr(model, "name")` shows that the source is prepared for its absence
    own_names |= {one for one in FORMER_MEMBERS if f'"{one}"' in source.text or f"'{one}'" in source.text}
    for node in source.of(cst.Attribute):
        name = node.attr.value
        if name in FORMER_MEMBERS and name not in own_names and not isinstance(source.parent(node), cst.AssignTarget):
            if name not in _OF_MODELS or _is_model(node.value):
                effect = Effect.LOOK if name in _OF_SOME else Effect.FAILS
                source.list(node, source.code(node), FORMER_MEMBERS[name], effect)
        elif name in OF_GENERATION:
            _list_setting(node, source)


def _is_model(node: cst.BaseExpression) -> bool:
    return "model" in dotted(node).rpartition(".")[2].lower()


def _list_setting(node: cst.Attribute, source: Source) -> None:
    owner, outer = node.value, source.parent(node)
    if not isinstance(owner, cst.Attribute) or owner.attr.value != "config" or not _is_model(owner.value):
        return
    statement = source.parent(outer) if isinstance(outer, cst.AssignTarget) else None
    value = read_constant(statement.value) if isinstance(statement, cst.Assign) else None
    if value is None or value.value is not None:
        model, name = source.code(owner.value), node.attr.value
        reason = f"transformers 5 takes settings of generation from {model}.generation_config.{name} alone"
        source.list(node, source.code(node), reason, Effect.FAILS)


def _rewrite_loading(call: cst.Call, kind: str, source: Source) -> None:
    edits: dict[int, Edit] = {}
    has_token = any(keyword(one) == "token" for one in call.args)
    for place, argument in enumerate(call.args):
        name, value = keyword(argument), read_constant(argument.value)
        if name not in FORMER_KEYWORDS or (name == "use_auth_token" and has_token):
            continue
        if name == "use_auth_token":
            edits[place] = Edit(name="token")
        elif name == "resume_download" or (value is not None and not value.value):
            edits[place] = Edit(drop=True)
        elif name == "use_flash_attention_2" and value is not None:
            edits[place] = Edit(name="attn_implementation", value=lambda _: constant("flash_attention_2"))
        if not is_beside_older(source.target):
            record = source.mend if place in edits else source.list
            effect = Effect.LOOK if kind.endswith(_TAKE_ANY) else Effect.FAILS
            record(argument, f"{kind}.from_pretrained({name}=…)", FORMER_KEYWORDS[name], effect)
    if edits:
        edit_call(source, call, edits)
