"""What models, tokenizers and configurations of 4.x had and took, and those of transformers 5 do not."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hf_compat.interop.former_names import FORMER_KEYWORDS, FORMER_MEMBERS, OF_GENERATION
from hf_compat.tools.migration.calls import local_class
from hf_compat.tools.migration.elements import Edit, constant
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.resolving import is_beside_older
from hf_compat.tools.migration.source import Source, dotted
from hf_compat.tools.migration.trainer_calls import call_change

# Words of other libraries, too: members of what is called a model alone.
_OF_MODELS = ("parallelize", "deparallelize", "prune_heads")
# Python tokenizers still have these.
_OF_SOME = ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences", "prepare_for_model",
            "truncate_sequences")  # fmt: skip
# What takes a keyword that it does not know without a word.
_TAKE_ANY = ("Tokenizer", "TokenizerFast", "Config", "Processor", "Extractor")


def rewrite_former_members(source: Source) -> None:
    """Rewrite, or list, members and keywords that transformers 5 lacks; an older release beside this one has them."""
    for call in source.of(cst.Call):
        kind = _loaded(call, source)
        if kind:
            _rewrite_loading(call, kind, source)
    if is_beside_older(source.target):
        return
    own = {one.name.value for one in source.of(cst.FunctionDef)}
    own |= {one for one in FORMER_MEMBERS if f'"{one}"' in source.text or f"'{one}'" in source.text}  # asked for first
    for node in source.of(cst.Attribute):
        name = node.attr.value
        if name in FORMER_MEMBERS and name not in own and not isinstance(source.parent(node), cst.AssignTarget):
            if name not in _OF_MODELS or _is_model(node.value):
                effect = Effect.LOOK if name in _OF_SOME else Effect.FAILS
                source.list(node, source.code(node), FORMER_MEMBERS[name], effect)
        elif name in OF_GENERATION:
            _list_setting(node, source)


def _is_model(node: cst.BaseExpression) -> bool:
    return "model" in dotted(node).rpartition(".")[2].lower()


def _list_setting(node: cst.Attribute, source: Source) -> None:
    """List a setting of generation that is read from a model's configuration, or put there."""
    owner, outer = node.value, source.parent(node)
    if not isinstance(owner, cst.Attribute) or owner.attr.value != "config" or not _is_model(owner.value):
        return
    statement = source.parent(outer) if isinstance(outer, cst.AssignTarget) else None
    value = read_constant(statement.value) if isinstance(statement, cst.Assign) else None
    if value is None or value.value is not None:
        model, name = source.code(owner.value), node.attr.value
        reason = f"transformers 5 takes settings of generation from {model}.generation_config.{name} alone"
        source.list(node, source.code(node), reason, Effect.FAILS)


def _loaded(call: cst.Call, source: Source) -> str:
    """Return the class of transformers whose `from_pretrained` is called, or that a class of this source inherits."""
    func = call.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "from_pretrained":
        return ""
    own = local_class(func.value, source)
    kinds = [func.value] if own is None else [one.value for one in own.bases]
    names = (source.imported(one) or "" for one in kinds)
    return next((one.rpartition(".")[2] for one in names if one.partition(".")[0] == "transformers"), "")


def _rewrite_loading(call: cst.Call, kind: str, source: Source) -> None:
    edits: dict[int, Edit] = {}
    for place, argument, name in _former_keywords(call):
        effect = Effect.LOOK if kind.endswith(_TAKE_ANY) else Effect.FAILS
        edit = _edit_of(name, argument.value)
        if edit is not None:
            edits[place] = edit
        if is_beside_older(source.target):
            continue
        tell = source.list if edit is None else source.mend
        tell(argument, f"{kind}.from_pretrained({name}=…)", FORMER_KEYWORDS[name], effect)
    if edits:
        source.change(call, call_change(source, call, edits))


def _former_keywords(call: cst.Call) -> Iterator[tuple[int, cst.Arg, str]]:
    given = {one.keyword.value for one in call.args if one.keyword is not None}
    for place, argument in enumerate(call.args):
        name = "" if argument.keyword is None else argument.keyword.value
        if name in FORMER_KEYWORDS and not (name == "use_auth_token" and "token" in given):
            yield place, argument, name


def _edit_of(name: str, given: cst.BaseExpression) -> Edit | None:
    """Return what becomes of a keyword; None where a person decides."""
    if name == "use_auth_token":
        return Edit(name="token")
    value = read_constant(given)
    if name == "resume_download" or (value is not None and not value.value):
        return Edit(drop=True)
    if name == "use_flash_attention_2" and value is not None:
        return Edit(name="attn_implementation", value=lambda _: constant("flash_attention_2"))
    return None
