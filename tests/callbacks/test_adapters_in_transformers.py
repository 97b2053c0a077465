"""Lightning's callbacks in transformers' own Trainer either work or are refused. Their states are resumed."""

from __future__ import annotations

import pickle
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch import callbacks as plc

from helpers.toy import Classifier, rows
from hf_compat import LightningCallbackAdapter, TrainerControl, TrainerState, TrainingArguments
from hf_compat.errors import CallbackError, CheckpointError, HfCompatWarning


def trainer(folder, *callbacks, **values):
    settings = {
        "per_device_train_batch_size": 4, "max_steps": 40, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 2, "save_steps": 2, "learning_rate": 0.0, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "restore_callback_states_from_checkpoint": True, **values,
    }  # fmt: skip
    torch.manual_seed(0)
    args = transformers.TrainingArguments(str(folder), **settings)
    given = [c if isinstance(c, transformers.TrainerCallback) else LightningCallbackAdapter(c) for c in callbacks]
    return transformers.Trainer(
        Classifier(dropout=0.0), args, train_dataset=rows(16), eval_dataset=rows(8), callbacks=given
    )


class StopAt(transformers.TrainerCallback):
    def __init__(self, update):
        self.update = update

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.update


def stopping():
    return plc.EarlyStopping("eval_loss", patience=4, verbose=False)


@pytest.mark.parametrize("resumed_at", [None, 2, 6, 8])
def test_an_early_stop_counts_on_after_a_resume(tmp_path, resumed_at):
    """The loss is constant, so the fifth evaluation is the fourth without an improvement."""
    if resumed_at is not None:
        trainer(tmp_path, stopping(), StopAt(resumed_at)).train()
    again = trainer(tmp_path, stopping())
    again.train(resume_from_checkpoint=resumed_at is not None)
    assert again.state.global_step == 10


def test_several_callbacks_have_their_own_states(tmp_path):
    def both():
        return plc.EarlyStopping("eval_loss", patience=9), plc.EarlyStopping("loss", patience=9, strict=False)

    trainer(tmp_path, *both(), StopAt(6)).train()
    first, second = both()
    again = trainer(tmp_path, first, second)
    assert len(again.callback_handler.callbacks) == len({id(c) for c in again.callback_handler.callbacks})
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 20 and first.wait_count == 9


def test_a_state_that_cannot_be_read_is_named():
    with pytest.raises(CheckpointError, match="state of EarlyStopping cannot be read"):
        LightningCallbackAdapter(stopping()).saved = "no such thing"


def test_an_adapter_pickles():
    adapter = LightningCallbackAdapter(plc.LearningRateMonitor())
    again = pickle.loads(pickle.dumps(adapter))
    assert isinstance(again, LightningCallbackAdapter) and isinstance(again.callback, plc.LearningRateMonitor)


class Writer(plc.BasePredictionWriter):
    """Implements the method that Lightning leaves to subclasses."""


WORK = {
    "BaseFinetuning": lambda: type("Fine", (plc.BaseFinetuning,), {
        "freeze_before_training": lambda self, module: self.freeze(module.model.inner),
        "finetune_function": lambda self, module, epoch, optimizer: None})(),
    "Callback": plc.Callback,
    "Checkpoint": plc.Checkpoint,
    "DeviceStatsMonitor": lambda: plc.DeviceStatsMonitor(cpu_stats=False),
    "EarlyStopping": stopping,
    "LambdaCallback": lambda: plc.LambdaCallback(on_train_start=lambda trainer, module: None),
    "LearningRateMonitor": plc.LearningRateMonitor,
    "ModelCheckpoint": lambda: plc.ModelCheckpoint(monitor="eval_loss"),
    "ModelPruning": lambda: plc.ModelPruning("l1_unstructured", amount=0.5),
    "ModelSummary": plc.ModelSummary,
    "RichModelSummary": plc.RichModelSummary,
    "Timer": lambda: plc.Timer(timedelta(hours=1)),
}  # fmt: skip
REFUSED = {
    "BackboneFinetuning": (plc.BackboneFinetuning, "one optimizer for all parameters"),
    "BasePredictionWriter": (lambda: Writer("epoch"), "predict"),
    "BatchSizeFinder": (plc.BatchSizeFinder, "batch size"),
    "EMAWeightAveraging": (plc.EMAWeightAveraging, "inside the loops"),
    "GradientAccumulationScheduler": (lambda: plc.GradientAccumulationScheduler({0: 2}), "gradient_accumulation_steps"),
    "LearningRateFinder": (plc.LearningRateFinder, "learning rate"),
    "OnExceptionCheckpoint": (lambda: plc.OnExceptionCheckpoint("."), "exception"),
    "ProgressBar": (plc.ProgressBar, "follows batches"),
    "RichProgressBar": (plc.RichProgressBar, "follows batches"),
    "SpikeDetection": (plc.SpikeDetection, "does not pass"),
    "StochasticWeightAveraging": (lambda: plc.StochasticWeightAveraging(0.01), "inside the loops"),
    "TQDMProgressBar": (plc.TQDMProgressBar, "follows batches"),
    "ThroughputMonitor": (lambda: plc.ThroughputMonitor(lambda batch: 4), "does not pass"),
    "WeightAveraging": (plc.WeightAveraging, "inside the loops"),
}  # fmt: skip


def test_every_callback_of_lightning_is_here():
    assert {*WORK, *REFUSED} == set(plc.__all__)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(CallbackError, match=rf"{reason}(.|\n)*Hint: \w+"):
        LightningCallbackAdapter(make())


@pytest.mark.parametrize("name", WORK)
@pytest.mark.filterwarnings("ignore:.*flops")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_it_runs_trains_and_resumes(tmp_path, name):
    trainer(tmp_path, WORK[name](), StopAt(4), learning_rate=0.01, max_steps=8).train()
    again = trainer(tmp_path, WORK[name](), learning_rate=0.01, max_steps=8)
    again.train(resume_from_checkpoint=True)
    again.predict(rows(8))
    assert again.state.global_step == 8


def test_what_a_lambda_hears_of_no_event_is_told_of():
    with pytest.warns(HfCompatWarning, match="LambdaCallback: on_exception will not be called"):
        LightningCallbackAdapter(plc.LambdaCallback(on_exception=lambda trainer, module, error: None))


class HearsEverything(plc.Callback):
    """Notes each hook that transformers' events give, with what Lightning's trainer says then."""

    def __init__(self):
        self.heard = []


def _noting(hook):
    def note(self, trainer, pl_module, *more):
        where = "fit" if trainer.training else "validate" if trainer.validating else "test" if trainer.testing else ""
        self.heard.append((hook, where, trainer.current_epoch, trainer.global_step))
        if hook.startswith(("on_validation", "on_test")):
            assert f"{'eval' if 'validation' in hook else 'test'}_loss" in trainer.callback_metrics

    return note


for _hook in (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
    "on_train_epoch_end", "on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_test_start",
    "on_test_epoch_end", "on_test_end", "on_train_end", "on_fit_end", "teardown",
):  # fmt: skip
    setattr(HearsEverything, _hook, _noting(_hook))


def test_each_hook_is_heard_at_its_moment_and_evaluations_alone_too(tmp_path):
    hears = HearsEverything()
    ours = trainer(
        tmp_path, hears, max_steps=-1, num_train_epochs=2, eval_strategy="epoch", save_strategy="no", logging_steps=50
    )
    ours.train_dataset = rows(8)  # two updates an epoch
    ours.train()
    named = [(hook, epoch, step) for hook, where, epoch, step in hears.heard if "validation" not in hook]
    assert named == [
        ("setup", 0, 0), ("on_fit_start", 0, 0), ("on_train_start", 0, 0),
        ("on_train_epoch_start", 0, 0),
        ("on_train_batch_start", 0, 0), ("on_train_batch_end", 0, 1),
        ("on_train_batch_start", 0, 1), ("on_train_batch_end", 0, 2),
        ("on_train_epoch_end", 0, 2),
        ("on_train_epoch_start", 1, 2),
        ("on_train_batch_start", 1, 2), ("on_train_batch_end", 1, 3),
        ("on_train_batch_start", 1, 3), ("on_train_batch_end", 1, 4),
        ("on_train_epoch_end", 1, 4),
        ("on_train_end", 2, 4), ("on_fit_end", 2, 4), ("teardown", 2, 4),
    ]  # fmt: skip
    evaluated = [(where, step) for hook, where, _, step in hears.heard if "validation" in hook]
    assert len(evaluated) == 2 * 3 and set(evaluated) == {("validate", 2), ("validate", 4)}
    assert {where for hook, where, *_ in hears.heard if "validation" not in hook} == {"fit"}


def test_a_prediction_without_a_training_is_heard(tmp_path):
    hears = HearsEverything()
    ours = trainer(tmp_path, hears)
    ours.evaluate()
    assert hears.heard == []
    ours.predict(rows(8))
    ours.predict(rows(8))
    one = [(hook, "test", 0, 0) for hook in ("on_test_start", "on_test_epoch_end", "on_test_end")]
    assert hears.heard == one * 2


class Heard(pl.Callback):
    """Notes its hooks. It may ask for the end of a training at one of them."""

    def __init__(self, stops_at=None):
        self.hooks, self.stops_at = [], stops_at

    def _note(self, hook, trainer):
        self.hooks.append(hook)
        trainer.should_stop |= hook == self.stops_at

    def on_train_start(self, trainer, module):
        self._note("start", trainer)

    def on_validation_end(self, trainer, module):
        self._note("validation", trainer)
        assert trainer.validating and trainer.callback_metrics["eval_loss"] == 0.5

    def on_test_end(self, trainer, module):
        self._note("test", trainer)
        assert trainer.testing

    def load_state_dict(self, state):
        self.hooks.append(f"loads {state['a']}")


@pytest.mark.parametrize("stops_at", [None, "start", "validation"])
@pytest.mark.parametrize("saved", [None, {"a": 1}])
def test_hooks_of_an_adapter_at_events(tmp_path, stops_at, saved):
    adapter = LightningCallbackAdapter(Heard(stops_at))
    adapter._saved = saved
    args, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerControl()
    state, model = TrainerState(max_steps=4, num_train_epochs=1), torch.nn.Linear(1, 1)
    assert adapter.on_evaluate(args, state, control, metrics={"eval_loss": 0.5}) is control
    assert adapter.on_log(args, state, control, logs={"loss": 1.0}) is control and not adapter.callback.hooks
    adapter.on_train_begin(args, state, control, model=model)
    assert control.should_training_stop is (stops_at == "start")
    adapter.on_log(args, state, control, logs={"loss": 1.0})
    assert adapter.trainer.callback_metrics["loss"] == 1.0
    adapter.on_evaluate(args, state, control, metrics={"eval_loss": 0.5})
    assert control.should_training_stop is (stops_at is not None) and adapter.trainer.training
    adapter.on_predict(args, state, control, model=model, metrics=None)
    loads = ["loads 1"] if saved else []
    assert adapter.callback.hooks == [*loads, "start", "validation", "test"]


@pytest.mark.parametrize(
    ("values", "state", "settings"),
    [
        ({}, {"num_train_epochs": 1.5}, {"max_epochs": 2, "check_val_every_n_epoch": 1, "log_every_n_steps": 50}),
        ({"eval_strategy": "steps"}, {"eval_steps": 3}, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
        ({"eval_strategy": "steps"}, {"eval_steps": 0.5}, {"val_check_interval": 1}),
        ({}, {"logging_steps": 7, "num_train_epochs": 0}, {"log_every_n_steps": 7, "max_epochs": -1}),
        ({}, {"logging_steps": 0}, {"log_every_n_steps": 1, "progress_bar_callback": None}),
        ({}, {"logging_steps": 0.25}, {"log_every_n_steps": 1, "checkpoint_callback": None}),
        ({}, {"logging_steps": 1}, {"log_every_n_steps": 1, "num_devices": 1}),
    ],
)
def test_an_adapters_trainer_has_the_settings_of_the_run(tmp_path, values, state, settings):
    adapter = LightningCallbackAdapter(plc.Timer("00:08:00:00"))
    args = TrainingArguments(str(tmp_path), use_cpu=True, **values)
    given = {"logging_steps": 50, "eval_steps": 500} | state
    adapter._make(args, TrainerState(**given), torch.nn.Linear(1, 1), None, None)
    assert {name: getattr(adapter.trainer, name) for name in settings} == settings
    assert [type(callback) for callback in adapter.trainer.callbacks] == [plc.Timer]
