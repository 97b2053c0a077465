"""Old names as attributes of training arguments and trainers, as fields of subclasses, as keywords of callbacks."""

from __future__ import annotations

import libcst as cst

from hf_compat.hf.legacy import ATTRIBUTES_ONLY, OLD_NAMES
from hf_compat.interop.former_names import ABSENT, FORMER_METHODS
from hf_compat.tools.migration.elements import constant
from hf_compat.tools.migration.layout import fitted_call
from hf_compat.tools.migration.old_arguments import (
    GONE_IN_5,
    OFF,
    Constant,
    is_flag,
    is_renamed,
    read_constant,
    switched_on,
    today,
)
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Source, dotted
from hf_compat.tools.migration.things import Thing, Things

# What an old flag is read from today; `{}` is the object.
_READS = {
    "evaluate_during_training": '{}.eval_strategy == "steps"',
    "group_by_length": '{}.train_sampling_strategy == "group_by_length"',
    "adafactor": '{}.optim == "adafactor"',
    "include_inputs_for_metrics": '"inputs" in {}.include_for_metrics',
    "include_tokens_per_second": '{}.include_num_input_tokens_seen != "no"',
    "tpu_metrics_debug": '"tpu_metrics_debug" in {}.debug',
}
# Read as None, in 4.x, wherever the old name was not given: today's name always has a value.
_NONE_UNLESS_GIVEN = ("per_gpu_train_batch_size", "per_gpu_eval_batch_size")
_TRAINER_NAMES = {
    "tokenizer": "processing_class",
    "is_local_master": "is_local_process_zero",
    "is_world_master": "is_world_process_zero",
}
_GONE_OF_TRAINERS = {
    "prediction_loop": "gone in 5.0: `evaluation_loop` has taken its place",
    "use_apex": "gone: Apex is not used any longer",
    "use_cuda_amp": "gone: precision is the accelerator's",
    "use_amp": "gone: precision is the accelerator's",
    "do_grad_scaling": "gone: the gradient scaler is the accelerator's",
    "scaler": "gone: the gradient scaler is the accelerator's",
    "sharded_ddp": "gone, as FairScale is",
    "use_cpu_amp": "gone: precision is the accelerator's",
    "_gather_and_numpify": "gone in 5.0: `self.accelerator.gather_for_metrics`",
    "torch_jit_model_eval": "gone in 5.0",
}
# What 5.0 or a later release took from trainers, and this package's have → where its work is done in transformers 5.
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
# Names of older releases that this package's trainers answer for, as the methods that they were.
_ANSWERED = ("_gather_and_numpify", "prediction_loop")
_OF_TRAINERS = {*_TRAINER_NAMES, *_GONE_OF_TRAINERS, *GONE_IN_5_OF_TRAINERS, *ABSENT, *FORMER_METHODS}
# Where a comparison stands by itself, without parentheses.
_NEEDS_NO_PARENTHESES = (
    cst.If, cst.While, cst.Assign, cst.AnnAssign, cst.Arg, cst.Return, cst.BooleanOperation, cst.NamedExpr, cst.Assert,
)  # fmt: skip


def rewrite_attributes(source: Source, things: Things) -> None:
    """Have attributes, fields and callbacks' keywords of one source rewritten."""
    own = _own_names(source, things)
    for node in source.of(cst.Attribute):
        name = node.attr.value
        if name not in OLD_NAMES and name not in _OF_TRAINERS:
            continue
        owner = things.of(node.value)
        if owner is Thing.TRAINER:
            _rewrite_of_trainer(node, source)
        elif name in OLD_NAMES and owner is Thing.ARGUMENTS and name not in own:
            _rewrite_of_arguments(node, source, things)
        elif name in OLD_NAMES and owner is None:
            _list_of_unknown(node, source, things)
    for owner_class, thing in things.local_classes.items():
        if thing is Thing.ARGUMENTS_CLASS:
            _rewrite_fields(owner_class, source)


def _own_names(source: Source, things: Things) -> frozenset[str]:
    """Return old names that a class of arguments in this source has as methods, or fields of another meaning."""
    found: set[str] = set()
    for node, thing in things.local_classes.items():
        if thing is not Thing.ARGUMENTS_CLASS:
            continue
        for statement in node.body.body:
            if isinstance(statement, cst.FunctionDef):
                found.add(statement.name.value)
            for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
                if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                    found.add(small.target.value)
    return frozenset(name for name in found if name in OLD_NAMES and not is_renamed(name))


def _rename_attribute(node: cst.Attribute, name: str, source: Source) -> None:
    def change(updated: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(updated, cst.Attribute)
        return updated.with_changes(attr=updated.attr.with_changes(value=name))

    source.change(node, change)
    source.mend_for_5(node, source.code(node), f"transformers 5 has no such attribute: it is {name} today")


def _rewrite_of_trainer(node: cst.Attribute, source: Source) -> None:
    name = node.attr.value
    if name not in _TRAINER_NAMES and any(one.name.value == name for one in source.of(cst.FunctionDef)):
        return  # the script's own
    absent = {**ABSENT, **FORMER_METHODS}
    if name in absent and name not in _ANSWERED and source.target is Target.HF_COMPAT:
        source.list(node, source.code(node), f"hf_compat has no such name: {absent[name]}", Effect.FAILS)
    elif name in GONE_IN_5_OF_TRAINERS and source.target is Target.TRANSFORMERS_5:
        source.list(node, source.code(node), f"gone in transformers 5: {GONE_IN_5_OF_TRAINERS[name]}", Effect.FAILS)
    elif name in _GONE_OF_TRAINERS:
        source.list(node, source.code(node), _GONE_OF_TRAINERS[name], source.fails_in_5)
    elif name in _TRAINER_NAMES and not (name == "tokenizer" and _keeps_its_own_tokenizer(source)):
        _rename_attribute(node, _TRAINER_NAMES[name], source)


def _keeps_its_own_tokenizer(source: Source) -> bool:
    """Return whether a class of this source sets `self.tokenizer` itself."""
    targets = (one.target for one in source.of(cst.AssignTarget))
    is_method = any(one.name.value == "tokenizer" for one in source.of(cst.FunctionDef))
    return is_method or any(dotted(target) == "self.tokenizer" for target in targets)


def _rewrite_of_arguments(node: cst.Attribute, source: Source, things: Things) -> None:
    name, outer = node.attr.value, source.parent(node)
    if isinstance(outer, cst.AssignTarget):
        statement = source.parent(outer)
        assert isinstance(statement, cst.Assign)
        _rewrite_assignment(node, statement, source)
    elif isinstance(outer, (cst.AugAssign, cst.Del)):
        source.list(node, source.code(node), today(name), source.fails_in_5)
    elif name in _NONE_UNLESS_GIVEN:
        reason = f"was None where it was not given; {OLD_NAMES[name].means} always has a value"
        source.list(node, source.code(node), reason)
    elif is_renamed(name):
        _rename_attribute(node, OLD_NAMES[name].means, source)
    elif name in _READS and not isinstance(outer, cst.FormattedStringExpression):
        bare = isinstance(source.parent(node), _NEEDS_NO_PARENTHESES)

        def change(updated: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(updated, cst.Attribute)
            code = _READS[name].format(source.module.code_for_node(updated.value))
            return cst.parse_expression(code if bare else f"({code})")

        source.change(node, change)
        source.mend_for_5(node, source.code(node), f"transformers 5 has no such attribute: {today(name)}")
    elif name == "overwrite_output_dir":
        _guard_read(node, source, things)
    elif name not in ATTRIBUTES_ONLY or source.target is Target.TRANSFORMERS_5:
        source.list(node, source.code(node), _way_out(name), source.fails_in_5)


def _way_out(name: str) -> str:
    return GONE_IN_5.get(name, today(name))


def _guard_read(node: cst.Attribute, source: Source, things: Things) -> None:
    """Read `overwrite_output_dir` so that arguments without it give what the source gave them, or the old default."""
    if source.target is Target.HF_COMPAT:
        return
    given = {value.value for call in source.of(cst.Call) if (value := _given(call, "overwrite_output_dir", things))}
    default = given.pop() if len(given) == 1 else False

    def change(updated: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(updated, cst.Attribute)
        owner = source.module.code_for_node(updated.value)
        read = cst.parse_expression(f'getattr({owner}, "overwrite_output_dir", {bool(default)})')
        assert isinstance(read, cst.Call)
        return fitted_call(source, node, read)

    source.change(node, change)


def _given(call: cst.Call, name: str, things: Things) -> Constant | None:
    """Return the constant that a constructor of training arguments is given under a name."""
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == name and things.of(call) is Thing.ARGUMENTS:
            return read_constant(argument.value)
    return None


def _rewrite_assignment(node: cst.Attribute, statement: cst.Assign, source: Source) -> None:
    name = node.attr.value
    value = read_constant(statement.value)
    if is_renamed(name):
        _rename_attribute(node, OLD_NAMES[name].means, source)
    elif is_flag(name) and value is not None and len(statement.targets) == 1:
        current, on = switched_on(name)
        said = on if value.value else OFF.get(current)
        if said is None:
            source.list(node, source.code(statement), today(name))
            return
        _rename_attribute(node, current, source)
        source.change(statement.value, lambda _: constant(said))
    elif name not in ATTRIBUTES_ONLY or source.target is Target.TRANSFORMERS_5:
        source.list(node, source.code(statement), _way_out(name))


def _list_of_unknown(node: cst.Attribute, source: Source, things: Things) -> None:
    """List an old name of an object that may be training arguments; a parser's own namespace is none."""
    owner = dotted(node.value)
    name = node.attr.value
    if "arg" not in owner.rpartition(".")[2].lower():
        return
    if things.is_something_else(node.value):
        return
    if name in ATTRIBUTES_ONLY and source.target is Target.HF_COMPAT:
        return
    source.list(node, source.code(node), f"if {owner} is training arguments, {today(name)}")


def uses_transformers(text: str) -> bool:
    """Return whether a source names transformers or this package."""
    return "transformers" in text or "hf_compat" in text


def _rewrite_fields(node: cst.ClassDef, source: Source) -> None:
    """Rename fields of a subclass; one whose value means another thing today is left to a person."""
    for statement in node.body.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if not isinstance(small, cst.AnnAssign) or not isinstance(small.target, cst.Name):
                continue
            name = small.target.value
            if name in OLD_NAMES and is_renamed(name):
                current = OLD_NAMES[name].means
                source.change(small.target, lambda _, current=current: cst.Name(current))  # type: ignore[misc]  # bound now
                ignored = "a field of your own, which transformers 5 ignores"
                source.mend_for_5(small, f"{node.name.value}.{name}", f"{ignored}: {today(name)}", Effect.DIFFERS)
            elif name in OLD_NAMES and name not in ATTRIBUTES_ONLY:
                follows = "" if source.target is Target.TRANSFORMERS_5 else ", which hf_compat sets by it"
                reason = f"a field of your own, ignored by transformers 5: {today(name)}{follows}"
                effect = Effect.DIFFERS if source.target is Target.TRANSFORMERS_5 else Effect.LOOK
                source.list(small, f"{node.name.value}.{name}", reason, effect)
