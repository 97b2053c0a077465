"""A model placed by `device_map` is trained where it is, or refused with the reason."""

from __future__ import annotations

import pytest
import torch

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import UnsupportedArgument
from hf_compat.interop.transformers_models import check_placement, is_model_parallel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def placed(places, **marks):
    model = toy.Classifier()
    model.hf_device_map = places
    for name, value in marks.items():
        setattr(model, name, value)
    return model


class Moving(TrainingArguments):
    @property
    def place_model_on_device(self):
        return True


def test_a_model_that_is_placed_trains_as_any_other(make_args, tmp_path, caplog):
    ends = []
    for places in (None, {"": "cpu"}):
        torch.manual_seed(0)
        model = toy.Classifier() if places is None else placed(places)
        trainer = Trainer(model, make_args(max_steps=3), train_dataset=toy.rows())
        trainer.train()
        assert trainer.is_model_parallel is False
        ends.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert same(*ends) and "it is not moved" not in caplog.text
    Trainer(placed({"": "cpu"}), Moving(str(tmp_path), use_cpu=True, report_to="none"))
    assert "it is not moved to cpu" in caplog.text


PARALLEL = [
    ({"": 0}, GPU, False),
    ({"": "cuda:0"}, GPU, False),
    ({"a": 0, "b": "cpu"}, GPU, False),
    ({"": 1}, GPU, True),
    ({"a": 0, "b": 1}, GPU, True),
    ({"": "cpu"}, GPU, False),
    ({"": "cpu"}, CPU, False),
]


@pytest.mark.parametrize(("places", "device", "expected"), PARALLEL)
def test_what_model_parallel_means(places, device, expected):
    assert is_model_parallel(placed(places), device) is expected


REFUSED = [
    ({"inner": 0, "head": 1}, {}, 2, "spread over devices.*2 processes.*Hint.*fsdp"),
    ({"": 1}, {"is_loaded_in_8bit": True}, 1, "8 or 4 bits on 1.*trains on cuda:0.*Hint"),
    ({"": "cpu"}, {"is_loaded_in_4bit": True}, 1, "offloaded \\(cpu\\).*Hint"),
    ({"inner": 0, "head": "disk"}, {"is_loaded_in_4bit": True}, 1, "offloaded \\(disk\\).*Hint"),
]


@pytest.mark.parametrize(("places", "marks", "world", "message"), REFUSED)
def test_a_placement_that_cannot_be_trained_is_refused(places, marks, world, message):
    with pytest.raises(UnsupportedArgument, match=f"(?s){message}"):
        check_placement(placed(places, **marks), GPU, world)


@pytest.mark.parametrize("places", [{"": 0}, {"": "cuda"}, {"": GPU}, {"inner": 0, "head": 1}])
def test_a_quantized_model_in_its_place_is_not_refused(places):
    model = placed(places, is_loaded_in_8bit=True)
    check_placement(model, GPU, 1)
    assert model.hf_device_map == places


def test_the_constructor_looks(make_args):
    with pytest.raises(ValueError, match="8 or 4 bits on 0"):
        Trainer(placed({"": 0}, is_loaded_in_8bit=True), make_args(), train_dataset=toy.rows())
