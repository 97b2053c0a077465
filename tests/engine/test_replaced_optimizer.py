"""A callback replaces the optimizer or the schedule during training."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch

from helpers import toy
from helpers.handwritten import bare_trainer
from hf_compat import HFDataModule, HFModule, Trainer, TrainerCallback, TrainingArguments
from hf_compat.errors import HfCompatWarning


def trained(tmp_path, act, event: str = "on_step_end", more: tuple = (), **arguments):
    """Train ten updates, and call `act` with the trainer after the fourth. Return it and the weights by update."""
    weights: list[torch.Tensor] = []

    def acts(self, args, state, control, **kwargs):
        if state.global_step == 4:
            act(trainer)

    def looks(self, args, state, control, **kwargs):
        weights.append(torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()]))

    acting = type("Acting", (TrainerCallback,), {event: acts})
    looking = type("Looking", (TrainerCallback,), {"on_step_end": looks})
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, logging_steps=1, save_strategy="no", learning_rate=0.1,
        use_cpu=True, disable_tqdm=True, report_to="none", lr_scheduler_type="constant", **arguments,
    )  # fmt: skip
    model = toy.Classifier()
    trainer = Trainer(model=model, args=args, train_dataset=toy.rows(), callbacks=[looking(), acting(), *more])
    trainer.train()
    return trainer, weights


def stop_moving(trainer):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)


@pytest.mark.parametrize("event", ["on_step_end", "on_step_begin", "on_substep_end"])
def test_an_optimizer_that_a_callback_puts_in_place_steps_from_then_on(tmp_path, event):
    trainer, weights = trained(tmp_path, stop_moving, event, gradient_accumulation_steps=2)
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert moved == [True] * 3 + [False] * 6
    assert trainer.state.global_step == trainer.lightning_trainer.global_step == 10
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_it_steps_where_lightning_callbacks_listen_too(tmp_path):
    class Listens(pl.Callback):
        seen: list = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen.append(type(optimizer).__name__)

    trained(tmp_path, stop_moving, more=(Listens(),))
    assert Listens.seen == ["AdamW"] * 4 + ["SGD"] * 6


def test_a_schedule_that_a_callback_puts_in_place_is_stepped(tmp_path):
    def halve(trainer):
        trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)

    trainer, _ = trained(tmp_path, halve)
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == [0.1] * 5 + [0.1 * 0.5**n for n in range(1, 6)]


def test_another_accumulation_within_a_training_is_warned_of(tmp_path):
    def accumulate(trainer):
        trainer.args.gradient_accumulation_steps = 2

    with pytest.warns(HfCompatWarning, match="`gradient_accumulation_steps` was set to 2 during training"):
        trainer, _ = trained(tmp_path, accumulate)
    assert trainer.state.global_step == 10


class Fused(torch.optim.SGD):
    """An optimizer that runs the backward pass, as LOMO does."""

    rates: list[float]

    def fused_backward(self, loss, lr):
        self.rates.append(lr)
        loss.backward()


def test_an_optimizer_that_runs_the_backward_pass_gets_it_when_it_is_put_in_place(tmp_path):
    def fuse(trainer):
        trainer.optimizer = Fused(trainer.model.parameters(), lr=0.25)
        trainer.optimizer.rates = rates

    rates: list[float] = []
    trained(tmp_path, fuse, max_grad_norm=0.0)
    assert rates == [0.1] * 5  # found when the fifth update ends; as upstream, the rate is that of the schedule


def test_a_lightning_trainer_counts_the_updates_of_an_optimizer_that_is_put_in_place(tmp_path):
    class Replaces(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                pl_module.steps.optimizer = torch.optim.SGD(pl_module.parameters(), lr=0.0)
                self.weights = [one.detach().clone() for one in pl_module.parameters()]

    module = HFModule(toy.Classifier(), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    replaces = Replaces()
    trainer = bare_trainer([replaces], tmp_path, max_epochs=5, accumulate_grad_batches=1, gradient_clip_val=None)
    trainer.fit(module, HFDataModule(None, toy.rows(16)))
    assert trainer.global_step == 10
    assert all(torch.equal(*pair) for pair in zip(replaces.weights, module.parameters(), strict=True))
