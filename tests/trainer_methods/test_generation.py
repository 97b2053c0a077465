"""The keywords of `generate` and the padding of its tokens, without a model that generates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Seq2SeqTrainer as Upstream

from hf_compat.errors import ArgumentError
from hf_compat.trainer_methods import generation
from hf_compat.trainer_methods.generation import GenerationSteps


def steps(kind=GenerationSteps, **values):
    made = kind.__new__(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("given", "longest", "beams", "found"),
    [
        ({}, None, None, {}),
        ({}, 7, 3, {"max_length": 7, "num_beams": 3}),
        ({"max_length": 5}, 7, 3, {"max_length": 5, "num_beams": 3}),
        ({"max_new_tokens": 5}, 7, None, {"max_new_tokens": 5}),
        ({"max_length": None, "max_new_tokens": None}, 7, None, {"max_length": 7, "max_new_tokens": None}),
        ({"num_beams": 2}, None, 3, {"num_beams": 2}),
        ({"num_beams": None}, None, 3, {"num_beams": 3}),
        ({"num_beams": 0, "max_length": 0}, 7, 3, {"num_beams": 0, "max_length": 0}),
        ({"top_k": 1}, None, None, {"top_k": 1}),
    ],
)
@pytest.mark.parametrize("generates", [False, True, None])
def test_arguments_are_the_defaults_of_keywords(given, longest, beams, found, generates, monkeypatch):
    told, before = [], dict(given)
    monkeypatch.setattr(generation, "warn_user", lambda text, kind: told.append(text))
    args = SimpleNamespace(generation_max_length=longest, generation_num_beams=beams)
    if generates is not None:
        args.predict_with_generate = generates
    assert steps(args=args)._generation_keywords(given) == found and given == before
    names = [f"{name}={value}" for name, value in given.items() if value is not None]
    assert told == (
        [f"`{', '.join(names)}` has no effect without `predict_with_generate=True`."] if names and not generates else []
    )


@pytest.mark.parametrize(
    ("processor", "config", "pad"),
    [
        (None, SimpleNamespace(pad_token_id=3), 3),
        (None, SimpleNamespace(pad_token_id=0), 0),
        (None, SimpleNamespace(pad_token_id=None), None),
        (None, None, None),
        (SimpleNamespace(pad_token_id=4, eos_token_id=5), SimpleNamespace(pad_token_id=3), 4),
        (SimpleNamespace(pad_token_id=0, eos_token_id=5), SimpleNamespace(pad_token_id=3), 0),
        (SimpleNamespace(pad_token_id=None, eos_token_id=5), SimpleNamespace(pad_token_id=3), 5),
        (SimpleNamespace(pad_token_id=None, eos_token_id=None), SimpleNamespace(pad_token_id=3), None),
        (SimpleNamespace(eos_token_id=5), SimpleNamespace(pad_token_id=3), 3),
    ],
)
def test_tokens_are_padded_with_the_padding_token(processor, config, pad):
    model = SimpleNamespace() if config is None else SimpleNamespace(config=config)
    own, rows = steps(model=model, processing_class=processor), torch.ones(2, 3, dtype=torch.int64)
    if pad is None:
        with pytest.raises(ArgumentError, match="Pad_token_id must be set"):
            own._pad_tensors_to_max_len(rows, 5)
        return
    padded = own._pad_tensors_to_max_len(rows, 5)
    assert padded.tolist() == [[1, 1, 1, pad, pad]] * 2 and padded.dtype == rows.dtype
    if config is not None and processor is not None:
        theirs = Upstream._pad_tensors_to_max_len(SimpleNamespace(model=model, processing_class=processor), rows, 5)
        assert hasattr(processor, "pad_token_id") is False or torch.equal(theirs, padded)


class OwnStep(GenerationSteps):
    def prediction_step(self, *args, **kwargs):
        """Generate in another way."""


@pytest.mark.parametrize(
    ("asks", "generates", "kind", "refused"),
    [
        (True, False, GenerationSteps, True),
        (True, True, GenerationSteps, False),
        (True, False, OwnStep, False),
        (False, False, GenerationSteps, False),
    ],
)
@pytest.mark.parametrize("config", [None, {"num_beams": 2}])
def test_a_model_gets_its_generation_config(asks, generates, kind, refused, config, monkeypatch):
    monkeypatch.setattr(GenerationSteps, "load_generation_config", staticmethod(lambda given: ("made", given)))
    names = generation.without_effect(generation.CANNOT_GENERATE)
    args = SimpleNamespace(**dict.fromkeys(names), **{})
    args.predict_with_generate, args.generation_config = asks, config
    own = steps(kind, args=args, model=SimpleNamespace(generate=(lambda: None) if generates else None))
    if refused:
        with pytest.raises(ArgumentError, match="has no method `generate`"):
            own._set_up_generation()
        return
    own._set_up_generation()
    assert getattr(own.model, "generation_config", None) == (config and ("made", config))
    del args.predict_with_generate
    with pytest.raises(ArgumentError, match="has no predict_with_generate"):
        own._set_up_generation()


@pytest.mark.parametrize(
    ("asks", "loss_only", "given", "kept", "expected"),
    [
        (False, False, {}, {}, "plain"),
        (True, True, {}, {}, "plain"),
        (None, False, {}, {}, "plain"),
        (True, False, {}, {"top_k": 1}, {"synced_gpus": False, "top_k": 1}),
        (True, False, {"top_k": 2}, {"top_k": 1, "num_beams": 3}, {"synced_gpus": False, "top_k": 2}),
        (True, False, {"synced_gpus": True}, {}, {"synced_gpus": True}),
        (True, False, {}, None, {"synced_gpus": False}),
    ],
)
@pytest.mark.parametrize("is_spread", [False, True])
def test_which_steps_generate(asks, loss_only, given, kept, expected, is_spread, monkeypatch):
    told = []
    monkeypatch.setattr(
        generation.StepMethods, "prediction_step", lambda self, *args, **kwargs: told.append((args, kwargs)) or "plain"
    )
    theirs = SimpleNamespace(
        prediction_step=lambda self, model, inputs, only, ignore, **words: ((model, inputs, only, ignore), words)
    )
    monkeypatch.setattr(generation, "of_transformers", lambda *_: theirs)
    monkeypatch.setattr(generation, "is_partitioned", lambda model: is_spread)
    model = type("Own", (torch.nn.Linear,), {"generate": lambda self: None})(1, 1)
    own = steps(args=SimpleNamespace(predict_with_generate=asks), model=model)
    if kept is not None:
        own._gen_kwargs = kept
    found = own.prediction_step("model", {"x": 1}, loss_only, ["y"], **given)
    if expected == "plain":
        assert found == "plain" and told == [(("model", {"x": 1}, loss_only), {"ignore_keys": ["y"]})]
    else:
        spread = {"synced_gpus": given.get("synced_gpus", is_spread)}
        assert found == (("model", {"x": 1}, loss_only, ["y"]), {**expected, **spread})
