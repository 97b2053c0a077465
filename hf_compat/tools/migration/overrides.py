"""Methods of trainers' subclasses with an earlier release's signature: given today's, so that they mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from hf_compat.interop.former_names import FORMER_METHODS, REFUSED_OVERRIDES
from hf_compat.tools.migration.attributes import GONE_IN_5_OF_TRAINERS
from hf_compat.tools.migration.elements import Edit, appended
from hf_compat.tools.migration.layout import fitted_call, fitted_function
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Change, Source, dotted
from hf_compat.tools.migration.things import Thing, Things, is_static, own_returns
from hf_compat.tools.migration.trainer_calls import call_change, is_super_call

# Today's parameters after `self`, with their defaults.
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
# Methods whose later parameters upstream gives by keyword: `**kwargs` takes them.
_BY_KEYWORD = ("compute_loss", "evaluate", "predict")
# What upstream gives in every run; the others it gives in some.
_ALWAYS_GIVEN = frozenset(
    {"num_items_in_batch", "start_time", "train_dataset", "device", "state_dict", "_internal_call", "grad_norm"}
)
_ITEMS = "num_items_in_batch"
_SCALED = "loss_is_scaled_for_ga"
_SCALED_LINES = (
    "# The loss of this class is that of one micro-batch: the Trainer divides it by their number.",
    f"{_SCALED} = False",
)
_MASTERS = {
    "is_local_master": "is is_local_process_zero today",
    "is_world_master": "is is_world_process_zero today",
}


def rewrite_overrides(source: Source, things: Things) -> None:
    """Have the overrides of one source's trainers rewritten."""
    for node, thing in things.local_classes.items():
        if thing is Thing.TRAINER_CLASS:
            gains = [_rewrite_method(method, node, source) for method in _methods(node)]
            if any(gains) and not _declares_scaling(node):
                source.change(node, _with_scaling)


def _methods(node: cst.ClassDef) -> Iterator[cst.FunctionDef]:
    return (one for one in node.body.body if isinstance(one, cst.FunctionDef))


def _rewrite_method(method: cst.FunctionDef, owner: cst.ClassDef, source: Source) -> bool:
    """Rewrite one method; say whether its loss has to be divided by the micro-batches, as it was before."""
    name = method.name.value
    what = f"{owner.name.value}.{name}"
    if name in _MASTERS:
        source.list(method, what, _MASTERS[name], Effect.DIFFERS)
    elif name in REFUSED_OVERRIDES and source.target is Target.HF_COMPAT:
        source.list(method, what, f"hf_compat refuses the override: {REFUSED_OVERRIDES[name]}", Effect.FAILS)
    elif (way_out := _uncalled(source.target).get(name)) is not None:
        if not _is_called(method, source):
            source.list(method, what, f"nothing calls it any more: {way_out}", Effect.DIFFERS)
    elif name == "_save_checkpoint":
        _take_metrics_out(method, what, source)
    elif name in OVERRIDABLE and not isinstance(method.params.star_arg, cst.Param):
        gained = _extend(method, what, source)
        return _ITEMS in gained and (name == "compute_loss" or any(_super_calls(method)))
    return False


def _take_metrics_out(method: cst.FunctionDef, what: str, source: Source) -> None:
    """Take out the metrics that `_save_checkpoint` was given until 4.46."""
    if _own_names(method) != ["model", "trial", "metrics"]:
        return
    for call in _super_calls(method):
        places = {n: Edit(drop=True) for n, argument in enumerate(call.args) if _is_metrics(argument)}
        if places:
            source.change(call, call_change(source, call, places))
    handed_on = sum(_is_metrics(argument) for call in _super_calls(method) for argument in call.args)
    if sum(name == "metrics" for name in _names_in(method)) == handed_on:
        source.change(method.params, _without_last)
    elif method.params.params[-1].default is None:
        source.change(method.params.params[-1], _optional)
    if handed_on and sum(name == "metrics" for name in _names_in(method)) > handed_on:
        source.list(method, what, "gets no metrics since 4.47: the last ones are in self.state.log_history")


def _uncalled(target: Target) -> Mapping[str, str]:
    """Return the methods that an earlier release called, and the target does not, with the way out."""
    return {**FORMER_METHODS, **GONE_IN_5_OF_TRAINERS} if target is Target.TRANSFORMERS_5 else FORMER_METHODS


def _is_called(method: cst.FunctionDef, source: Source) -> bool:
    """Whether the source calls a method itself, by `self`."""
    reads = (one for one in source.of(cst.Attribute) if dotted(one) == f"self.{method.name.value}")
    return any(method not in source.above(one) for one in reads)


def _own_names(method: cst.FunctionDef) -> list[str]:
    """Return the parameters of a method by place, without `self`."""
    names = [one.name.value for one in (*method.params.posonly_params, *method.params.params)]
    return names if is_static(method) else names[1:]


def _missing(method: cst.FunctionDef) -> list[tuple[int, str]] | None:
    """Return today's parameters that a method lacks, with their places; None where its own do not fit."""
    today = OVERRIDABLE[method.name.value]
    plain = [one.partition("=")[0] for one in today]
    own = _own_names(method)
    by_keyword_only = {one.name.value for one in method.params.kwonly_params}
    takes_rest = method.params.star_kwarg is not None and method.name.value in _BY_KEYWORD
    if takes_rest or set(plain) <= {*own, *by_keyword_only}:
        return []
    rest = iter(plain)
    if all(name in rest for name in own):
        return [(index, one) for index, one in enumerate(today) if plain[index] not in {*own, *by_keyword_only}]
    renamed = [name for name in own if name not in plain]
    if all(own.index(name) < len(today) and "=" not in today[own.index(name)] for name in renamed):
        return [(index, one) for index, one in enumerate(today) if index >= len(own)]
    if method.name.value in _BY_KEYWORD:  # parameters of the user's own stand between
        return [(len(own) + n, one) for n, one in enumerate(o for o in today if o.partition("=")[0] not in own)]
    return None


def _extend(method: cst.FunctionDef, what: str, source: Source) -> Sequence[str]:
    """Give a method the parameters that it lacks, and hand them on where it calls the method that it overrides."""
    missing = _missing(method)
    if missing is None:
        parameters = ", ".join(OVERRIDABLE[method.name.value])
        source.list(
            method, what, f"has parameters of its own; it is called with ({parameters}) today", source.fails_in_5
        )
        return ()
    names = [one.partition("=")[0] for _, one in missing]
    if any(name in names for name in _names_in(method)):
        source.list(method, what, f"lacks the parameter {', '.join(names)}, and has something else of that name")
        return ()
    if not missing:
        return ()
    if method.name.value == "compute_loss" and "return_outputs" in names:
        returns = _return_outputs(method, what, source)
        if not returns and source.target is Target.HF_COMPAT:  # whose Trainer gives it what it takes
            return ()
    _tell_of_5(method, what, names, source)
    source.change(method, lambda node: _with_parameters(node, method, missing, source))
    if method.name.value not in ("compute_loss", "training_step"):
        own = _own_names(method)
        for call in _super_calls(method):
            if any(one.star for one in call.args):
                continue
            positional = [one for one in call.args if one.keyword is None]
            if len(positional) == len(call.args) == len(own):
                source.change(call, _handing_on(call, missing, source))
            else:
                source.list(
                    call, source.code(call.func), f"hand on {', '.join(n.partition('=')[0] for _, n in missing)}"
                )
    return names


def _tell_of_5(method: cst.FunctionDef, what: str, names: Sequence[str], source: Source) -> None:
    """Say what transformers 5 does with a method that lacks parameters."""
    always = [name for name in names if name in _ALWAYS_GIVEN]
    if always:
        source.mend_for_5(method, what, f"transformers 5 calls it with {', '.join(always)}, too: a TypeError")
    else:
        source.mend_for_5(method, what, f"transformers 5 may call it with {', '.join(names)}, too", Effect.LOOK)


def _names_in(method: cst.FunctionDef) -> Iterator[str]:
    nodes: list[cst.CSTNode] = [method.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, cst.Name):
            yield node.value
        if not isinstance(node, (cst.Arg, cst.Attribute)):
            nodes.extend(node.children)
        else:
            nodes.append(node.value)


def _with_parameters(
    node: cst.CSTNode, before: cst.FunctionDef, missing: Sequence[tuple[int, str]], source: Source
) -> cst.FunctionDef:
    assert isinstance(node, cst.FunctionDef)
    params = list(node.params.params)
    first = 0 if is_static(before) else 1
    for place, written in missing:
        name, _, default = written.partition("=")
        at = place + first
        if not default and at and params[min(at, len(params)) - 1].default is not None:
            default = "None"
        new = cst.Param(cst.Name(name))
        if default:
            new = new.with_changes(default=cst.parse_expression(default), equal=_EQUAL)
        if at >= len(params):
            params = appended(params, new)
        else:
            params.insert(at, new.with_changes(comma=params[at - 1].comma if at else _COMMA))
    after = node.with_changes(params=node.params.with_changes(params=params))
    return fitted_function(source, before, after)


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _super_calls(method: cst.FunctionDef) -> Iterator[cst.Call]:
    nodes: list[cst.CSTNode] = [method.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, cst.Call) and is_super_call(node, method.name.value):
            yield node
        nodes.extend(node.children)


def _handing_on(call: cst.Call, missing: Sequence[tuple[int, str]], source: Source) -> Change:
    return lambda node: fitted_call(source, call, _with_arguments(node, missing))


def _with_arguments(node: cst.CSTNode, missing: Sequence[tuple[int, str]]) -> cst.Call:
    assert isinstance(node, cst.Call)
    args = list(node.args)
    for place, written in missing:
        new = cst.Arg(cst.Name(written.partition("=")[0]))
        if place >= len(args):
            args = appended(args, new)
        else:
            args.insert(place, new.with_changes(comma=_COMMA))
    return node.with_changes(args=args)


def _return_outputs(method: cst.FunctionDef, what: str, source: Source) -> bool:
    """Have a `compute_loss` of 4.2 and before return the outputs, too, where it is asked to; say whether it can."""
    returns = list(own_returns(method.body))
    has_outputs = any(one == "outputs" for one in _names_in(method))
    if not has_outputs or not all(isinstance(one.value, cst.Name) for one in returns) or not returns:
        reason = "evaluations call it with return_outputs=True: it has to return (loss, outputs) then"
        source.list(method, what, reason, source.fails_in_5)
        return False
    for statement in returns:
        assert isinstance(statement.value, cst.Name)
        loss = statement.value.value
        asked = cst.parse_expression(f"({loss}, outputs) if return_outputs else {loss}")
        source.change(statement.value, lambda _, asked=asked: asked)  # type: ignore[misc]  # bound now
    source.list(method, what, "evaluations take their loss from it now, too: before 4.3 the model's own was reported")
    return True


def _is_metrics(argument: cst.Arg) -> bool:
    keyword = argument.keyword.value if argument.keyword is not None else None
    return keyword == "metrics" or (isinstance(argument.value, cst.Name) and argument.value.value == "metrics")


def _without_last(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.Parameters)
    *rest, before, last = node.params
    kept = before.with_changes(comma=last.comma, whitespace_after_param=last.whitespace_after_param)
    return node.with_changes(params=[*rest, kept])


def _optional(node: cst.CSTNode) -> cst.CSTNode:
    return node.with_changes(default=cst.Name("None")) if isinstance(node, cst.Param) else node


def _declares_scaling(node: cst.ClassDef) -> bool:
    """Return whether a class says already what its loss is divided by."""
    statements = (one for line in node.body.body if isinstance(line, cst.SimpleStatementLine) for one in line.body)
    targets = [t.target for one in statements if isinstance(one, cst.Assign) for t in one.targets]
    return any(isinstance(one, cst.Name) and one.value == _SCALED for one in targets)


def _with_scaling(node: cst.CSTNode) -> cst.CSTNode:
    """Return a class that says that its loss is that of a micro-batch, as all were before 4.46."""
    assert isinstance(node, cst.ClassDef) and isinstance(node.body, cst.IndentedBlock)
    body = list(node.body.body)
    place = 1 if _is_docstring(body[0]) else 0
    comment, line = _SCALED_LINES
    following = body[place] if place < len(body) else None
    leading = _leading_lines(following)
    new = cst.parse_statement(line).with_changes(
        leading_lines=[*_blank(leading if place else ()), cst.EmptyLine(comment=cst.Comment(comment))]
    )
    if following is not None:
        body[place] = following.with_changes(
            leading_lines=[cst.EmptyLine(indent=False), *leading[len(_blank(leading)) :]]
        )
    body.insert(place, new)
    return node.with_changes(body=node.body.with_changes(body=body))


def _is_docstring(node: cst.CSTNode) -> bool:
    line = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    return isinstance(line, cst.Expr) and isinstance(line.value, cst.BaseString)


def _leading_lines(node: cst.CSTNode | None) -> Sequence[cst.EmptyLine]:
    lines: Sequence[cst.EmptyLine] = getattr(node, "leading_lines", ())
    return lines


def _blank(lines: Sequence[cst.EmptyLine]) -> Sequence[cst.EmptyLine]:
    """Return the blank lines that others begin with."""
    return lines[: next((n for n, line in enumerate(lines) if line.comment is not None), len(lines))]
