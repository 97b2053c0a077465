"""Which optimizer the arguments make, which parameters decay, and label smoothing bit for bit."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer as UpstreamTrainer
from transformers.optimization import Adafactor as UpstreamAdafactor
from transformers.trainer_pt_utils import LabelSmoother as UpstreamLabelSmoother

from hf_compat.errors import ArgumentError
from hf_compat.optim import lr_schedulers, optimizers, stepping
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


def adam(*parameters):
    return torch.optim.Adam(parameters or [torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("attributes", "kind", "switches", "in_backward"),
    [
        ({}, "OptimizerBehaviour", False, False),
        ({"fused_backward": print}, "FusedStepping", False, True),
        ({"train": print}, "ScheduleFreeStepping", True, False),
        ({"eval": print}, "ScheduleFreeStepping", True, False),
        ({"train": True}, "OptimizerBehaviour", False, False),
    ],
)
def test_how_an_optimizer_steps(attributes, kind, switches, in_backward):
    optimizer = adam()
    vars(optimizer).update(attributes)
    found = stepping.behaviour_of(optimizer)
    assert (type(found).__name__, found.switches, found.steps_in_backward) == (kind, switches, in_backward)
    both = stepping.behaviour_of(adam(), optimizer)
    assert (both.switches, both.steps_in_backward) == (switches, in_backward)


def test_a_layerwise_optimizer_steps_where_a_parameter_has_its_gradient():
    trained, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = stepping.LayerWiseDummyOptimizer({one: torch.optim.SGD([one], lr=0.5) for one in (trained, frozen)})
    found = stepping.behaviour_of(optimizer)
    assert type(found).__name__ == "LayerwiseStepping" and found.steps_in_backward
    for _ in range(2):
        found.attach()  # the second one does nothing
    optimizer._step_one(frozen)  # it has no gradient
    trained.sum().backward()
    assert (trained.item(), frozen.item(), trained.grad) == (0.5, 1.0, None)
    optimizer.schedulers[trained] = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer_dict[trained], 0.1, 1)
    trained.sum().backward()
    assert trained.item() == pytest.approx(0.45) and optimizer.schedulers[trained].last_epoch == 1
    found.detach()
    trained.sum().backward()
    assert trained.item() == pytest.approx(0.45)
    assert optimizer.step() is None and optimizer.step(lambda: 3.0) == 3.0


@pytest.mark.parametrize(
    ("groups", "told"), [([], 0), ([{}], 0), ([{"train_mode": False}], 0), ([{}, {"train_mode": True}], 1)]
)
def test_weights_that_are_no_average_are_told_when_they_are_saved(monkeypatch, groups, told):
    seen = []
    monkeypatch.setattr(stepping, "warn_once", seen.append)
    stepping.ScheduleFreeStepping(SimpleNamespace(param_groups=groups)).tell_of_saving()
    stepping.ScheduleFreeStepping(SimpleNamespace()).tell_of_saving()
    assert len(seen) == told


@pytest.mark.parametrize("switch", ["train", "eval"])
def test_an_optimizer_that_averages_is_switched(switch):
    seen = []
    optimizer = SimpleNamespace(**{switch: lambda: seen.append(switch)})
    found = stepping.ScheduleFreeStepping(optimizer)
    found.to_training(), found.to_evaluation()  # it may lack one of them
    assert seen == [switch]


MODEL, OTHER = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
FROZEN = torch.nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("held", "model", "refused", "told"),
    [
        (MODEL.parameters, MODEL, False, False),
        (OTHER.parameters, MODEL, True, False),
        (lambda: [MODEL.weight], MODEL, False, False),
        (lambda: [MODEL.weight, OTHER.bias], MODEL, False, True),
        (lambda: [*MODEL.parameters(), OTHER.bias], MODEL, False, False),
        (OTHER.parameters, FROZEN, False, False),
    ],
)
def test_an_optimizer_holds_what_is_trained(recwarn, held, model, refused, told):
    optimizer = torch.optim.SGD(held(), lr=0.1)
    if refused:
        with pytest.raises(ArgumentError, match="so nothing is trained"):
            optimizers.check_optimized(optimizer, model)
    else:
        optimizers.check_optimized(optimizer, model, warns=False)
        assert not recwarn
        optimizers.check_optimized(optimizer, model)
    assert len(recwarn) == told
    optimizers.check_optimized(SimpleNamespace(param_groups=()), model)
    optimizers.check_optimized(stepping.LayerWiseDummyOptimizer(), model)


@pytest.mark.parametrize(
    ("held", "frozen", "said"),
    [
        ([MODEL.weight, MODEL.bias], [], ""),
        ([MODEL.weight], [MODEL.bias], "were unfrozen after"),
        ([MODEL.weight], [], ""),
        ([MODEL.weight, OTHER.bias], [], "does not have, and does not train"),
        ([MODEL.weight, OTHER.bias], [MODEL.bias], "were unfrozen after"),
    ],
)
def test_parameters_that_an_optimizer_lacks_are_told(recwarn, held, frozen, said):
    optimizers.tell_of_later_parameters(torch.optim.SGD(held, lr=0.1), MODEL, frozen)
    optimizers.tell_of_later_parameters(SimpleNamespace(), MODEL, frozen)
    assert len(recwarn) == bool(said) and said in "".join(str(one.message) for one in recwarn)


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("adamw_torch", None, 8),
        ("adamw_bnb_8bit", None, 2),
        ("adamw_torch_4bit", None, 1),
        ("galore_adamw", "rank=8", None),
    ],
)
def test_the_bytes_of_an_optimizers_states(name, options, found):
    assert optimizers.state_bytes(name, options) == found


@pytest.mark.parametrize(
    ("schedule_of", "trained", "told"),
    [("same", "same", 0), ("same", "other", 1), ("same", "wrapper", 0), ("none", "same", 0)],
)
def test_a_schedule_of_another_optimizer_is_told(recwarn, schedule_of, trained, told):
    own = adam()
    schedule = torch.optim.lr_scheduler.ConstantLR(own) if schedule_of == "same" else SimpleNamespace()
    optimizer = {"same": own, "other": adam(), "wrapper": SimpleNamespace(param_groups=own.param_groups)}[trained]
    recwarn.clear()
    lr_schedulers.tell_of_other_optimizer(schedule, optimizer)
    assert len(recwarn) == told
    assert lr_schedulers.is_schedule_of(schedule, optimizer) is (schedule_of == trained == "same")


def test_which_schedules_follow_a_metric():
    theirs = type("GreedyLR", (), {})()
    assert lr_schedulers.follows_metric(torch.optim.lr_scheduler.ReduceLROnPlateau(adam()))
    assert lr_schedulers.follows_metric(theirs) and not lr_schedulers.follows_metric(SimpleNamespace())


@pytest.mark.parametrize(
    ("made", "loaded", "rates", "told"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, [], []),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}, [], []),
        ({"weight_decay": 0.1}, {"weight_decay": 0.2}, [], ["weight_decay is 0.2 (now set to 0.1)"]),
        ({"weight_decay": 0.1}, {}, [], []),
        ({}, {"weight_decay": 0.1}, [], []),
        ({"initial_lr": 0.1}, {"initial_lr": 0.3}, [0.2], ["initial_lr is 0.2 (now set to 0.1)"]),
        ({"initial_lr": 0.1}, {"initial_lr": 0.3}, [], []),
        ({"betas": 1, "momentum": 2}, {"betas": 3, "momentum": 4}, [], ["betas is 3", "momentum is 4"]),
        (
            {"betas": 1, "momentum": 2, "eps": 5},
            {"betas": 3, "momentum": 4, "max_momentum": 1, "eps": 6},
            [],
            ["eps is 6"],
        ),
    ],
)
def test_options_that_a_checkpoint_replaces_are_told(recwarn, made, loaded, rates, told):
    optimizers.tell_of_kept_options([made], [loaded], rates)
    said = "".join(str(one.message) for one in recwarn)
    assert len(recwarn) == bool(told) and all(one in said for one in told) and said.count(" is ") == len(told)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"q_proj": nn.Linear(2, 3), "k_proj": nn.Linear(2, 4, bias=False)})
        self.decoder = nn.ModuleDict({"q_proj": nn.Linear(2, 5), "norm": nn.LayerNorm(2)})


def asked(targets, name="galore_adamw", **args):
    usual = {"world_size": 1, "gradient_accumulation_steps": 1, "mixed_precision": "no"}
    values = SimpleNamespace(optim_target_modules=targets, **usual | args)
    return optimizers.OptimizerRequest(values, name, Layers(), {}, {})


@pytest.mark.parametrize(
    ("targets", "chosen", "told"),
    [
        ("all-linear", ["encoder.q_proj", "encoder.k_proj", "decoder.q_proj"], 0),
        ("all_linear", ["encoder.q_proj", "encoder.k_proj", "decoder.q_proj"], 0),
        ("encoder.q_proj", ["encoder.q_proj"], 0),
        (r".*\.q_proj", ["encoder.q_proj", "decoder.q_proj"], 0),
        ("q_proj", None, 0),  # a text is a whole name
        (["q_proj"], ["encoder.q_proj", "decoder.q_proj"], 0),
        (["encoder"], ["encoder.q_proj", "encoder.k_proj"], 1),
        (["encoder.q", "decoder.norm"], ["encoder.q_proj"], 1),
        (["all-linear"], None, 0),
        ([r"decoder\.q_.*"], ["decoder.q_proj"], 0),
        ("decoder.norm", None, 1),
        (r"decoder\..*", ["decoder.q_proj"], 0),
        ([], None, 0),
    ],
)
@pytest.mark.parametrize("warns", [False, True])
def test_the_layers_whose_gradients_are_projected(targets, chosen, told, warns, monkeypatch):
    said = []
    monkeypatch.setattr(optimizers._log, "warning", lambda *what: said.append(what))
    request = asked(targets)
    if chosen is None:
        with pytest.raises(ArgumentError, match="matches no linear layer"):
            optimizers.low_rank_groups(request, {"rank": 2}, warns)
    else:
        others, projected = optimizers.low_rank_groups(request, {"rank": 2}, warns)
        names = {id(parameter): name for name, parameter in request.model.named_parameters()}
        assert [names[id(one)] for one in projected["params"]] == [f"{name}.weight" for name in chosen]
        assert projected["rank"] == 2 and others.keys() == {"params"}
        assert len(others["params"]) + len(projected["params"]) == len(names)
    assert len(said) == told * warns


@pytest.mark.parametrize(
    ("targets", "said"), [(None, "needs `optim_target_modules`"), (["("], "is not a regular expression")]
)
def test_targets_that_say_nothing_are_refused(targets, said):
    with pytest.raises(ArgumentError, match=said):
        optimizers.low_rank_groups(asked(targets), {})


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("lomo", {}, None),
        ("lomo", {"world_size": 2}, "choose another optimizer"),
        ("lomo", {"gradient_accumulation_steps": 2}, None),
        ("lomo", {"mixed_precision": "fp16"}, "gradients are still scaled"),
        ("lomo", {"mixed_precision": "bf16"}, None),
        ("galore_adamw_layerwise", {}, None),
        ("galore_adamw_layerwise", {"world_size": 2}, "or use `optim='galore_adamw'`"),
        ("galore_adamw_layerwise", {"gradient_accumulation_steps": 2}, "Layerwise galore_adamw_layerwise does not"),
        ("galore_adamw_layerwise", {"mixed_precision": "fp16"}, "gradients are still scaled"),
    ],
)
def test_what_steps_in_the_backward_pass_refuses(name, args, said):
    if said is None:
        assert optimizers.refuse_in_backward(asked(None, name, **args)) is None
    else:
        with pytest.raises((ArgumentError, NotImplementedError), match=said):
            optimizers.refuse_in_backward(asked(None, name, **args))


@pytest.mark.parametrize(
    ("optim", "optim_args", "size"),
    [
        ("adamw_torch", None, 8),
        ("adamw_torch_8bit", None, 2),
        ("adamw_torch_4bit", None, 1),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 4),
        ("sgd", "momentum=0, nesterov=no", 0),
        ("sgd", "weight_decay=0.1", 0),
        ("rmsprop", "momentum=0.9,centered=true", 12),
        ("rmsprop", "momentum=0.9 , centered=false", 8),
        ("galore_adamw", None, None),
        ("galore_adamw", "rank=3", None),
    ],
)
def test_bytes_of_the_states_of_a_parameter(optim, optim_args, size):
    assert optimizers.state_bytes(optim, optim_args) == size
