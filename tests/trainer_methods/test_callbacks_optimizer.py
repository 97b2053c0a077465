"""The optimizer that callbacks and scripts see is wrapped, as by Accelerate. Its `step` waits for the update's end."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer

import hf_compat
from helpers import toy

APIS = (transformers, hf_compat)
BASE = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none"}


def train(api, folder, callbacks=(), rows=21, kind=None, **values):
    values = {
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        **BASE,
        **values,
    }
    args = api.TrainingArguments(str(folder), learning_rate=0.01, **values)
    torch.manual_seed(0)
    trainer = (kind or api.Trainer)(toy.Classifier(), args, train_dataset=toy.rows(rows), callbacks=list(callbacks))
    trainer.train()
    return trainer


def inner(optimizer):
    """As code of differential privacy finds the optimizer whose `step` skips an update."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def steps_within(optimizer):
    inner(optimizer).step()
    inner(optimizer).zero_grad()


def changes_groups(optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


# What a callback does with the optimizer that it is given
ACTS = {
    "steps within": steps_within,
    "steps": lambda optimizer: optimizer.step(),
    "zeroes": lambda optimizer: optimizer.zero_grad(),
    "zeroes all": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "zeroes within": lambda optimizer: inner(optimizer).zero_grad(),
    "changes groups": changes_groups,
    "loads": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
}
EVENTS = (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step",
    "on_step_end", "on_epoch_end",
)  # fmt: skip


def acting(api, event, act):
    class Acts(api.TrainerCallback):
        pass

    setattr(Acts, event, lambda self, args, state, control, optimizer=None, **kwargs: act(optimizer))
    return Acts()


@pytest.mark.parametrize("event", EVENTS)
def test_what_a_callback_does_with_the_optimizer_trains_the_weights_of_transformers(tmp_path, event):
    for name, act in ACTS.items():
        theirs, ours = (train(api, tmp_path, [acting(api, event, act)]).model.state_dict() for api in APIS)
        for weight, value in theirs.items():
            assert torch.equal(ours[weight], value), (name, weight)


def test_a_callback_that_steps_makes_as_many_steps_as_under_transformers(tmp_path):
    """Every second of 8 updates is one of the callback's own, as a step of the optimizer inside is never held."""
    counts = []
    for api in APIS:
        made = []

        def counted(optimizer, made=made):
            if not made:
                inner(optimizer).register_step_post_hook(lambda *_: made.append(1))
                made.append(0)
            steps_within(optimizer)

        callbacks = [acting(api, "on_substep_end", counted)]
        train(api, tmp_path, callbacks, rows=32, gradient_accumulation_steps=2, max_steps=8)
        counts.append(sum(made))
    assert counts == [16, 16]


def test_the_rhythm_is_that_of_transformers_at_every_event(tmp_path):
    """It says whether the wrapped optimizer steps, so that callbacks of any release find the same."""
    seen = []
    for api in APIS:
        found = []

        class Notes(api.TrainerCallback):
            def bind(self, trainer):
                self.accelerator = trainer.accelerator

        for event in EVENTS:
            setattr(Notes, event, lambda self, *_, event=event, found=found, **__: found.append(
                (event, self.accelerator.sync_gradients)
            ))  # fmt: skip
        notes = Notes()

        class Bound(api.Trainer):
            def __init__(self, *args, notes=notes, **kwargs):
                super().__init__(*args, **kwargs)
                notes.bind(self)

        train(api, tmp_path, [notes], rows=toy_rows_of_short_windows, kind=Bound, max_steps=-1, num_train_epochs=2)
        seen.append(found)
    assert seen[1] == seen[0] and len(seen[0]) > 30


toy_rows_of_short_windows = 14  # 7 micro-batches: updates of 3, 3 and 1


def test_a_script_finds_what_it_finds_under_transformers(tmp_path):
    """During the training, after it, and in a second one."""
    found = []
    for api in APIS:
        seen = []

        def look(optimizer, seen=seen):
            seen.append(isinstance(optimizer, AcceleratedOptimizer) and type(optimizer.optimizer).__name__)

        trainer = train(api, tmp_path, [acting(api, "on_step_end", look)], max_steps=1)
        for _ in range(2):
            outer = trainer.optimizer
            seen += [
                isinstance(outer, AcceleratedOptimizer),
                isinstance(outer, torch.optim.Optimizer),
                isinstance(outer.optimizer, torch.optim.AdamW),
                outer is trainer.callback_handler.optimizer,
                outer is trainer.accelerator._optimizers[0],
                outer.step_was_skipped or trainer.accelerator.optimizer_step_was_skipped,
                outer.scaler is None and outer.gradient_state.sync_gradients,
                outer.accelerator_state.mixed_precision,
                len(outer.state_dict()["state"]) == len(outer.state) > 0,
                outer.param_groups is outer.optimizer.param_groups and outer.defaults is outer.optimizer.defaults,
            ]
            trainer.train()
        found.append(seen)
    assert found[1] == found[0]


def test_the_wrapper_has_every_public_name_of_accelerate_s(tmp_path):
    theirs, ours = (train(api, tmp_path, max_steps=1).optimizer for api in APIS)
    missing = [name for name in dir(theirs) if not name.startswith("_") and not hasattr(ours, name)]
    assert missing == [] and type(ours).__module__.startswith("hf_compat.")


def test_a_wrapped_optimizer_can_be_copied(tmp_path):
    optimizer = train(hf_compat, tmp_path, max_steps=1).optimizer
    again = copy.deepcopy(optimizer)
    assert isinstance(again, AcceleratedOptimizer) and again.optimizer is not optimizer.optimizer
    assert len(again.state) == len(optimizer.state) > 0


def test_an_optimizer_that_is_not_torch_s_stays_as_it_is(tmp_path):
    found = []
    for api in APIS:

        class Plain:
            def __init__(self, parameters):
                self.inner = torch.optim.SGD(parameters, lr=0.1)
                self.param_groups, self.state_dict = self.inner.param_groups, self.inner.state_dict
                self.zero_grad, self.load_state_dict = self.inner.zero_grad, self.inner.load_state_dict
                self.defaults, self.state = self.inner.defaults, self.inner.state

            def step(self, closure=None):
                self.inner.step()

        class Own(api.Trainer):
            def create_optimizer(self, model=None, kind=Plain):
                self.optimizer = kind(self.model.parameters())
                return self.optimizer

            def create_scheduler(self, num_training_steps, optimizer=None):
                self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer.inner, 1.0)
                return self.lr_scheduler

        trainer = train(api, tmp_path, kind=Own)
        found.append((type(trainer.optimizer).__name__, trainer.model.state_dict()))
    assert found[0][0] == found[1][0] == "Plain"
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_in_lightning_s_own_trainer_a_callback_s_step_waits_too(tmp_path):
    steps = []

    class Steps(hf_compat.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, **kwargs):
            optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(self.where))

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.where = "update"

        def on_substep_end(self, args, state, control, optimizer, **kwargs):
            self.where = "plain"
            optimizer.step()
            self.where = "within"
            inner(optimizer).step()

    trainer = pl.Trainer(
        default_root_dir=tmp_path, max_steps=2, accumulate_grad_batches=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[hf_compat.HFCallbackAdapter(Steps())],
    )  # fmt: skip
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=2))
    assert steps == ["within", "update"] * 2


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "accelerate"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[2])
import torch
from helpers import toy
import hf_compat

class Steps(hf_compat.TrainerCallback):
    def on_substep_end(self, args, state, control, optimizer, **kwargs):
        optimizer.step()
        if state.global_step == 1:
            optimizer.optimizer.step()

args = hf_compat.TrainingArguments(
    sys.argv[1], max_steps=3, gradient_accumulation_steps=2, use_cpu=True, save_strategy="no", disable_tqdm=True
)
trainer = hf_compat.Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[Steps()])
trainer.train()
print("STEPS", {int(state["step"]) for state in trainer.optimizer.state.values()})
"""


@pytest.mark.matrix
@pytest.mark.real_python
def test_without_accelerate_the_optimizer_has_the_same_two_ways_to_step(tmp_path):
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "out"), str(Path(__file__).resolve().parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "STEPS {4}" in done.stdout, done.stderr[-2000:]
