"""Optimizers that change the step, under transformers and under hf_compat, are equal to the last bit.

Each makes 20 updates, with accumulation if allowed, evaluations, checkpoints and the best model at the end. A second
run resumes from the checkpoint in the middle.
"""

from __future__ import annotations

from unittest import mock

import lomo_optim
import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.resume_runs import Run, assert_as_transformers, assert_same, without
from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning, UnsupportedArgument, warn_once
from hf_compat.optim.lr_schedulers import get_scheduler
from hf_compat.optim.optimizers import check_request
from hf_compat.optim.stepping import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from hf_compat.runtime.launch import Launch

WHOLE = {
    "max_steps": 20,
    "lr_scheduler_type": "linear",
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "steps",
    "save_steps": 5,
    "load_best_model_at_end": True,
}
KINDS = {
    "schedule_free_radam": {},
    "schedule_free_adamw": {"warmup_steps": 3, "optim_args": "r=0.5,weight_lr_power=1.0", "weight_decay": 0.01},
    "schedule_free_sgd": {"weight_decay": 0.01},
    "lomo": {},
    "adalomo": {},
    "galore_adamw_layerwise": {"optim_target_modules": ["inner", "outer"], "optim_args": "rank=2,update_proj_gap=4"},
    "apollo_adamw_layerwise": {"optim_target_modules": "all-linear", "optim_args": "rank=1,proj=svd"},
}
# what ours says of upstream's silence (a test below looks at it), and the packages of themselves
QUIET = pytest.mark.filterwarnings(
    "ignore:.*as in transformers:hf_compat.errors.HfCompatWarning", "ignore:This implementation of AdamW:FutureWarning"
)
ONE_MICRO_BATCH = {"gradient_accumulation_steps": 1}


def run(api, folder, name, **changed):
    accumulation = ONE_MICRO_BATCH if "layerwise" in name else {}
    return Run(api, folder / api.__name__, optim=name, **{**WHOLE, **accumulation, **KINDS[name], **changed})


class AdaLomoOnCPU(lomo_optim.AdaLomo):
    """The package's AdaLomo, with its averages on the model's device."""

    def __init__(self, *args, **kwargs):
        with mock.patch.object(torch.Tensor, "cuda", torch.Tensor.cpu):
            super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def adalomo_on_the_cpu(monkeypatch):
    monkeypatch.setattr(lomo_optim, "AdaLomo", AdaLomoOnCPU)


@QUIET
@pytest.mark.parametrize("name", KINDS)
def test_a_run_and_its_resumption_equal_transformers(tmp_path, name):
    found = {}
    for api in (transformers, hf_compat):
        first = run(api, tmp_path, name)
        whole, evaluated = first.train(), first.trainer.evaluate()
        again = run(api, tmp_path, name)
        found[api.__name__] = whole, evaluated["eval_loss"], again.train(again.checkpoint(10))
    (theirs, their_loss, their_rest), (ours, our_loss, our_rest) = found["transformers"], found["hf_compat"]
    assert_as_transformers(theirs, ours, sums_begin_again=False)
    assert their_loss == our_loss
    assert_as_transformers(their_rest, our_rest)


def evaluate_between(api):
    """Evaluate within a window, and between two updates."""

    class Between(api.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                self.trainer.evaluate()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                self.trainer.evaluate()

    return [Between()]


SHORT = {"max_steps": 8, "eval_steps": 4, "save_steps": 4}
UNSAVED = {"save_strategy": "no", "load_best_model_at_end": False}
CROSSED = {
    "bf16": {"bf16": True},
    "before_training": {"eval_on_start": True},
    "saved_without_evaluation": {"eval_strategy": "no", "load_best_model_at_end": False, "save_steps": 3},
    "no_clipping": {"max_grad_norm": 0.0},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
}
OF_EACH_KIND = ("schedule_free_adamw", "lomo", "galore_adamw_layerwise")


def in_turn():
    """Pair each argument with each kind. One kind of each argument always runs, the others with `-m matrix`."""
    for place, with_what in enumerate(CROSSED):
        for number, name in enumerate(OF_EACH_KIND):
            marks = () if number == place % len(OF_EACH_KIND) else pytest.mark.matrix
            yield pytest.param(name, with_what, marks=marks)


@QUIET
@pytest.mark.parametrize(("name", "with_what"), list(in_turn()))
def test_other_arguments_beside(tmp_path, name, with_what):
    found = []
    for api in (transformers, hf_compat):
        one = run(api, tmp_path, name, **{**SHORT, **CROSSED[with_what]})
        found.append((one.train(), one.trainer.evaluate()["eval_loss"]))
    (theirs, their_loss), (ours, our_loss) = found
    assert_as_transformers(theirs, ours, sums_begin_again=False)
    assert their_loss == our_loss


@QUIET
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_callbacks_that_evaluate_and_a_second_call(tmp_path, name):
    found = []
    for api in (transformers, hf_compat):
        one = run(api, tmp_path, name, callbacks=evaluate_between, **SHORT, **UNSAVED)
        for callback in one.trainer.callback_handler.callbacks:
            if type(callback).__name__ == "Between":
                callback.trainer = one.trainer
        found.append((one.train(), one.train()))
    (their_first, their_second), (our_first, our_second) = found
    assert_same(their_first["log"], our_first["log"], "log")
    assert_same(their_second["log"], our_second["log"], "log of the second call")
    assert_same(their_second["weights"], our_second["weights"], "weights")


@QUIET
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_saving_in_the_background_changes_nothing(tmp_path, name):
    kept = []
    for place, when in (("now", False), ("later", True)):
        one = run(hf_compat, tmp_path / place, name, **SHORT, async_save=when)
        one.train()
        again = run(hf_compat, tmp_path / place, name, **SHORT)
        kept.append(again.train(again.checkpoint(4)))
    now, later = kept
    assert_same(now["weights"], later["weights"], "weights")
    assert_same(without(now["log"], "train_loss"), without(later["log"], "train_loss"), "log")


@QUIET
@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_no_hook_is_left_on_the_parameters(tmp_path, name):
    trainer = run(hf_compat, tmp_path, name, **SHORT).trainer
    trainer.train()
    for parameter in trainer.model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.model(torch.zeros(2, 8), labels=torch.zeros(2, dtype=torch.long))["loss"].backward()
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_the_best_model_is_not_averaged_with_the_last(tmp_path):
    trainer = run(hf_compat, tmp_path, "schedule_free_adamw", **{**SHORT, "max_steps": 11}).trainer
    trainer.train()
    best = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    found = trainer.evaluate()
    assert found["eval_loss"] == trainer.state.best_metric
    assert_same(best, trainer.model.state_dict(), "weights")


def test_what_upstream_leaves_unsaid_is_said(tmp_path):
    warn_once.cache_clear()
    trainer = run(
        hf_compat, tmp_path, "schedule_free_adamw", **{**SHORT, **CROSSED["saved_without_evaluation"]}
    ).trainer
    with pytest.warns(HfCompatWarning, match="not averaged"):
        trainer.train()
    with pytest.warns(HfCompatWarning, match="first step is 2 times"):
        run(hf_compat, tmp_path / "share", "schedule_free_sgd", **SHORT, warmup_steps=0.5)
    one = run(hf_compat, tmp_path / "layers", "galore_adamw_layerwise", **SHORT, max_grad_norm=0.5)
    with (
        pytest.warns(InertArgumentWarning, match="max_grad_norm=0.5"),
        pytest.warns(HfCompatWarning, match="keeps `learning_rate=0.01`"),
        pytest.warns(FutureWarning),
    ):
        one.train()
    with pytest.warns(HfCompatWarning, match="states of the optimizers of single parameters"):
        one.train(one.checkpoint(4))


REFUSED = {
    "layerwise_accumulation": ("galore_adamw_layerwise", {"gradient_accumulation_steps": 2}),
    "layerwise_without_modules": ("galore_adamw_layerwise", {"optim_target_modules": None}),
    "layerwise_with_no_such_module": ("apollo_adamw_layerwise", {"optim_target_modules": ["nowhere"]}),
    "layerwise_adafactor_accumulation": ("galore_adafactor_layerwise", {"gradient_accumulation_steps": 3}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_upstream_refuses_is_refused_when_the_trainer_is_made(tmp_path, case):
    name, changed = REFUSED[case]
    args = {"optim": name, "optim_target_modules": "all-linear", "use_cpu": True, "report_to": "none", **changed}
    theirs = transformers.Trainer(
        toy.Classifier(), transformers.TrainingArguments(str(tmp_path), **args), train_dataset=toy.rows(8)
    )
    with pytest.raises(ValueError, match=r"accumulation|optim_target_modules|target modules"):
        theirs.train()
    with pytest.raises(ArgumentError, match=r"accumulation|optim_target_modules"):
        hf_compat.Trainer(
            toy.Classifier(), hf_compat.TrainingArguments(str(tmp_path), **args), train_dataset=toy.rows(8)
        )


@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_several_processes_are_refused(tmp_path, name):
    args = hf_compat.TrainingArguments(
        str(tmp_path), optim=name, optim_target_modules="all-linear", use_cpu=True, report_to="none"
    )
    args.__dict__["_launch"] = Launch(process_index=0, local_process_index=0, world_size=2, local_world_size=2)
    with pytest.raises(NotImplementedError, match="2 processes"):
        check_request(args, toy.Classifier())


def test_adalomo_of_the_package_is_refused_without_cuda(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedArgument, match="CUDA GPU"):
        run(hf_compat, tmp_path, "adalomo")


@pytest.mark.parametrize(("warmup", "expected"), [(0, [1.0, 0.75, 0.5, 0.25]), (2, [0.0, 0.5, 1.0, 0.5])])
def test_each_parameter_can_have_a_schedule(warmup, expected):
    layers = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = LayerWiseDummyOptimizer({one: torch.optim.SGD([one], lr=1.0) for one in layers}, lr=1.0)
    optimizer.attach_hooks()
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=warmup, num_training_steps=4)
    assert isinstance(schedule, LayerWiseDummyScheduler)
    rates = []
    for _ in range(3):
        sum(one.sum() for one in layers).backward()
        schedule.step()
        rates.append(schedule.get_last_lr())
    assert rates == [[rate] for rate in expected[1:]]
    assert all(torch.equal(one, torch.full((2,), 1 - sum(expected[:3]))) for one in layers)
