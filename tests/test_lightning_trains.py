"""It is Lightning that trains: its hooks, its counters, its metrics, its stops."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from helpers import toy
from hf_compat import HFBridge, HFDataModule, HFModule, Trainer, TrainerCallback

pytestmark = pytest.mark.filterwarnings("ignore:These arguments have no effect")  # args shared with a Trainer


class Watcher(pl.Callback):
    def __init__(self):
        self.updates, self.evaluations, self.hooks = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.updates.append((trainer.global_step, trainer.current_epoch, float(outputs["loss"]), len(batch)))

    def on_validation_start(self, trainer, module):
        self.hooks.append(("validation_start", trainer.validating, module.model.training))

    def on_validation_end(self, trainer, module):
        self.evaluations.append((trainer.global_step, float(trainer.callback_metrics["eval_loss"])))


def test_a_lightning_callback_sees_updates_and_evaluations(make_args):
    watcher = Watcher()
    args = make_args(gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=5, logging_steps=1)
    trainer = Trainer(
        toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9, 5), callbacks=[watcher]
    )
    trainer.train()
    assert isinstance(trainer.lightning_trainer, pl.Trainer)
    assert trainer.lightning_trainer.global_step == trainer.state.global_step == 10
    assert [step for step, *_ in watcher.updates] == list(range(1, 11))
    assert [size for *_, size in watcher.updates] == [3, 3, 3, 3, 1] * 2
    logged = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    assert [step for step, _ in watcher.evaluations] == list(logged) == [5, 10]
    for step, loss in watcher.evaluations:
        assert loss == pytest.approx(logged[step], rel=1e-6)  # Lightning keeps metrics in float32
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert [loss for _, _, loss, _ in watcher.updates] == pytest.approx(losses, rel=1e-6)
    assert watcher.hooks == [("validation_start", True, False)] * 2


class Asker(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_training_stop = True


def test_a_lightning_callback_may_stop_the_run(make_args):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step == 4

    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[Stop()])
    assert trainer.train().global_step == 4


def test_lightnings_early_stopping_follows_hf_metrics(make_args):
    args = make_args(eval_strategy="steps", eval_steps=2, learning_rate=0.0, num_train_epochs=5)
    stopping = EarlyStopping("eval_loss", patience=2)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9), callbacks=[stopping])
    assert trainer.train().global_step == 6
    assert stopping.stopped_epoch == 0 and stopping.wait_count == 2


def test_lightnings_model_checkpoint_works_beside(make_args, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "pl", monitor="eval_loss", filename="{step}", save_top_k=-1)
    args = make_args(eval_strategy="steps", eval_steps=5)
    trainer = Trainer(
        toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9), callbacks=[checkpoint]
    )
    trainer.train()
    assert {path.name for path in (tmp_path / "pl").iterdir()} == {
        f"step={step}.ckpt" for step in (5, 10, 15, 20, 25, 26)
    }
    assert checkpoint.best_model_score is not None


def test_hf_and_lightning_callbacks_stop_together(make_args):
    watcher = Watcher()
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[watcher, Asker])
    assert trainer.train().global_step == 3
    assert len(watcher.updates) == 3


def test_native_module_and_data_in_somebodys_trainer(make_args):
    args = make_args(gradient_accumulation_steps=3, num_train_epochs=1, lr_scheduler_type="constant")
    native = toy.Classifier()
    reference = Trainer(native, args, train_dataset=toy.rows(), eval_dataset=toy.rows(9))
    start = {name: tensor.clone() for name, tensor in native.state_dict().items()}
    reference.train()
    evaluated = reference.evaluate()
    expected = {name: tensor.clone() for name, tensor in native.state_dict().items()}
    native.train().load_state_dict(start)
    pl.seed_everything(args.seed, verbose=False)
    module, data = HFModule(native, args), HFDataModule(args, toy.rows(), toy.rows(9))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, data)
    assert trainer.global_step == 5
    assert float(trainer.callback_metrics["eval_loss"]) == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    for name, tensor in native.state_dict().items():
        assert tensor.equal(expected[name]), name


def test_the_bridge_is_a_lightning_callback():
    assert issubclass(HFBridge, pl.Callback)
