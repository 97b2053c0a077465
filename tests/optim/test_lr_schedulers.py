"""Every schedule, with its options, against transformers' own: equal to the last bit."""

import sys

import pytest
import torch
import transformers
from transformers.optimization import GreedyLR as UpstreamGreedyLR

from hf_compat.errors import ArgumentError, MissingPackage
from hf_compat.optim.lr_schedulers import OF_TRANSFORMERS, follows_metric, get_scheduler

SCHEDULES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 5, "decay_type": "1-sqrt", "warmup_type": "cosine", "min_lr_ratio": 0.1},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "decay_type": "linear"}),
]


def optimizer():
    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1e-2, 3e-2)]
    return torch.optim.SGD(parameters, lr=1e-2)


def rates(scheduler, updates=25):
    seen = []
    for _ in range(updates):
        seen.append(scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.filterwarnings("ignore:Both num_training_steps")  # transformers' own
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name, options", SCHEDULES)
def test_the_learning_rates_of_a_run(name, options, warmup):
    ours = get_scheduler(name, optimizer(), warmup, 20, scheduler_specific_kwargs=dict(options))
    theirs = transformers.get_scheduler(name, optimizer(), warmup, 20, scheduler_specific_kwargs=dict(options))
    assert rates(ours) == rates(theirs)


@pytest.mark.filterwarnings("ignore:Both num_training_steps")  # transformers' own
@pytest.mark.parametrize("name, options", [row for row in SCHEDULES if row[0] != "constant"])
def test_what_a_schedule_was_made_of_is_read_off_it_by_transformers_names(name, options):
    ours = get_scheduler(name, optimizer(), 4, 20, scheduler_specific_kwargs=dict(options)).lr_lambdas[0]
    theirs = transformers.get_scheduler(name, optimizer(), 4, 20, scheduler_specific_kwargs=dict(options)).lr_lambdas[0]
    assert theirs.keywords.items() <= ours.keywords.items() and ours.args == theirs.args


def test_greedy_is_transformers_class_and_without_it_that_is_said(monkeypatch):
    made = get_scheduler("greedy", optimizer(), scheduler_specific_kwargs={"patience": 2})
    assert type(made) is UpstreamGreedyLR and follows_metric(made)
    with pytest.raises(ArgumentError, match="options of this schedule are: mode, factor, patience"):
        get_scheduler("greedy", optimizer(), scheduler_specific_kwargs={"patients": 2})
    monkeypatch.delattr(transformers.optimization, "GreedyLR")  # as before 5.16
    with pytest.raises(MissingPackage, match=f"greedy.*GreedyLR.*{transformers.__version__}"):
        get_scheduler("greedy", optimizer())


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_without_transformers_what_to_install_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    with pytest.raises(MissingPackage, match=rf"lr_scheduler_type='{name.value}'(.|\n)*pip install 'transformers>="):
        get_scheduler(name, optimizer(), 0, 20)


@pytest.mark.parametrize(
    "name, counts, options, text",
    [
        ("linear", (None, 20), {}, "num_warmup_steps"),
        ("linear", (0, None), {}, "num_training_steps"),
        ("cosine_with_min_lr", (0, 20), {}, "One of min_lr or min_lr_rate"),
        ("polynomial", (0, 20), {"lr_end": 1.0}, "smaller than initial lr"),
        ("warmup_stable_decay", (0, 20), {"num_decay_steps": 2, "decay_type": "step"}, "decay_type"),
        ("cosine", (0, 20), {"cycles": 2}, "cycles"),
        (
            "cosine_with_min_lr",
            (0, 20),
            {"min_lr": 0.1, "warmup_lr_rate": 1},
            "schedule are: num_cycles, ",
        ),
        (
            "cosine_warmup_with_min_lr",
            (0, 20),
            {"min_lr": 0.1, "x": 1},
            "min_lr_rate, warmup_lr_rate.",
        ),
        ("polynomial", (0, 20), {"lr_init": 1}, "options of this schedule are: lr_end, power"),
    ],
)
def test_what_cannot_work_is_named(name, counts, options, text):
    with pytest.raises(ArgumentError, match=text):
        get_scheduler(name, optimizer(), *counts, scheduler_specific_kwargs=options)
