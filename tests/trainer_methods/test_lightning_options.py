"""Each option of `lightning.Trainer` beside the arguments works, or is refused with an alternative."""

from __future__ import annotations

import inspect
import logging
import time
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.profilers import SimpleProfiler

from helpers import toy
from helpers.forking import run_ranks
from helpers.parity.compare import same
from helpers.toy import Classifier, rows
from hf_compat import LightningOptions, Trainer, TrainerCallback, set_seed
from hf_compat.errors import ArgumentError, UnknownArgument, UnsupportedArgument

FLAGS = [name for name in inspect.signature(pl.Trainer.__init__).parameters if name != "self"]


@pytest.fixture
def build(make_args):
    """Make a Trainer with options and 16 samples."""

    def make(options=None, callbacks=None, model=None, **values):
        set_seed(1)
        return Trainer(
            model or Classifier(), make_args(**values), train_dataset=rows(16), eval_dataset=rows(8),
            callbacks=callbacks, lightning_options=options,
        )  # fmt: skip

    return make


class Slow(TrainerCallback):
    """Takes some time for each update."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.seconds)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_option_of_lightning_can_be_set_or_is_refused_by_name(build, flag):
    trainer = build()
    if flag in LightningOptions.__annotations__:
        trainer.lightning_options[flag] = None
        assert flag in trainer.lightning_options
        return
    with pytest.raises(
        UnsupportedArgument, match=rf"`{flag}=1` cannot be set(.|\n)*Hint: its counterpart here is .{{5,}}"
    ):
        trainer.lightning_options = {flag: 1}
    with pytest.raises(UnsupportedArgument, match=f"`{flag}="):
        trainer.lightning_options[flag] = 1
    assert not trainer.lightning_options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"profilers": "simple"}, UnknownArgument, "did you mean `profiler`"),
        ({"profiler": "fast"}, ArgumentError, "`profiler='fast'`"),
        ({"detect_anomaly": "yes"}, ArgumentError, "`detect_anomaly='yes'`"),
        ({"max_time": "1 hour"}, ArgumentError, "`max_time='1 hour'`"),
        ({"max_time": {"fortnights": 1}}, ArgumentError, "`max_time="),
        ({"max_time": 5}, ArgumentError, "`max_time=5`"),
        ({"max_time": timedelta(0)}, ArgumentError, "expected a positive duration"),
        ({"plugins": "bf16-mixed"}, ArgumentError, "expected a CheckpointIO"),
        (["profiler"], ArgumentError, "is not a mapping"),
    ],
)
def test_what_cannot_be_set_is_refused_at_once(build, options, error, words):
    with pytest.raises(error, match=words):
        build(options)
    trainer = build()
    with pytest.raises(error, match=words):
        trainer.lightning_options = options


def test_options_are_checked_however_they_are_set(build):
    trainer = build({"profiler": "simple"})
    for change in (
        lambda: trainer.lightning_options.update(precision="bf16-true"),
        lambda: trainer.lightning_options.setdefault("precision", 16),
        lambda: trainer.lightning_options.__ior__({"precision": 16}),
    ):
        with pytest.raises(UnsupportedArgument, match=r"TrainingArguments\(bf16=True\)"):
            change()
    assert dict(trainer.lightning_options) == {"profiler": "simple"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_option_changes_a_number(build, accumulation):
    found = []
    everything = {"profiler": "simple", "detect_anomaly": True, "benchmark": False, "enable_model_summary": True,
                  "max_time": {"hours": 1}, "plugins": TorchCheckpointIO()}  # fmt: skip
    for options in (None, everything):
        trainer = build(options, gradient_accumulation_steps=accumulation, eval_strategy="epoch", logging_steps=1)
        trainer.train()
        trainer.train()
        timed = ("_runtime", "_per_second", "_time")
        logs = [{k: v for k, v in log.items() if not k.endswith(timed)} for log in trainer.state.log_history]
        found.append((logs, trainer.evaluate()["eval_loss"], trainer.model.state_dict()))
    assert found[0][:2] == found[1][:2] and same(found[0][2], found[1][2])


def test_a_profiler_measures_training_and_an_evaluation_alone(build, tmp_path):
    trainer = build({"profiler": SimpleProfiler(dirpath=tmp_path, filename="spent")})
    trainer.train()
    assert "run_training_batch" in (tmp_path / "fit-spent.txt").read_text()
    trainer.evaluate()
    assert "validation_step" in (tmp_path / "validate-spent.txt").read_text()


def test_an_operation_with_a_bad_gradient_is_named(build):
    class Bad(Classifier):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] + torch.sqrt(self.outer.bias.sum() * 0)}

    with pytest.warns(UserWarning, match="Error detected in"), pytest.raises(RuntimeError, match="MulBackward0"):
        build({"detect_anomaly": True}, model=Bad()).train()


def test_the_other_switches_reach_lightning(build, caplog, capfd):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *rest):
            seen.append(torch.backends.cudnn.benchmark)

    before = torch.backends.cudnn.benchmark
    try:
        with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
            build({"benchmark": True, "enable_model_summary": True}, [Look()]).train()
    finally:
        torch.backends.cudnn.benchmark = before
    assert set(seen) == {True}
    assert "Trainable params" in caplog.text + capfd.readouterr().out  # with rich it is printed


def test_a_plugin_writes_the_files_of_lightnings_checkpoints(build, tmp_path):
    written = []

    class Note(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            written.append(path)
            super().save_checkpoint(checkpoint, path, storage_options)

    saver = ModelCheckpoint(tmp_path / "own", every_n_train_steps=4, save_top_k=-1)
    build({"plugins": [Note()]}, [saver]).train()
    assert len(written) == 2 and all(str(tmp_path / "own") in path for path in written)


def test_a_limit_of_time_ends_after_the_update_under_way(build):
    trainer = build({"max_time": {"seconds": 0.3}}, [Slow(0.1)], num_train_epochs=50)
    began = time.monotonic()
    trainer.train()
    assert 2 <= trainer.state.global_step < 8 and time.monotonic() - began < 5
    assert not any(isinstance(c, Timer) for c in trainer._callbacks.lightning)
    done = trainer.state.global_step
    trainer.train()
    assert trainer.state.global_step >= 2 and done >= 2, "a second run has time of its own"


def test_a_run_that_is_resumed_has_the_time_that_is_left(build, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 50}
    trainer = build({"max_time": {"seconds": 0.4}}, [Slow(0.1)], **saving)
    trainer.train()
    first = trainer.state.global_step
    again = build({"max_time": {"seconds": 0.4}}, [Slow(0.1)], **saving)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == first
    longer = build({"max_time": {"seconds": 60}}, None, **saving | {"num_train_epochs": 3})
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 12


def test_two_processes_end_at_the_same_update(tmp_path, make_args):
    def body(rank):
        args = make_args(num_train_epochs=500, ddp_backend="gloo", save_strategy="no")
        trainer = Trainer(
            toy.Classifier(), args, train_dataset=rows(16), callbacks=[Slow(0.05 * (rank + 1))],
            lightning_options={"max_time": {"seconds": 0.5}, "profiler": "simple"},
        )  # fmt: skip
        trainer.train()
        print(f"STEPS {trainer.state.global_step}")

    ended = run_ranks(tmp_path, body)
    assert [rank.status for rank in ended] == [0, 0], ended[0].said + ended[1].said
    steps = [rank.said.split("STEPS ")[1].split()[0] for rank in ended]
    assert steps[0] == steps[1] and 2 <= int(steps[0]) < 20
