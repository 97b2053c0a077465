"""Every schedule, with its options, against transformers' own: equal to the last bit."""

import random

import pytest
import torch
import transformers
from transformers.optimization import GreedyLR as UpstreamGreedyLR

from hf_compat.errors import ArgumentError
from hf_compat.optim.lr_schedulers import GreedyLR, follows_metric, get_scheduler

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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"smooth": True, "window_size": 3},
        {"mode": "max", "patience": 1},
        {"reset_start": 2, "patience": 1, "cooldown": 1},
    ],
)
def test_greedy_follows_a_metric_and_resumes(options):
    options = {"patience": 2, "min_lr": 1e-3, "max_lr": 5e-2, "factor": 0.7, **options}
    ours, theirs = GreedyLR(optimizer(), **options), UpstreamGreedyLR(optimizer(), **options)
    generator, state = random.Random(5), None
    for update in range(60):
        value = generator.uniform(0, 1)
        ours.step(value)
        theirs.step(value)
        assert ours.get_last_lr() == theirs.get_last_lr(), update
        if update == 30:
            assert ours.state_dict().keys() == theirs.state_dict().keys()
            state = theirs.state_dict()
            ours = GreedyLR(optimizer(), **options)
            ours.load_state_dict(state)
    assert follows_metric(ours) and len({tuple(ours.get_last_lr()), (1e-2, 3e-2)}) == 2


@pytest.mark.parametrize(
    "name, counts, options, text",
    [
        ("linear", (None, 20), {}, "num_warmup_steps"),
        ("linear", (0, None), {}, "num_training_steps"),
        ("cosine_with_min_lr", (0, 20), {}, "exactly one"),
        ("polynomial", (0, 20), {"lr_end": 1.0}, "smaller than the initial"),
        ("warmup_stable_decay", (0, 20), {"num_decay_steps": 2, "decay_type": "step"}, "decay_type"),
        ("cosine", (0, 20), {"cycles": 2}, "cycles"),
    ],
)
def test_what_cannot_work_is_named(name, counts, options, text):
    with pytest.raises(ArgumentError, match=text):
        get_scheduler(name, optimizer(), *counts, scheduler_specific_kwargs=options)
