"""An optimizer or a schedule that cannot be made of the arguments is an error before training, with the arguments."""

from __future__ import annotations

import pytest

from hf_compat import TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.optim import optimizers
from hf_compat.plan import argument_support
from hf_compat.plan.argument_support import check_optimization, check_optimizer


def arguments(tmp_path, **values):
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **values)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("linear", {}, None),
        ("polynomial", {"lr_end": 1e-7, "power": 2.0}, None),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("polynomial", {"power": float("nan")}, "learning rates that are not finite"),
        ("cosine_with_restarts", {"num_cycles": "x"}, "ValueError: could not convert"),
        ("cosine", {"cycles": 2}, "cycles"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, None),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("warmup_stable_decay", {"num_decay_steps": 10}, None),
    ],
)
def test_a_schedule_is_tried_before_training(tmp_path, kind, options, said):
    found = ""
    try:
        check_optimization(arguments(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=options))
    except ArgumentError as error:
        found = str(error)
    assert bool(found) == (said is not None) and (said or "") in found
    assert not found or "lr_scheduler_type" in found


@pytest.mark.parametrize("error", [ValueError("odd betas"), TypeError("odd betas"), LookupError("odd betas")])
def test_an_optimizer_that_cannot_be_made_names_its_arguments(tmp_path, monkeypatch, error):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(argument_support, "get_optimizer_cls_and_kwargs", lambda args: (broken, {}))
    with pytest.raises(ArgumentError) as raised:
        check_optimizer(arguments(tmp_path, adam_beta1=0.5))
    assert str(raised.value).startswith("The optimizer cannot be made: ") and "odd betas" in str(raised.value)
    assert "`adam_beta1=0.5`" in str(raised.value) and "optim_args" not in str(raised.value)


def test_an_optimizer_whose_keywords_depend_on_the_model_waits_for_it(tmp_path, monkeypatch):
    made = check_optimizer(arguments(tmp_path, adam_beta1=0.5, learning_rate=0.25))
    assert [len(group["params"]) for group in made.param_groups] == [1, 1]
    assert made.defaults["betas"][0] == 0.5 and made.defaults["lr"] == 0.25
    entry, rest = optimizers.read_request(arguments(tmp_path), None)
    for name in ("projects", "in_backward"):
        changed = type("Entry", (), {**{one: getattr(entry, one) for one in ("projects", "in_backward")}, name: True})
        monkeypatch.setattr(argument_support, "read_request", lambda args, model, found=changed: (found, rest))
        assert check_optimizer(arguments(tmp_path)) is None
