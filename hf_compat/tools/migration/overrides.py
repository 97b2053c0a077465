"""Give methods of subclasses the current signature, so that they mean the same: of trainers, and of callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import libcst as cst
from libcst.metadata import BaseAssignment

from hf_compat.interop.former_names import FORMER_METHODS, REFUSED_OVERRIDES
from hf_compat.tools.migration.attributes import GONE_IN_5_OF_TRAINERS
from hf_compat.tools.migration.elements import EQUAL, Edit, edit_call, inserted
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing, is_static, own_returns
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Source, dotted, is_super_call, keyword, methods_of, walk

# The current parameters after `self`, with their defaults.
OVERRIDABLE: dict[str, tuple[str, ...]] = {
    "_get_train_sampler": ("train_dataset=None",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model=None"),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate=None",
    ),
    "_save": ("output_dir=None", "state_dict=None"),
    "_wrap_model": ("model", "training=True", "dataloader=None"),
    "compute_loss": ("model", "inputs", "return_outputs=False", "num_items_in_batch=None"),
    "create_optimizer": ("model=None",),
    "create_scheduler": ("num_training_steps", "optimizer=None"),
    "evaluate": ("eval_dataset=None", "ignore_keys=None", 'metric_key_prefix="eval"'),
    "evaluation_loop": (
        "dataloader", "description", "prediction_loss_only=None", "ignore_keys=None", 'metric_key_prefix="eval"',
    ),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "get_optimizer_cls_and_kwargs": ("args", "model=None"),
    "log": ("logs", "start_time=None"),
    "predict": ("test_dataset", "ignore_keys=None", 'metric_key_prefix="test"'),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys=None"),
    "save_model": ("output_dir=None", "_internal_call=False"),
    "training_step": ("model", "inputs", "num_items_in_batch=None"),
}  # fmt: skip
# Upstream gives the later parameters of these methods by keyword, so `**kwargs` takes them.
_BY_KEYWORD = ("compute_loss", "evaluate", "predict")
# Upstream gives these in every run, and the others in some.
_ALWAYS_GIVEN = frozenset(
    {"num_items_in_batch", "start_time", "train_dataset", "device", "state_dict", "_internal_call", "grad_norm"}
)
_ITEMS = "num_items_in_batch"
_SCALED = "loss_is_scaled_for_ga"
_SCALED_COMMENT = "# The loss of this class is that of one micro-batch: the Trainer divides it by their number."
_MASTERS = {"is_local_master": "is is_local_process_zero today", "is_world_master": "is is_world_process_zero today"}


# Names that callbacks' events get.
_OLD, _TODAY = "tokenizer", "processing_class"


def rewrite_overrides(source: Source, things: ExpressionTypes) -> None:
    """Rewrite the overrides in one source's trainers."""
    for node in (one for one, thing in things.local_classes.items() if thing is Thing.TRAINER_CLASS):
        gains = [
            _rewrite_method(method, f"{node.name.value}.{method.name.value}", source) for method in methods_of(node)
        ]
        lines = (line for line in node.body.body if isinstance(line, cst.SimpleStatementLine))
        targets = (t.target for line in lines for one in line.body if isinstance(one, cst.Assign) for t in one.targets)
        if any(gains) and _SCALED not in map(dotted, targets):
            source.change(node, _with_scaling)


def _rewrite_method(method: cst.FunctionDef, what: str, source: Source) -> bool:
    """Rewrite one method. True if the Trainer has to divide its loss by the micro-batches, as earlier releases did."""
    name = method.name.value
    # Methods that an earlier release called and the target does not
    uncalled = FORMER_METHODS | (GONE_IN_5_OF_TRAINERS if source.target is Target.TRANSFORMERS_5 else {})
    if name in _MASTERS:
        source.list(method, what, _MASTERS[name], Effect.DIFFERS)
    elif name in REFUSED_OVERRIDES and source.target is Target.HF_COMPAT:
        source.list(method, what, f"hf_compat refuses the override: {REFUSED_OVERRIDES[name]}", Effect.FAILS)
    elif name in uncalled:
        calls = (one for one in source.of(cst.Attribute) if dotted(one) == f"self.{name}")
        if all(method in source.above(one) for one in calls):
            source.list(method, what, f"nothing calls it any more: {uncalled[name]}", Effect.DIFFERS)
    elif name == "_remove_unused_columns" and not any(one.value is not None for one in own_returns(method.body)):
        source.list(method, what, "since 4.3 it has to return the data set", source.fails_in_5)
    elif name == "_save_checkpoint":
        _take_metrics_out(method, what, source)
    elif name in OVERRIDABLE and not isinstance(method.params.star_arg, cst.Param):
        gained = _extend(method, what, source)
        return _ITEMS in gained and (name == "compute_loss" or any(_super_calls(method)))
    return False


def _take_metrics_out(method: cst.FunctionDef, what: str, source: Source) -> None:
    """Remove the metrics that `_save_checkpoint` was given until 4.46."""
    if _own_names(method) != ["model", "trial", "metrics"]:
        return
    forwarded = 0
    for call in _super_calls(method):
        given = [n for n, one in enumerate(call.args) if "metrics" in (keyword(one), dotted(one.value))]
        forwarded += len(given)
        if given:
            edit_call(source, call, dict.fromkeys(given, Edit(drop=True)))
    uses = sum(name == "metrics" for name in _names_in(method))
    if uses == forwarded:

        def without_last(node: cst.Parameters) -> cst.Parameters:
            *rest, before, last = node.params
            kept = before.with_changes(comma=last.comma, whitespace_after_param=last.whitespace_after_param)
            return node.with_changes(params=[*rest, kept])

        source.change(method.params, without_last)
    elif method.params.params[-1].default is None:
        source.change(method.params.params[-1], lambda node: node.with_changes(default=cst.Name("None")))
    if forwarded and uses > forwarded:
        source.list(method, what, "gets no metrics since 4.47: the last ones are in self.state.log_history")


def _own_names(method: cst.FunctionDef) -> list[str]:
    """List the positional parameters of a method without `self`."""
    names = [one.name.value for one in (*method.params.posonly_params, *method.params.params)]
    return names if is_static(method) else names[1:]


def _missing(method: cst.FunctionDef) -> list[tuple[int, str]] | None:
    """List the current parameters that a method lacks, with their positions. None if its own do not fit."""
    today = OVERRIDABLE[method.name.value]
    plain = [one.partition("=")[0] for one in today]
    own = _own_names(method)
    named = {*own, *(one.name.value for one in method.params.kwonly_params)}
    takes_rest = method.params.star_kwarg is not None and method.name.value in _BY_KEYWORD
    if takes_rest or set(plain) <= named:
        return []
    rest = iter(plain)
    if all(name in rest for name in own):
        return [(index, one) for index, one in enumerate(today) if plain[index] not in named]
    renamed = [name for name in own if name not in plain]
    if all(own.index(name) < len(today) and "=" not in today[own.index(name)] for name in renamed):
        return [(index, one) for index, one in enumerate(today) if index >= len(own)]
    if method.name.value in _BY_KEYWORD:  # the user's own parameters are between
        return [(len(own) + n, one) for n, one in enumerate(o for o in today if o.partition("=")[0] not in own)]
    return None


def _extend(method: cst.FunctionDef, what: str, source: Source) -> Sequence[str]:
    """Add the parameters that a method lacks, and pass them to the method that it overrides. Returns their names."""
    missing = _missing(method)
    if missing is None:
        reason = f"has parameters of its own; it is called with ({', '.join(OVERRIDABLE[method.name.value])}) today"
        source.list(method, what, reason, source.fails_in_5)
        return ()
    names = [one.partition("=")[0] for _, one in missing]
    if any(name in names for name in _names_in(method)):
        source.list(method, what, f"lacks the parameter {', '.join(names)}, and has something else of that name")
        return ()
    if not missing:
        return ()
    if method.name.value == "compute_loss" and "return_outputs" in names:
        returns = _return_outputs(method, what, source)
        if not returns and source.target is Target.HF_COMPAT:  # whose Trainer passes only the parameters that it has
            return ()
    always = [name for name in names if name in _ALWAYS_GIVEN]
    calls_it = (
        f"calls it with {', '.join(always)}, too: a TypeError"
        if always
        else f"may call it with {', '.join(names)}, too"
    )
    source.mend_for_5(method, what, f"transformers 5 {calls_it}", Effect.FAILS if always else Effect.LOOK)
    source.change(method, lambda node: _with_parameters(node, missing))
    for call in _super_calls(method) if method.name.value not in ("compute_loss", "training_step") else ():
        if any(one.star for one in call.args):
            continue
        if all(one.keyword is None for one in call.args) and len(call.args) == len(_own_names(method)):
            _pass_on(call, missing, source)
        else:
            source.list(call, source.code(call.func), f"hand on {', '.join(names)}")
    return names


def _names_in(method: cst.FunctionDef) -> Iterator[str]:
    """Yield the names in a method's body, without keywords and attributes."""
    nodes: list[cst.CSTNode] = [method.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, cst.Name):
            yield node.value
        nodes.extend([node.value] if isinstance(node, (cst.Arg, cst.Attribute)) else node.children)


def _with_parameters(node: cst.FunctionDef, missing: Sequence[tuple[int, str]]) -> cst.FunctionDef:
    params = list(node.params.params)
    first = 0 if is_static(node) else 1
    for place, written in missing:
        name, _, default = written.partition("=")
        at = place + first
        if not default and at and params[min(at, len(params)) - 1].default is not None:
            default = "None"
        new = cst.Param(cst.Name(name))
        if default:
            new = new.with_changes(default=cst.parse_expression(default), equal=EQUAL)
        params = inserted(params, at, new)
    return node.with_changes(params=node.params.with_changes(params=params))


def _super_calls(method: cst.FunctionDef) -> Iterator[cst.Call]:
    return (one for one in walk(method.body) if isinstance(one, cst.Call) and is_super_call(one, method.name.value))


def _pass_on(call: cst.Call, missing: Sequence[tuple[int, str]], source: Source) -> None:
    def change(node: cst.Call) -> cst.Call:
        args = list(node.args)
        for place, written in missing:
            args = inserted(args, place, cst.Arg(cst.Name(written.partition("=")[0])))
        return node.with_changes(args=args)

    source.change(call, change)


def _return_outputs(method: cst.FunctionDef, what: str, source: Source) -> bool:
    """Let a `compute_loss` of 4.2 and before return the outputs on request. False if it cannot."""
    returned = [one.value for one in own_returns(method.body)]
    losses = [one for one in returned if isinstance(one, cst.Name)]
    if "outputs" not in _names_in(method) or not losses or len(losses) < len(returned):
        reason = "evaluations call it with return_outputs=True: it has to return (loss, outputs) then"
        source.list(method, what, reason, source.fails_in_5)
        return False
    for loss in losses:
        source.put(loss, cst.parse_expression(f"({loss.value}, outputs) if return_outputs else {loss.value}"))
    source.list(method, what, "evaluations take their loss from it now, too: before 4.3 the model's own was reported")
    return True


def _with_scaling(node: cst.ClassDef) -> cst.ClassDef:
    """Declare that the loss of a class is that of a micro-batch, as all were before 4.46."""
    body = list(cast("cst.IndentedBlock", node.body).body)
    first = body[0].body[0] if isinstance(body[0], cst.SimpleStatementLine) else None
    place = 1 if isinstance(first, cst.Expr) and isinstance(first.value, cst.BaseString) else 0
    following = body[place] if place < len(body) else None
    leading: Sequence[cst.EmptyLine] = getattr(following, "leading_lines", ())
    blank = leading[: next((n for n, line in enumerate(leading) if line.comment is not None), len(leading))]
    comment = cst.EmptyLine(comment=cst.Comment(_SCALED_COMMENT))
    new = cst.parse_statement(f"{_SCALED} = False")
    if following is not None:
        body[place] = following.with_changes(leading_lines=[cst.EmptyLine(indent=False), *leading[len(blank) :]])
    body.insert(place, new.with_changes(leading_lines=[*(blank if place else ()), comment]))
    return node.with_changes(body=node.body.with_changes(body=body))


def rewrite_events(source: Source, things: ExpressionTypes) -> None:
    """Rename what the events of callbacks get: `tokenizer` is `processing_class` today."""
    reason = f"transformers 5 gives {_TODAY}, and no {_OLD}"
    callbacks = [node for node, thing in things.local_classes.items() if thing is Thing.CALLBACK_CLASS]
    events = [(node, one) for node in callbacks for one in methods_of(node) if one.name.value.startswith("on_")]
    told: set[cst.CSTNode] = set()  # keys in a method that several events call
    for node, method in events:
        what = f"{node.name.value}.{method.name.value}"
        params = (*method.params.params, *method.params.kwonly_params)
        old = next((one for one in params if one.name.value == _OLD), None)
        if old is not None and any(one.name.value == _TODAY for one in params):
            source.list(old, what, f"takes {_OLD} and {_TODAY}: only the second is given since 4.46")
        elif old is not None:
            reads = (read for one in source.bindings_of(old) for read in source.reads(one))
            for name in (old.name, *(one for one in reads if isinstance(one, cst.Name))):
                source.rename(name, _TODAY)
            if old.default is None:
                source.mend_for_5(old, what, reason, Effect.FAILS)
            else:
                source.mend_for_5(old, what, f"{reason}: the default is used", Effect.DIFFERS)
        for outer, key in (pair for one in _keyword_dicts(method, node, source) for pair in source.keys(one)):
            if isinstance(key, cst.SimpleString) and key.evaluated_value == _OLD and key not in told:
                told.add(key)
                source.put(key, key.with_changes(value=f"{key.prefix}{key.quote}{_TODAY}{key.quote}"))
                effect = Effect.FAILS if isinstance(outer, cst.Subscript) else Effect.DIFFERS
                source.mend_for_5(key, what, reason, effect)


def _keyword_dicts(event: cst.FunctionDef, owner: cst.ClassDef, source: Source) -> Iterator[tuple[BaseAssignment, ...]]:
    """Yield the bindings of an event's `**kwargs`, and of the parameters of own methods that get the dict."""
    bindings = source.bindings_of(event.params.star_kwarg)
    yield bindings
    methods = {f"self.{one.name.value}": one for one in methods_of(owner)}
    for argument in (source.parent(read) for one in bindings for read in source.reads(one)):
        call = source.parent(argument) if isinstance(argument, cst.Arg) and not argument.star else None
        helper = methods.get(dotted(call.func)) if isinstance(call, cst.Call) else None
        if helper is not None and isinstance(call, cst.Call) and isinstance(argument, cst.Arg):
            names = _own_names(helper)
            place = call.args.index(argument)
            name = keyword(argument) or (names[place] if place < len(names) else "")
            yield from (source.bindings_of(one) for one in helper.params.params if one.name.value == name)
