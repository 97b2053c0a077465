"""The parts of a step, each with a batch of its own, beside transformers' where that has the same part."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.toy import rows
from hf_compat.errors import LossError, OverrideError
from hf_compat.trainer_methods import steps
from hf_compat.trainer_methods.steps import StepMethods

APIS = ("transformers", "hf_compat")
X, Y = torch.arange(6.0).reshape(2, 3), torch.tensor([[1, -100, 2], [3, 4, -100]])


class Answers(nn.Module):
    """A model that gives what it is told to give, and notes its inputs."""

    def __init__(self, answer):
        super().__init__()
        self.layer, self.answer, self.seen = nn.Linear(1, 1), answer, []

    def forward(self, x=None, labels=None, return_loss=None, skip_logits=None, num_items_in_batch=None):
        self.seen.append((labels is not None, skip_logits, num_items_in_batch))
        return self.answer(self.layer.weight.sum())


def made(api, model, tmp_path, values=(), kind=None, **options):
    module = importlib.import_module(api)
    args = module.TrainingArguments(
        str(tmp_path / api), use_cpu=True, report_to="none", disable_tqdm=True, **dict(values)
    )
    kind = module.Trainer if kind is None else kind(module.Trainer)
    return kind(model=model, args=args, **{"train_dataset": rows(4), **options})


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


class Named:
    """An answer with attributes."""

    def __init__(self, **values):
        vars(self).update(values)

    def __getitem__(self, place):
        return list(vars(self).values())[place]


MAPPING = lambda w: {"loss": w * 2, "logits": X * w, "past_key_values": X - 1, "cache": X - 2, "more": X + 1}  # noqa: E731
TUPLE = lambda w: (w * 2, X * w, X + 1)  # noqa: E731
ONE = lambda w: (w * 2, X * w)  # noqa: E731


@pytest.mark.parametrize(
    ("answer", "inputs", "loss_only", "ignored", "values"),
    [
        (MAPPING, {"x": X, "labels": Y}, False, None, {}),
        (MAPPING, {"x": X, "labels": Y}, False, [], {}),
        (MAPPING, {"x": X, "labels": Y}, False, ["logits"], {}),
        (MAPPING, {"x": X, "labels": Y}, True, None, {}),
        (MAPPING, {"x": X}, False, None, {}),
        (MAPPING, {"x": X}, True, None, {}),
        (MAPPING, {"x": X, "labels": None}, False, None, {}),
        (TUPLE, {"x": X, "labels": Y}, False, None, {}),
        (TUPLE, {"x": X}, False, None, {}),
        (ONE, {"x": X, "labels": Y}, False, None, {}),
        (MAPPING, {"x": X, "labels": Y, "second": Y + 1}, False, None, {"label_names": ["labels", "second"]}),
        (MAPPING, {"x": X, "labels": Y}, False, None, {"label_names": ["labels", "second"]}),
        (MAPPING, {"x": X, "return_loss": True}, False, None, {"label_names": []}),
        (MAPPING, {"x": X, "return_loss": False}, False, None, {"label_names": []}),
        (MAPPING, {"x": X}, False, None, {"label_names": []}),
    ],
)
@pytest.mark.parametrize("config", [None, {}, {"keys_to_ignore_at_inference": ["more"]}])
def test_a_prediction_is_transformers(answer, inputs, loss_only, ignored, values, config, tmp_path):
    found = []
    for api in APIS:
        torch.manual_seed(0)
        model = Answers(answer)
        if "second" in inputs:
            model.forward = lambda x, labels, second, model=model: model.answer(model.layer.weight.sum())
        if config is not None:
            model.config = SimpleNamespace(to_dict=dict, **config)
        trainer = made(api, model, tmp_path, values, train_dataset=None)
        try:
            outcome = trainer.prediction_step(model, dict(inputs), loss_only, ignore_keys=ignored)
        except Exception as error:
            outcome = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        found.append((plain(outcome), [one[0] for one in model.seen]))
    assert found[0] == found[1]


@pytest.mark.parametrize("uses", [False, True])
@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("with_labels", [False, True])
def test_ligers_forward_is_told_to_skip_logits(uses, loss_only, with_labels, tmp_path):
    model = Answers(MAPPING)
    trainer = made("hf_compat", model, tmp_path)
    trainer.args.__dict__["use_liger_kernel"] = uses
    trainer.prediction_step(model, {"x": X, **({"labels": Y} if with_labels else {})}, loss_only)
    assert model.seen == [(with_labels, True if uses and loss_only and with_labels else None, None)]


@pytest.mark.parametrize(
    ("answer", "loss"),
    [
        (lambda w: {"loss": w}, 1.0),
        (lambda w: w, 1.0),
        (lambda w: (w, X), 1.0),
        (lambda w: [w, X], 1.0),
        (lambda w: Named(logits=X, loss=w), 1.0),
        (lambda w: Named(loss=None, logits=w), None),
        (lambda w: Named(first=w), 1.0),
        (lambda w: {"logits": X}, None),
        (lambda w: {}, None),
        (lambda w: (), None),
        (lambda w: 3, None),
        (lambda w: None, None),
    ],
)
def test_the_loss_is_found_among_outputs(answer, loss, tmp_path):
    model = Answers(answer)
    nn.init.ones_(model.layer.weight)
    trainer = made("hf_compat", model, tmp_path)
    if loss is None:
        with pytest.raises(LossError):
            trainer.compute_loss(model, {"x": X})
    else:
        assert trainer.compute_loss(model, {"x": X}).item() == loss
        pair = trainer.compute_loss(model, {"x": X}, return_outputs=True)
        assert pair[0].item() == loss and len(pair) == 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("function", [None, "own"])
def test_a_loss_divided_by_the_items_of_all_ranks_is_multiplied_by_them(
    ranks, averages, items, accepts, function, tmp_path
):
    model, given = Answers(lambda w: {"loss": w, "logits": X}), []
    nn.init.ones_(model.layer.weight)

    def own(outputs, labels, num_items_in_batch=None):
        given.append((labels, num_items_in_batch))
        return outputs["loss"] * 5

    options = {"compute_loss_func": own} if function else {}
    trainer = made("hf_compat", model, tmp_path, {"average_tokens_across_devices": averages}, **options)
    trainer.accelerator.rank_slice = SimpleNamespace(world_size=ranks)
    trainer.model_accepts_loss_kwargs = accepts
    inputs = {"x": X, "labels": Y}
    loss = trainer.compute_loss(model, inputs, num_items_in_batch=items).item()
    counts = items is not None and averages and (accepts or function) and ranks > 1
    assert loss == (5 if function else 1) * (2 if counts else 1)
    assert model.seen == [(function is None, None, items if accepts else None)]
    assert given == ([(Y, items)] if function else []) and ("labels" in inputs) is (function is None)


@pytest.mark.parametrize(
    ("batches", "accepts", "function", "count"),
    [
        ([{"labels": Y}, {"labels": Y[:1]}], True, None, 6),
        ([{"labels": Y}], False, None, None),
        ([{"labels": Y}], False, "own", 4),
        ([], True, None, None),
        ([{"x": X}], True, None, None),
        ([(X, Y)], True, None, None),
        ([{"labels": [{"boxes": X}]}], True, None, None),
        ([{"labels": Y, "shift_labels": Y[:, :1]}], True, None, 2),
    ],
)
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("sharing", [1, 2])
def test_items_of_an_update_are_counted(batches, accepts, function, count, averages, sharing, tmp_path):
    options = {"compute_loss_func": (lambda *_, **__: None)} if function else {}
    trainer = made("hf_compat", Answers(MAPPING), tmp_path, {"average_tokens_across_devices": averages}, **options)
    trainer.model_accepts_loss_kwargs = accepts
    gathered = []
    trainer.accelerator.gather = lambda count: gathered.append(int(count)) or torch.stack([count] * 2 * sharing)
    trainer.accelerator.rank_slice = SimpleNamespace(world_size=2, sharing=sharing)
    read, items = trainer.get_batch_samples(iter([*batches, "later"]), len(batches), torch.device("cpu"))
    assert read == batches
    assert (items is None) if count is None else (float(items) == count * (2 if averages else 1))
    assert gathered == ([count] if averages and count is not None else [])


@pytest.mark.parametrize(
    ("shifts", "batch", "expected"),
    [
        (True, {"labels": Y}, Y[:, 1:]),
        (False, {"labels": Y}, Y),
        (True, {"labels": Y, "shift_labels": Y + 1}, Y + 1),
        (False, {"labels": Y, "shift_labels": Y + 1}, Y + 1),
    ],
)
def test_targets_are_those_of_the_loss(shifts, batch, expected):
    own = SimpleNamespace(_loss_shifts_labels=shifts)
    assert torch.equal(StepMethods._targets_of(own, batch), expected)


@pytest.mark.parametrize(
    ("micro_batches", "scaled", "accepts", "function", "items", "divisor"),
    [
        (1, False, False, None, None, 1),
        (4, None, False, None, 9, 4),
        (4, None, True, None, 9, 1),
        (4, None, True, None, None, 4),
        (4, None, False, "own", 9, 1),
        (4, None, False, "own", None, 1),
        (4, True, False, None, None, 1),
        (4, False, True, None, 9, 4),
    ],
)
@pytest.mark.parametrize("override", ["", "compute_loss", "training_step", "both"])
def test_what_divides_the_loss_of_a_micro_batch(
    micro_batches, scaled, accepts, function, items, divisor, override, tmp_path
):
    members = {}
    if override in ("compute_loss", "both"):
        members["compute_loss"] = lambda self, model, inputs, return_outputs=False: None
    if override in ("training_step", "both"):
        members["training_step"] = lambda self, model, inputs: None
    options = {"compute_loss_func": (lambda *_, **__: None)} if function else {}
    trainer = made("hf_compat", Answers(MAPPING), tmp_path, kind=lambda base: type("Own", (base,), members), **options)
    trainer.current_gradient_accumulation_steps, trainer.loss_is_scaled_for_ga = micro_batches, scaled
    trainer.model_accepts_loss_kwargs = accepts
    lacks = override and scaled is None and micro_batches > 1  # an override for 4.45 or before divides nothing
    assert trainer._loss_divisor(items) == (micro_batches if lacks else divisor)


@pytest.mark.parametrize(
    ("how", "inputs", "pad", "ranks", "sharing", "count"),
    [
        ("no", {"input_ids": Y}, None, 1, 1, 0),
        ("all", {"input_ids": Y}, 4, 1, 1, 6),
        ("all", {"input_ids": Y, "attention_mask": Y > 2}, None, 1, 1, 6),
        ("non_padding", {"input_ids": Y, "attention_mask": Y > 2}, 4, 1, 1, 2),
        ("non_padding", {"input_ids": Y}, 4, 1, 1, 5),
        ("non_padding", {"input_ids": Y}, 0, 1, 1, 6),
        ("non_padding", {"input_ids": Y}, None, 1, 1, 6),
        ("all", {"x": Y}, None, 1, 1, 0),
        ("all", (Y,), None, 1, 1, 0),
        ("all", {"input_ids": Y}, None, 2, 1, 12),
        ("all", {"input_ids": Y}, None, 2, 2, 6),
    ],
)
def test_tokens_are_counted(how, inputs, pad, ranks, sharing, count, monkeypatch):
    told = []
    monkeypatch.setattr(steps.logger, "warning_once", told.append)
    own = SimpleNamespace(
        args=SimpleNamespace(include_num_input_tokens_seen=how, device="cpu"), model=object(), processing_class=None,
        state=SimpleNamespace(num_input_tokens_seen=100),
        accelerator=SimpleNamespace(
            num_processes=ranks, reduce=lambda count: count * ranks, rank_slice=SimpleNamespace(sharing=sharing)
        ),
    )  # fmt: skip
    if pad is not None:
        own.processing_class = SimpleNamespace(pad_token_id=pad)
    StepMethods._track_num_input_tokens(own, inputs)
    assert own.state.num_input_tokens_seen == 100 + count
    has_no_way = how == "non_padding" and pad is None and "attention_mask" not in inputs
    is_missing = "input_ids" not in inputs
    assert len(told) == (has_no_way or is_missing)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parameters_are_grouped_as_transformers_groups_them(frozen, decay, tmp_path):
    found = []
    for api in APIS:
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2))
        if frozen:
            model[0].weight.requires_grad = False
        trainer = made(api, model, tmp_path, {"weight_decay": decay})
        groups = trainer.create_optimizer().param_groups
        assert trainer.create_optimizer() is trainer.optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found.append(
            (
                [([names[id(one)] for one in group["params"]], group["weight_decay"]) for group in groups],
                trainer.get_num_trainable_parameters(), trainer.get_learning_rates(),
                [len(group) for group in trainer.get_optimizer_group()],
            )
        )  # fmt: skip
    assert found[0] == found[1]
    # upstream compares tensors for this, and fails
    assert any(one is model[1].weight for one in trainer.get_optimizer_group(model[1].weight)["params"])
    assert isinstance(trainer.get_optimizer_group(nn.Parameter(torch.zeros(1))), list)


@pytest.mark.parametrize("name", ["get_learning_rates", "get_optimizer_group"])
def test_without_an_optimizer_there_are_no_groups(name, tmp_path):
    for api in APIS:
        with pytest.raises(ValueError, match="optimizer is None"):
            getattr(made(api, Answers(MAPPING), tmp_path), name)()


def test_an_optimizer_that_is_only_returned_is_named(tmp_path):
    members = {"create_optimizer": lambda self, model=None: torch.optim.SGD(self.model.parameters(), lr=0.1)}
    trainer = made("hf_compat", Answers(MAPPING), tmp_path, kind=lambda base: type("Own", (base,), members))
    with pytest.raises(OverrideError, match="has returned SGD, and has not set"):
        trainer.create_optimizer_and_scheduler(3)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("schedule", [None, "schedule"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_learning_rate_is_the_schedules(follows, schedule, as_tensor, monkeypatch):
    made_of = torch.tensor if as_tensor else float
    monkeypatch.setattr(steps, "follows_metric", lambda schedule: follows)
    held = schedule and SimpleNamespace(get_last_lr=lambda: [made_of(0.25), made_of(9.0)])
    own = SimpleNamespace(
        lr_scheduler=held, optimizer=SimpleNamespace(param_groups=[{"lr": made_of(0.5)}, {"lr": 9.0}])
    )
    rate = StepMethods._get_learning_rate(own)
    assert rate == (0.25 if schedule and not follows else 0.5) and isinstance(rate, float)


@pytest.mark.parametrize(
    "name", ["training_step", "_clip_grad_norm", "_get_grad_norm", "compute_loss", "clip_grad_norm_"]
)
def test_what_comes_between_the_backward_pass_and_clipping(name, tmp_path):
    if name == "clip_grad_norm_":
        trainer = made("hf_compat", Answers(MAPPING), tmp_path)
        assert trainer.clips_as_torch()
        trainer.accelerator.clip_grad_norm_ = lambda *_: None
    else:
        members = {name: lambda self, *_, **__: None}
        trainer = made("hf_compat", Answers(MAPPING), tmp_path, kind=lambda base: type("Own", (base,), members))
    assert trainer.clips_as_torch() is (name == "compute_loss")


@pytest.mark.parametrize("norm", [None, 0.0, 2.0])
def test_a_norm_is_measured_unless_clipping_has_done_so(norm):
    asked = []
    own = SimpleNamespace(
        accelerator=SimpleNamespace(clip_grad_norm_=lambda *what: asked.append(what) or 7.0),
        _tree=SimpleNamespace(parameters=lambda model: [model]), args=SimpleNamespace(max_grad_norm=0.5),
    )  # fmt: skip
    assert StepMethods._get_grad_norm(own, "m", norm) == (7.0 if norm is None else norm)
    assert asked == ([(["m"], float("inf"))] if norm is None else [])
    assert StepMethods._clip_grad_norm(own, "m") == 7.0 and asked[-1] == (["m"], 0.5)


@pytest.mark.parametrize("every", [None, 1, 2, 3])
@pytest.mark.parametrize("update", [0, 2, 3])
def test_the_cache_is_emptied_every_few_updates(every, update, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(steps, "empty_device_cache", lambda: told.append(1))
    trainer = made("hf_compat", Answers(MAPPING), tmp_path, {"torch_empty_cache_steps": every})
    trainer.accelerator.run_backward, trainer.state.global_step = (lambda loss, **_: loss.backward()), update
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, {"x": X})
    assert len(told) == (every is not None and update % every == 0)


@pytest.mark.parametrize("has_train", [False, True, "value"])
@pytest.mark.parametrize("done", [None, 3.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_micro_batch_is_trained_or_run_as_a_graph(has_train, done, compiles, tmp_path):
    told, model = [], Answers(lambda w: {"loss": w * 8})
    nn.init.ones_(model.layer.weight)
    trainer = made("hf_compat", model.eval(), tmp_path)
    trainer.optimizer = SimpleNamespace(param_groups=[])
    if has_train:
        trainer.optimizer.train = (lambda: told.append("train")) if has_train is True else 3
    if compiles:
        trainer.accelerator.compiled_update = SimpleNamespace(run=lambda *what: told.append(what[2:]) or done)
    trainer.accelerator.run_backward = lambda loss, **_: told.append(float(loss.detach()))
    trainer.current_gradient_accumulation_steps, trainer._asks_for_count = 4, True
    inputs = {"x": X}
    loss = trainer.training_step(model, inputs)
    is_done = compiles and done is not None
    steps_before = ["train"] * (has_train is True) + [(inputs, None, 4)] * compiles
    assert told == [*steps_before, *([] if is_done else [2.0])]
    assert float(loss) == (3.0 if is_done else 2.0) and model.training and not trainer._asks_for_count
    assert is_done or not loss.requires_grad


@pytest.mark.parametrize(
    ("watched", "changes", "is_watched"),
    [
        (torch.tensor(3), {}, True),
        (3, {}, False),
        (None, {}, False),
        (torch.tensor(3), {"_compiled_model": "model"}, False),
        (torch.tensor(3), {"is_deepspeed_enabled": True}, False),
        (torch.tensor(3), {"factor": 1}, False),
        (torch.tensor(3), {"factor": 2}, True),
        (torch.tensor(3), {"update": "graphs"}, False),
        (torch.tensor(3), {"compiled": True}, False),
    ],
)
def test_when_a_count_is_watched(watched, changes, is_watched, monkeypatch):
    changes = {"factor": 4, "update": None, "compiled": False, **changes}
    monkeypatch.setattr(steps, "is_compiled_model", lambda model: changes["compiled"])
    own = SimpleNamespace(
        _compiled_model=changes.get("_compiled_model"), model="m", _count_factor=lambda: changes["factor"],
        is_deepspeed_enabled=changes.get("is_deepspeed_enabled", False),
        accelerator=SimpleNamespace(compiled_update=changes["update"]),
    )  # fmt: skip
    assert isinstance(StepMethods.watched_count(own, watched), steps.Count) is is_watched


@pytest.mark.parametrize(
    ("averages", "override", "ranks", "factor"),
    [(True, False, 3, 12), (True, True, 3, 4), (False, False, 3, 4), (False, True, 3, 4), (True, False, 1, 4)],
)
def test_how_often_a_loss_is_too_large(averages, override, ranks, factor, tmp_path):
    members = {"compute_loss": lambda self, *_, **__: None} if override else {}
    trainer = made(
        "hf_compat", Answers(MAPPING), tmp_path, {"average_tokens_across_devices": averages},
        kind=lambda base: type("Own", (base,), members),
    )  # fmt: skip
    trainer.accelerator.rank_slice, trainer.current_gradient_accumulation_steps = SimpleNamespace(world_size=ranks), 4
    assert trainer._count_factor() == factor


@pytest.mark.parametrize(
    ("own_step", "instance", "scaled", "factor", "mentions", "items", "reads", "warns"),
    [
        (False, False, True, 4, False, 9, False, True),
        (False, False, True, 4, False, 9, True, False),
        (False, False, True, 4, False, None, True, True),
        (False, False, False, 4, False, 9, False, False),
        (False, False, True, 1, False, 9, False, False),
        (False, False, True, 2, False, 9, False, True),
        (False, False, True, 4, True, 9, False, False),
        (True, False, True, 4, False, 9, False, True),
        (True, False, False, 4, False, 9, False, True),
        (True, True, True, 4, False, 9, False, False),
        (False, False, True, 4, False, "used", False, False),
        (False, False, True, 4, False, "unused", True, True),
    ],
)
def test_a_count_that_nothing_divides_by_is_told(
    own_step, instance, scaled, factor, mentions, items, reads, warns, monkeypatch
):
    told = []
    monkeypatch.setattr(steps, "mentions", lambda kind, word: mentions)
    if isinstance(items, str):
        used, items = items == "used", steps.Count.of(torch.tensor(9))
        if used:
            _ = X.sum() / items
    own = SimpleNamespace(
        _asks_for_count=own_step, _is_scaled_for_window=lambda given: scaled, _count_factor=lambda: factor,
        _reads_count=lambda: reads, _warn_of_ignored_count=lambda *what: told.append(what),
    )  # fmt: skip
    if instance:
        own.training_step = None
    StepMethods.judge_count(own, items, "loss", "inputs")
    assert told == [("loss", "inputs", own_step)] * warns and own._asks_for_count is False


@pytest.mark.parametrize(
    ("data", "error"),
    [({"x": X}, None), ({}, "The batch received was empty"), ([], "The batch received was empty"), (3, "int")],
)
def test_an_empty_batch_is_refused(data, error, tmp_path):
    trainer = made("hf_compat", Answers(MAPPING), tmp_path)
    with contextlib.nullcontext() if error is None else pytest.raises((ValueError, TypeError), match=error):
        assert trainer._prepare_inputs(data) == data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_deepspeed", [False, True])
@pytest.mark.parametrize("override", [False, True])
def test_inputs_are_moved_and_cast_for_an_engine(dtype, is_deepspeed, override, tmp_path):
    seen = []

    def noting(base):
        def _prepare_input(self, data):
            seen.append(type(data).__name__)
            return base._prepare_input(self, data)

        return type("Own", (base,), {"_prepare_input": _prepare_input} if override else {})

    trainer = made("hf_compat", Answers(MAPPING).to(dtype), tmp_path, kind=noting)
    trainer.is_deepspeed_enabled = is_deepspeed
    moved = trainer._prepare_inputs({"x": X, "pair": (X, [Y]), "text": "t"})
    cast = dtype if is_deepspeed else torch.float32
    assert moved["x"].dtype == moved["pair"][0].dtype == cast and moved["pair"][1][0].dtype == Y.dtype
    assert type(moved["pair"]) is tuple and type(moved["pair"][1]) is list and moved["text"] == "t"
    assert seen == (["dict", "Tensor", "tuple", "Tensor", "list", "Tensor", "str"] if override else [])
