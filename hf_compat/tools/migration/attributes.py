"""Rewrite old names as attributes of training arguments and trainers, and as fields of subclasses.

Members and keywords of models, tokenizers and configurations that 4.x had and transformers 5 lacks are dealt with, too.
"""

from __future__ import annotations

import re

import libcst as cst
from libcst import matchers

from hf_compat.hf.argument_values import OLD_OPTIMIZERS
from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.interop.former_names import ABSENT, FORMER_METHODS
from hf_compat.tools.migration.elements import Edit, constant, edit_call
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing
from hf_compat.tools.migration.gone_names import FORMER_FILES, FORMER_KEYWORDS, FORMER_MEMBERS, OF_GENERATION
from hf_compat.tools.migration.names import is_beside_older
from hf_compat.tools.migration.old_arguments import (
    GONE_IN_5,
    OFF,
    OPTIMIZER_DIFFERS,
    is_flag,
    is_renamed,
    read_constant,
    switched_on,
    today,
)
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Source, binding_node, dotted, fields_of, keyword, methods_of

# The current expression of an old flag. `{}` is the object.
_READS = {
    "evaluate_during_training": '{}.eval_strategy == "steps"',
    "group_by_length": '{}.train_sampling_strategy == "group_by_length"',
    "adafactor": '{}.optim == "adafactor"',
    "include_inputs_for_metrics": '"inputs" in {}.include_for_metrics',
    "include_tokens_per_second": '{}.include_num_input_tokens_seen != "no"',
    "tpu_metrics_debug": '"tpu_metrics_debug" in {}.debug',
}
# In 4.x these were None unless given. The current names always have a value.
_NONE_UNLESS_GIVEN = ("per_gpu_train_batch_size", "per_gpu_eval_batch_size")
_TRAINER_NAMES = {
    "tokenizer": "processing_class",
    "is_local_master": "is_local_process_zero",
    "is_world_master": "is_world_process_zero",
}
_GONE_OF_TRAINERS = {
    "prediction_loop": "gone in 5.0: `evaluation_loop` has taken its place",
    "use_apex": "gone: Apex is not used any longer",
    **dict.fromkeys(("use_cuda_amp", "use_amp", "use_cpu_amp"), "gone: precision is the accelerator's"),
    **dict.fromkeys(("do_grad_scaling", "scaler"), "gone: the gradient scaler is the accelerator's"),
    "sharded_ddp": "gone, as FairScale is",
    "_gather_and_numpify": "gone in 5.0: `self.accelerator.gather_for_metrics`",
    "torch_jit_model_eval": "gone in 5.0",
    "_max_length": 'gone: `self._gen_kwargs.get("max_length")`',
    "_num_beams": 'gone: `self._gen_kwargs.get("num_beams")`',
}
# Those of them that this package's trainers have.
SUPPLIED = (
    "prediction_loop", "use_apex", "use_cuda_amp", "use_amp", "use_cpu_amp", "do_grad_scaling", "sharded_ddp",
)  # fmt: skip
# Methods that this package's trainers have and transformers' lost in 5.0 or later → their replacement there.
GONE_IN_5_OF_TRAINERS = {
    "_activate_neftune": "`transformers.integrations.neftune.activate_neftune`",
    "_add_sm_patterns_to_gitignore": "leave it out",
    "_align_special_tokens": "`transformers.trainer_utils.align_special_tokens`",
    "_deactivate_neftune": "`transformers.integrations.neftune.deactivate_neftune`",
    "_fsdp_qlora_plugin_updates": "set the argument `fsdp_config`",
    "_is_attention_mask_causal": "`transformers.trainer_pt_utils.is_attention_mask_causal`",
    "_nested_gather": "`self.accelerator.gather_for_metrics`",
    "_rotate_checkpoints": "`transformers.trainer_utils.rotate_checkpoints`",
    "_save_tpu": "`transformers.integrations.tpu.save_tpu_checkpoint`",
    "_sorted_checkpoints": "`transformers.trainer_utils.sort_checkpoints`",
    "compare_trainer_and_checkpoint_args": "`transformers.trainer_utils.compare_trainer_and_checkpoint_args`",
    "ipex_optimize_model": "prepare the model before it is given to the Trainer",
    "is_tp_enabled": "leave it out",
    "num_tokens": "count the tokens of `get_train_dataloader()`",
    "propagate_args_to_deepspeed": "`transformers.integrations.deepspeed.propagate_args_to_deepspeed`",
}
# Other libraries use these words, too, so they count only for an object that is called a model.
_OF_MODELS = ("parallelize", "deparallelize", "prune_heads", "freeze_feature_extractor")
# Python tokenizers still have these.
_OF_SOME = ("build_inputs_with_special_tokens", "create_token_type_ids_from_sequences", "prepare_for_model",
            "truncate_sequences")  # fmt: skip
# Classes that silently accept an unknown keyword.
_TAKE_ANY = ("Tokenizer", "TokenizerFast", "Config", "Processor", "Extractor")
# Nodes in which a comparison needs no parentheses.
_NEEDS_NO_PARENTHESES = (
    cst.If, cst.While, cst.Assign, cst.AnnAssign, cst.Arg, cst.Return, cst.BooleanOperation, cst.NamedExpr, cst.Assert,
)  # fmt: skip


def rewrite_trainer_attributes(source: Source, things: ExpressionTypes) -> None:
    """Rewrite attributes of trainers that have another name or place today."""
    absent = {**ABSENT, **FORMER_METHODS}
    known = {*_TRAINER_NAMES, *_GONE_OF_TRAINERS, *GONE_IN_5_OF_TRAINERS, *absent}
    own_methods = {one.name.value for one in source.of(cst.FunctionDef)}
    targets = {dotted(one.target) for one in source.of(cst.AssignTarget)}
    own = own_methods | {name for name in known if f"self.{name}" in targets}
    named = [one for one in source.of(cst.Attribute) if one.attr.value in known]
    for node in (one for one in named if things.of(one.value) is Thing.TRAINER):
        name = node.attr.value
        if name in own:
            continue
        if name in SUPPLIED and source.target is Target.HF_COMPAT:
            continue
        if name in absent and source.target is Target.HF_COMPAT:
            source.list(node, source.code(node), f"hf_compat has no such name: {absent[name]}", Effect.FAILS)
        elif name in GONE_IN_5_OF_TRAINERS and source.target is Target.TRANSFORMERS_5:
            source.list(node, source.code(node), f"gone in transformers 5: {GONE_IN_5_OF_TRAINERS[name]}", Effect.FAILS)
        elif name in _GONE_OF_TRAINERS:
            # Copied steps read `scaler` behind flags that are false here
            effect = source.fails_in_5 if name == "scaler" else Effect.FAILS
            source.list(node, source.code(node), _GONE_OF_TRAINERS[name], effect)
        elif name in _TRAINER_NAMES:
            _rename_attribute(node, _TRAINER_NAMES[name], source)


def rewrite_argument_attributes(source: Source, things: ExpressionTypes) -> None:
    """Rewrite old names as attributes of training arguments, and list those of what may be some."""
    of_arguments = [node for node, thing in things.local_classes.items() if thing is Thing.ARGUMENTS_CLASS]
    # Old names that a class of arguments in this source has as methods, or as fields with another meaning
    own = {method.name.value for node in of_arguments for method in methods_of(node)}
    own |= {target.value for node in of_arguments for _, target in fields_of(node)}
    own = {name for name in own if name in OLD_NAMES and not is_renamed(name)}
    for node in (one for one in source.of(cst.Attribute) if one.attr.value in OLD_NAMES):
        name, owner = node.attr.value, things.of(node.value)
        if owner is Thing.ARGUMENTS and name not in own:
            _rewrite_of_arguments(node, source, things)
        elif owner is None and not things.is_something_else(node.value):
            # It may be training arguments, unless it is the namespace of a parser
            subject = dotted(node.value)
            is_kept = name in ATTRIBUTES_ONLY and source.target is Target.HF_COMPAT
            if "arg" in subject.rpartition(".")[2].lower() and not is_kept:
                means = GONE_IN_5.get(name, today(name))
                source.list(node, source.code(node), f"if {subject} is training arguments, {means}")


def rewrite_fields(source: Source, things: ExpressionTypes) -> None:
    """Rename a field of a class of arguments, or leave it to a person if its value has another meaning today."""
    of_arguments = (node for node, thing in things.local_classes.items() if thing is Thing.ARGUMENTS_CLASS)
    for owner_class, (field, target) in ((one, pair) for one in of_arguments for pair in fields_of(one)):
        name, place = target.value, f"{owner_class.name.value}.{target.value}"
        if name in OLD_NAMES and is_renamed(name):
            source.rename(target, OLD_NAMES[name].means)
            ignored = "a field of your own, which transformers 5 ignores"
            source.mend_for_5(field, place, f"{ignored}: {today(name)}", Effect.DIFFERS)
        elif name in OLD_NAMES and name not in ATTRIBUTES_ONLY:
            is_for_5 = source.target is Target.TRANSFORMERS_5
            follows = "" if is_for_5 else ", which hf_compat sets by it"
            reason = f"a field of your own, ignored by transformers 5: {today(name)}{follows}"
            source.list(field, place, reason, Effect.DIFFERS if is_for_5 else Effect.LOOK)
        elif name == "report_to" and source.target is Target.TRANSFORMERS_5:
            value = field.value
            if isinstance(value, cst.Call):  # `field(default=None)`
                value = next((one.value for one in value.args if keyword(one) == "default"), None)
            held = read_constant(value)
            if value is not None and held is not None and held.value is None:
                source.put(value, constant("all"))
                source.mend_for_5(field, place, "transformers 5 takes None for a tracker's name: a ValueError")


def _rename_attribute(node: cst.Attribute, name: str, source: Source) -> None:
    source.rename(node.attr, name)
    source.mend_for_5(node, source.code(node), f"transformers 5 has no such attribute: it is {name} today")


def _rewrite_of_arguments(node: cst.Attribute, source: Source, things: ExpressionTypes) -> None:
    name, outer = node.attr.value, source.parent(node)
    statement = source.parent(outer)
    if isinstance(outer, cst.AssignTarget) and isinstance(statement, cst.Assign):
        _rewrite_assignment(node, statement, source)
    elif isinstance(outer, (cst.AugAssign, cst.Del)):
        source.list(node, source.code(node), today(name), source.fails_in_5)
    elif name in _NONE_UNLESS_GIVEN:
        reason = f"was None where it was not given; {OLD_NAMES[name].means} always has a value"
        source.list(node, source.code(node), reason)
    elif is_renamed(name):
        _rename_attribute(node, OLD_NAMES[name].means, source)
    elif name in _READS and not isinstance(outer, cst.FormattedStringExpression):
        pattern = _READS[name] if isinstance(outer, _NEEDS_NO_PARENTHESES) else f"({_READS[name]})"
        source.change(node, lambda updated: cst.parse_expression(pattern.format(source.code(updated.value))))
        source.mend_for_5(node, source.code(node), f"transformers 5 has no such attribute: {today(name)}")
    elif name == "overwrite_output_dir" and source.target is Target.TRANSFORMERS_5:
        # A read gets the source's value, or else the old default, as its default
        arguments = (one for call in source.of(cst.Call) if things.of(call) is Thing.ARGUMENTS for one in call.args)
        values = (read_constant(one.value) for one in arguments if keyword(one) == name)
        given = {one.value for one in values if one is not None}
        guarded = f'getattr({{}}, "{name}", {bool(given.pop()) if len(given) == 1 else False})'
        source.change(node, lambda updated: cst.parse_expression(guarded.format(source.code(updated.value))))
    elif name not in ATTRIBUTES_ONLY or source.target is Target.TRANSFORMERS_5:
        source.list(node, source.code(node), GONE_IN_5.get(name, today(name)), source.fails_in_5)


def _rewrite_assignment(node: cst.Attribute, statement: cst.Assign, source: Source) -> None:
    name = node.attr.value
    value = read_constant(statement.value)
    if is_renamed(name):
        _rename_attribute(node, OLD_NAMES[name].means, source)
    elif is_flag(name) and value is not None and len(statement.targets) == 1:
        current, on = switched_on(name)
        written = on if value.value else OFF.get(current)
        if written is None:
            source.list(node, source.code(statement), today(name))
        else:
            _rename_attribute(node, current, source)
            source.put(statement.value, constant(written))
    elif name not in ATTRIBUTES_ONLY or source.target is Target.TRANSFORMERS_5:
        source.list(node, source.code(statement), GONE_IN_5.get(name, today(name)))


def list_former_members(source: Source) -> None:
    """List members that transformers 5 lacks. An installed 4.x has them."""
    if is_beside_older(source.target):
        return
    own_names = {one.name.value for one in source.of(cst.FunctionDef)}
    # `hasattr(model, "name")` shows that the source is prepared for its absence
    own_names |= {one for one in FORMER_MEMBERS if f'"{one}"' in source.text or f"'{one}'" in source.text}
    for node in source.of(cst.Attribute):
        name = node.attr.value
        owner, outer = node.value, source.parent(node)
        is_known = name not in own_names and (name not in _OF_MODELS or _is_model(owner))
        if name in FORMER_MEMBERS and is_known and not isinstance(outer, cst.AssignTarget):
            effect = Effect.LOOK if name in _OF_SOME else Effect.FAILS
            source.list(node, source.code(node), FORMER_MEMBERS[name], effect)
        if name in OF_GENERATION and isinstance(owner, cst.Attribute) and owner.attr.value == "config":
            statement = source.parent(outer) if isinstance(outer, cst.AssignTarget) else None
            value = read_constant(statement.value) if isinstance(statement, cst.Assign) else None
            if _is_model(owner.value) and (value is None or value.value is not None):
                taken = f"{source.code(owner.value)}.generation_config.{name} alone"
                reason = f"transformers 5 takes settings of generation from {taken}"
                is_fallback = isinstance(outer, (cst.IfExp, cst.BooleanOperation)) or _depends(node, source)
                source.list(node, source.code(node), reason, Effect.LOOK if is_fallback else Effect.FAILS)


def _depends(node: cst.CSTNode, source: Source) -> bool:
    """Whether a node is in a branch of an `if` that asks for something else than the mode of a script."""
    asked = (source.code(one.test) for one in source.above(node) if isinstance(one, cst.If))
    return any(not re.search(r"\bdo_(train|eval|predict)\b|__name__", one) for one in asked)


def list_chat_templates(source: Source) -> None:
    """List calls of a tokenizer's `apply_chat_template` that gave a list of ids, and give a dict in transformers 5."""
    if is_beside_older(source.target):
        return
    for call in source.of(cst.Call):
        named = {one.keyword.value: one.value for one in call.args if one.keyword is not None}
        is_of_tokenizer = isinstance(call.func, cst.Attribute) and call.func.attr.value == "apply_chat_template"
        if not is_of_tokenizer or "processor" in source.code(call.func) or any(one.star for one in call.args):
            continue
        if "return_dict" in named or len(call.args) - len(named) > 1 or dotted(named.get("tokenize")) == "False":
            continue
        outer = source.parent(call)
        uses = [outer]
        if isinstance(outer, cst.Assign) and isinstance(outer.targets[0].target, cst.Name):
            uses = [source.parent(one) for one in source.of(cst.Name) if one.deep_equals(outer.targets[0].target)]
        if any(_takes_entry(one) for one in uses):
            continue
        reason = "transformers 5 returns a dict, whose `input_ids` were the result: `return_dict=False`"
        source.list(call, source.code(call.func), reason, Effect.FAILS)


def list_former_files(source: Source) -> None:
    """List files of weights that a source loads and nothing writes today, unless it writes them or asks for them."""
    if is_beside_older(source.target):
        return
    loads = []
    own = ""
    for call in source.of(cst.Call):
        verb = dotted(call.func)
        for argument in call.args if verb.endswith(".save_pretrained") else ():
            if keyword(argument) == "safe_serialization" and dotted(argument.value) == "False":
                reason = "a model of transformers 5 is written as safetensors all the same; PEFT's obeys"
                source.list(argument, "save_pretrained(safe_serialization=False)", reason)
                own += "adapter_model.bin"
        if verb == "torch.load" and call.args:
            loads.append((call, _written_out(call.args[0].value, source)))
        elif verb == "torch.save" or verb.rpartition(".")[2] in ("exists", "isfile", "is_file"):
            asked = [one.value for one in call.args]
            asked += [call.func.value] if isinstance(call.func, cst.Attribute) else []
            own += "".join(_written_out(one, source) for one in asked)
    for call, path in loads:
        for name in [one for one in FORMER_FILES if one in path and one not in own]:
            reason = f"{FORMER_FILES[name]} today: read that with `safetensors.torch.load_file`"
            source.list(call, f"torch.load of {name}", reason)


def _written_out(path: cst.BaseExpression, source: Source) -> str:
    """The code of a path, with the statements that bind its name, and the constants of transformers and PEFT."""
    nodes = [node for one in source.assignments(path) if (node := binding_node(one)) is not None]
    outer = [above for node in nodes for above in source.above(node) if isinstance(above, cst.Assign)]
    told = [source.code(one) for one in (path, *outer)]
    names = [name for one in (path, *outer) for name in matchers.findall(one, matchers.Name())]
    imports = {source.imported(one).rpartition(".") for one in names}
    for module, _, name in imports:
        if name == "WEIGHTS_NAME":
            told.append("adapter_model.bin" if module.startswith("peft") else "pytorch_model.bin")
    return "\n".join(told)


def _takes_entry(node: cst.CSTNode | None) -> bool:
    """Whether an object is read as a dict: `x["input_ids"]`, `x.input_ids` or `**x`."""
    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        return isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString)
    is_starred = isinstance(node, cst.Arg) and node.star == "**"
    return is_starred or (isinstance(node, cst.Attribute) and node.attr.value in ("input_ids", "attention_mask"))


def _is_model(node: cst.BaseExpression) -> bool:
    name = dotted(node).rpartition(".")[2].lower()
    return "model" in name and "arg" not in name  # `model_args` has fields of a script's own


def rewrite_loading(source: Source) -> None:
    """Rewrite or list keywords of `from_pretrained` that transformers 5 lacks. An installed 4.x has them."""
    for call in source.of(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "from_pretrained":
            continue
        # The class of transformers, or that of which a class of this source is made
        own = source.bound(call.func.value, cst.ClassDef)
        names = map(source.imported, [call.func.value] if own is None else [one.value for one in own.bases])
        kind = next((one.rpartition(".")[2] for one in names if one.partition(".")[0] == "transformers"), "")
        edits: dict[int, Edit] = {}
        has_token = any(keyword(one) == "token" for one in call.args)
        for place, argument in enumerate(call.args) if kind else ():
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


def rewrite_optimizer_names(source: Source) -> None:
    """Rename members of `OptimizerNames` that transformers 5 has no more."""
    for node in source.of(cst.Attribute):
        old = node.attr.value.lower()
        if old in OLD_OPTIMIZERS and source.imported(node.value).rpartition(".")[2] == "OptimizerNames":
            source.rename(node.attr, OLD_OPTIMIZERS[old].upper())
            source.mend_for_5(node, source.code(node), "transformers 5 has no such member: an AttributeError")
            source.list(node, source.code(node), OPTIMIZER_DIFFERS.format(old=old, new=OLD_OPTIMIZERS[old]))
