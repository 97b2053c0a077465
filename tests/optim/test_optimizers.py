"""Which optimizer the arguments make, which parameters decay, and label smoothing bit for bit."""

import itertools

import pytest
import torch
from torch import nn
from transformers import Trainer as UpstreamTrainer
from transformers.optimization import Adafactor as UpstreamAdafactor
from transformers.trainer_pt_utils import LabelSmoother as UpstreamLabelSmoother

from hf_compat.errors import ArgumentError
from hf_compat.optim.label_smoothing import LabelSmoother
from hf_compat.optim.optimizers import get_decay_parameter_names, get_optimizer_cls_and_kwargs


@pytest.mark.parametrize(
    "optim, optim_args, expected",
    [
        ("sgd", "momentum=0.9, nesterov=True", (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})),
        ("sgd", "nesterov=no", (torch.optim.SGD, {"nesterov": False})),
        ("rmsprop", "centered=1,alpha=0.5", (torch.optim.RMSprop, {"centered": True, "alpha": 0.5})),
        ("adagrad", None, (torch.optim.Adagrad, {})),
        ("adafactor", None, (UpstreamAdafactor, {"scale_parameter": False, "relative_step": False})),
    ],
)
def test_the_class_and_its_keywords(make_args, optim, optim_args, expected):
    optimizer, keywords = get_optimizer_cls_and_kwargs(make_args(optim=optim, optim_args=optim_args))
    assert (optimizer, keywords) == (expected[0], {"lr": 1e-2, **expected[1]})


@pytest.mark.parametrize(
    "optim, optim_args, error, text",
    [
        ("sgd", "nesterov=perhaps", ArgumentError, "nesterov='perhaps'` is not true or false"),
        ("sgd", "momentum", ArgumentError, "has the part 'momentum'"),
        ("adamw_torch", "betas=1", ArgumentError, "has betas, but .* takes no options"),
    ],
)
def test_what_cannot_work_is_named(make_args, optim, optim_args, error, text):
    with pytest.raises(error, match=text):
        get_optimizer_cls_and_kwargs(make_args(optim=optim, optim_args=optim_args))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
        self.attention = nn.ModuleDict({"q_norm": nn.Linear(2, 2), "normal": nn.Linear(2, 2)})
        self.rmsnorm, self.norm = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))


def test_the_parameters_that_decay_are_transformers():
    names = get_decay_parameter_names(Model())
    assert names == UpstreamTrainer.get_decay_parameter_names(None, Model())
    assert "scale" in names and "norm.weight" not in names and "layers.0.weight" in names


@pytest.mark.parametrize("shift, with_ignored", list(itertools.product((False, True), repeat=2)))
def test_label_smoothing(shift, with_ignored):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    if with_ignored:
        labels[0, 2:] = -100
    ours = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=shift)
    assert torch.equal(ours, UpstreamLabelSmoother(epsilon=0.2)({"logits": logits}, labels, shift_labels=shift))
