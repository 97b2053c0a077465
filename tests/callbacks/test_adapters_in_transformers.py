"""Lightning's callbacks in transformers' own Trainer either work or are refused. Their states are resumed."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
import torch
import transformers
from lightning.pytorch import callbacks as plc

from helpers.toy import Classifier, rows
from hf_compat import LightningCallbackAdapter
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
