"""Which models can be trained, without making any of them."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from hf_compat.errors import ArgumentError, UnsupportedArgument
from hf_compat.interop import transformers_models
from hf_compat.runtime import meshes


class Split(SimpleNamespace):
    """A parameter's tensor over the axes of a mesh."""


class Sharded:
    """A module of FSDP 2."""


class Model(nn.Module):
    """Has these parameters: by name the axes, None for a whole one, and whether it is trained."""

    def __init__(self, parameters, is_loaded=False, is_sharded=False, **facts):
        super().__init__()
        self.held = [
            (name, SimpleNamespace(data=None if axes is None else split(axes), requires_grad=is_trained))
            for name, (axes, is_trained) in parameters.items()
        ]
        self.is_distributed_loading_by_transformers = is_loaded
        self.parts = [Sharded()] if is_sharded else []
        self.__dict__.update(facts)

    def named_parameters(self):
        return self.held

    def modules(self):
        return [object(), *self.parts]


def split(axes):
    return Split(device_mesh=SimpleNamespace(mesh_dim_names=axes or None))


ADDED = {"w": (("dp",), True), "a": (None, True)}
LOADED = {"is_loaded": True, "is_sharded": True}


@pytest.mark.parametrize(
    ("parameters", "facts", "ranks", "is_peft", "told"),
    [
        ({"w": (None, True)}, {}, 1, False, None),
        ({"w": ((), True)}, {}, 1, False, None),
        ({"v": (("tp",), True), "w": (("dp", "ep"), True)}, {}, 1, False, "'w' is spread over the axes"),
        ({"w": (("tp",), True)}, {}, 2, True, "it has adapters"),
        ({"w": (("tp",), True)}, {}, 2, False, None),
        ({"w": (("dp",), True)}, {}, 1, True, None),
        (ADDED, LOADED, 1, True, "its parameter 'a' is whole"),
        (ADDED, {"is_loaded": True}, 1, True, None),
        (ADDED, {"is_sharded": True}, 1, True, None),
        ({**ADDED, "a": (None, False)}, LOADED, 1, True, None),
        ({"a": (None, True)}, LOADED, 1, True, None),
        ({}, {"is_quantized": True}, 1, True, "quantized True"),
        ({}, {"is_quantized": False}, 1, True, None),
    ],
)
def test_which_models_can_be_trained(monkeypatch, parameters, facts, ranks, is_peft, told):
    def check_quantization(model, has_adapters):
        raise UnsupportedArgument(f"quantized {has_adapters}")

    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setattr(torch.distributed.tensor, "DTensor", Split)
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", Sharded)
    monkeypatch.setattr(meshes, "tensor_ranks", lambda model: ranks)
    monkeypatch.setattr(transformers_models, "is_peft_model", lambda model: is_peft)
    monkeypatch.setattr(transformers_models, "check_quantization", check_quantization)
    with pytest.raises(UnsupportedArgument, match=told) if told else contextlib.nullcontext():
        assert transformers_models.check_trainable(Model(parameters, **facts)) is None
    if "is_quantized" in facts:
        monkeypatch.delitem(sys.modules, "transformers")
        assert transformers_models.check_trainable(Model(parameters, **facts)) is None


@pytest.mark.parametrize("model", [None, "gpt2", nn.Linear])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ArgumentError, match=f"`model` is a {type(model).__name__}, not a torch.nn.Module"):
        transformers_models.check_trainable(model)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("places", "device", "bits", "world_size", "is_parallel", "told"),
    [
        (None, CPU, 4, 2, False, None),
        ({"": 0}, GPU, 4, 2, False, None),
        ({"": 0}, torch.device("cuda"), 4, 1, False, None),
        ({"": "cuda:0"}, GPU, 8, 1, False, None),
        ({"": 1}, GPU, None, 1, True, None),
        ({"": 1}, GPU, 8, 1, True, "in 8 or 4 bits on 1"),
        ({"": 0}, CPU, 4, 1, True, "in 8 or 4 bits on 0"),
        ({"": "cpu"}, CPU, 4, 1, False, None),
        ({"a": 0, "b": 1}, GPU, None, 1, True, None),
        ({"a": 0, "b": 1}, GPU, 4, 1, True, None),
        ({"a": 0, "b": 1}, GPU, None, 2, True, "spread over devices"),
        ({"a": 0, "b": "cpu"}, GPU, None, 1, False, None),
        ({"a": 0, "b": "cpu"}, GPU, 8, 1, False, r"offloaded \(cpu\)"),
        ({"a": 0, "b": "disk"}, GPU, 4, 1, False, r"offloaded \(disk\)"),
        ({"a": "cpu", "b": "disk"}, CPU, 4, 1, False, r"offloaded \(disk\)"),
        ("auto", GPU, 4, 2, False, None),
    ],
)
def test_where_a_models_parts_may_be(places, device, bits, world_size, is_parallel, told):
    model = nn.Linear(1, 1)
    model.hf_device_map = places
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    assert transformers_models.is_model_parallel(model, device) is is_parallel
    with pytest.raises(UnsupportedArgument, match=told) if told else contextlib.nullcontext():
        assert transformers_models.check_placement(model, device, world_size) is None


@pytest.mark.parametrize(
    ("kind", "config", "shifts"),
    [
        ("ForCausalLM", {}, True),
        ("ForCausalLM", {"is_encoder_decoder": False}, True),
        ("ForCausalLM", {"is_encoder_decoder": True}, False),
        ("ForMaskedLM", {}, False),
        ("Unknown", {}, False),
        (None, {}, False),
    ],
)
def test_which_losses_shift_their_labels(monkeypatch, kind, config, shifts):
    model = SimpleNamespace(config=SimpleNamespace(**config), **({"loss_type": kind} if kind else {}))
    assert transformers is not None and transformers_models.loss_shifts_labels(model) is shifts
    if not config:
        del model.config
        assert transformers_models.loss_shifts_labels(model) is shifts
    monkeypatch.delitem(sys.modules, "transformers")
    assert transformers_models.loss_shifts_labels(model) is False


@pytest.mark.parametrize(
    ("architecture", "is_there", "made"),
    [("BertModel", True, "BertModel"), ("BertModel", False, None), ("Nothing", True, None)]
    + [(name, True, None) for name in ("BertConfig", "set_seed", "logging")],
)
def test_a_model_is_made_of_a_class_of_transformers_alone(monkeypatch, architecture, is_there, made):
    monkeypatch.setattr(transformers_models, "is_installed", lambda name: name == "transformers" and is_there)
    read = classmethod(lambda cls, folder: (cls.__name__, folder))
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", read)
    assert transformers_models.read_pretrained("here", architecture) == (made and (made, "here"))
