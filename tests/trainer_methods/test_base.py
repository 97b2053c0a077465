"""What a Trainer sets for itself and for its model before it trains."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_compat.data.collators import PaddingCollator, default_data_collator
from hf_compat.errors import ArgumentError
from hf_compat.trainer_methods import base
from hf_compat.trainer_methods.base import StepsBase

APIS = ("transformers", "hf_compat")


@pytest.mark.parametrize(("local", "world"), [(0, 0), (0, 2), (1, 1)])
def test_a_new_run_counts_from_zero(local, world):
    args = {
        "local_process_index": local,
        "process_index": world,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 8,
    }
    own = SimpleNamespace(args=SimpleNamespace(**args))
    StepsBase._set_up_counters(own)
    assert (own.state.is_local_process_zero, own.state.is_world_process_zero) == (local == 0, world == 0)
    assert (own.current_gradient_accumulation_steps, own._train_batch_size, own.current_flos) == (3, 8, 0)
    assert own.is_in_train is own._created_lr_scheduler is False and own._signature_columns is None
    assert not any(vars(own.control).values()) and own.state.global_step == 0


@pytest.mark.parametrize("given", [None, len])
@pytest.mark.parametrize(("processor", "pads"), [(None, True), ("tokenizer", True), ("tokenizer", False)])
def test_which_collator_makes_the_batches(given, processor, pads, monkeypatch):
    monkeypatch.setattr(base, "pads_itself", lambda one: pads)
    own = SimpleNamespace()
    StepsBase._set_up_data(own, "train", "eval", given, processor)
    assert (own.train_dataset, own.eval_dataset, own.processing_class) == ("train", "eval", processor)
    expected = given or (default_data_collator if processor is None or not pads else PaddingCollator)
    assert own.data_collator is expected or type(own.data_collator) is expected


class Plain(nn.Module):
    def __init__(self, **values):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        vars(self).update(values)

    def forward(self, x, labels=None):
        return self.layer(x)


class Open(Plain):
    def forward(self, x, labels=None, more_labels=None, return_loss=True, **kwargs):
        return self.layer(x)


class Question(Plain):
    def forward(self, x, start_positions=None, end_positions=None):
        return self.layer(x)


Question.__name__ = "OwnQuestionAnswering"
MULTI = SimpleNamespace(problem_type="multi_label_classification", to_dict=dict)
ONE = SimpleNamespace(problem_type=None, to_dict=dict)


@pytest.mark.parametrize(
    ("kind", "values", "options"),
    [
        (Plain, {}, {}),
        (Open, {}, {}),
        (Question, {}, {}),
        (Open, {"accepts_loss_kwargs": False}, {}),
        (Plain, {"accepts_loss_kwargs": True}, {}),
        (Plain, {}, {"label_names": ["x"]}),
        (Plain, {}, {"label_names": []}),
        (Plain, {"config": ONE}, {"label_smoothing_factor": 0.1}),
        (Plain, {"config": MULTI}, {"label_smoothing_factor": 0.1}),
        (Plain, {"config": MULTI}, {"label_smoothing_factor": 0.0}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_model_takes_is_found_as_in_transformers(kind, values, options, tmp_path):
    found = []
    for api in APIS:
        module = importlib.import_module(api)
        args = module.TrainingArguments(str(tmp_path / api), use_cpu=True, report_to="none", **options)
        trainer = module.Trainer(kind(**values), args)
        smoother = trainer.label_smoother
        found.append(
            (
                trainer.model_accepts_loss_kwargs, trainer.label_names, trainer.can_return_loss,
                None if smoother is None else smoother.epsilon,
            )
        )  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
def test_sequences_that_are_shared_are_weighted_by_their_own_counts(shares, accepts):
    own = SimpleNamespace(_called=None, model=Plain(accepts_loss_kwargs=accepts))
    own.args = SimpleNamespace(label_names=None, label_smoothing_factor=0.1)  # upstream needs a `config` for it
    sequence = "plan" if shares else None
    own.accelerator = SimpleNamespace(unwrap_model=lambda model: model, sequence=sequence)
    StepsBase._introspect(own)
    assert own.model_accepts_loss_kwargs is (accepts and not shares) and own.label_smoother.epsilon == 0.1


@pytest.mark.parametrize("how", [None, {"backend": "eager"}])
def test_a_model_is_compiled_once(how, monkeypatch):
    made = []
    monkeypatch.setattr(base, "compilation_of", lambda args: how)
    monkeypatch.setattr(base, "compiled", lambda model, how: made.append(how) or SimpleNamespace(of=model))
    monkeypatch.setattr(base, "uncompiled", lambda compiled: compiled.of)
    own, first, second = SimpleNamespace(args=None, _compiled_model=None), nn.Linear(1, 1), nn.Linear(1, 1)
    held = StepsBase.compiled(own, first)
    assert (held is first) is (how is None) and StepsBase.compiled(own, first) is held
    assert (StepsBase.compiled(own, second) is second) is (how is None)
    assert made == [how] * (0 if how is None else 2)


@pytest.mark.parametrize("config", [None, True, False, "lacks"])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_cache_of_a_model_is_set(config, asked, recomputes):
    held = None if config is None else SimpleNamespace(**({} if config == "lacks" else {"use_cache": config}))
    own = SimpleNamespace(
        model=SimpleNamespace() if held is None else SimpleNamespace(config=held),
        args=SimpleNamespace(use_cache=asked, activation_checkpointing=recomputes),
    )
    StepsBase._set_use_cache(own)
    if held is not None:
        expected = asked if asked is not None else False if config is True and recomputes else config
        assert getattr(held, "use_cache", "lacks") == expected
    else:
        assert not hasattr(own.model, "config")


@pytest.mark.parametrize(
    "options", [None, {}, {"use_reentrant": False}, {"every_n_layers": 2, "offload": True, "debug": True}]
)
@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable", None])
def test_recomputation_is_enabled_by_the_model(options, name):
    told = []
    own = SimpleNamespace(
        model=SimpleNamespace(**({name: lambda **given: told.append(given)} if name else {})),
        args=SimpleNamespace(activation_checkpointing_kwargs=options),
    )
    if name is None:
        with pytest.raises(ArgumentError, match="has no method to enable it"):
            StepsBase._enable_activation_checkpointing(own)
        return
    before = dict(options or {})
    StepsBase._enable_activation_checkpointing(own)
    left = {key: value for key, value in before.items() if key not in ("every_n_layers", "offload")}
    if name == "activation_checkpointing_enable":
        every, offload = before.get("every_n_layers", 1), before.get("offload", False)
        expected = {"every_n_layers": every, "offload": offload, "activation_checkpointing_kwargs": left or None}
    else:
        expected = {"gradient_checkpointing_kwargs": before or None}
    assert told == [expected] and (options or {}) == before


@pytest.mark.parametrize("called", [None, "other"])
def test_whose_forward_counts(called):
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    wrapped = SimpleNamespace(unwrap_model=lambda given: given.inner)
    own = SimpleNamespace(
        accelerator=wrapped, model=SimpleNamespace(inner=model), _called=called and SimpleNamespace(inner=other)
    )
    assert base.model_with_forward(own) is (other if called else model)
    assert isinstance(model.weight, torch.Tensor)
