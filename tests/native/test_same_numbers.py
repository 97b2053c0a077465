"""The same model, data and arguments under `hf_compat.Trainer` and in a Lightning trainer: equal bit for bit."""

from __future__ import annotations

import os
import warnings

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import hf_compat
from helpers.parity.cases import CASES
from helpers.parity.compare import same
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments

# Cases of the parity suite, without what Lightning's trainer decides by itself: when to evaluate, log and save.
NAMES = [
    "baseline", "accumulation", "accumulation_larger_than_epoch", "short_last_window", "max_steps_within_epoch",
    "max_steps_over_epochs", "drop_last", "two_workers", "persistent_workers", "no_clipping", "hard_clipping",
    "label_smoothing", "label_smoothing_causal_lm", "label_smoothing_padded", "stream_without_length",
    "stream_that_ends", "stream_with_leftover_windows", "stream_with_length", "stream_told_its_epoch", "other_seed",
    "data_seed", "sequential", "group_by_length", "batch_rebalance", "random_collator", "random_dataset",
    "keep_all_columns",
    "datasets_with_extra_columns", "full_determinism", "bf16", "bf16_causal_lm", "causal_lm",
    "causal_lm_tokens_of_this_device", "activation_checkpointing", "tuple_outputs", "neftune",
]  # fmt: skip
TIMING = ("eval_strategy", "eval_steps", "logging_steps", "save_strategy", "disable_tqdm", "report_to")
# The Trainer counts the losses of an epoch's incomplete window to the update that it becomes part of.
LEFT_OVER = {"stream_with_leftover_windows"}
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Losses(pl.Callback):
    """Keeps the loss of every update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch.is_complete:
            self.seen.append(float(trainer.callback_metrics["loss"]))


def make_model(case):
    hf_compat.set_seed(3)
    return case["model"]()


def extras(case) -> dict:
    return case["extra"](hf_compat) if "extra" in case else {}


def arguments(folder, case, **values):
    given = {name: value for name, value in case["args"].items() if name not in TIMING}
    return TrainingArguments(str(folder), **{**given, "report_to": "none", **values})


def weights_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def by_trainer(folder, case, evaluates=False):
    model = make_model(case)
    when = {"eval_strategy": "epoch"} if evaluates else {}
    args = arguments(folder, case, logging_steps=1, save_strategy="no", disable_tqdm=True, **when)
    trainer = Trainer(model, args, train_dataset=case["train"](), eval_dataset=case["eval"](), **extras(case))
    trainer.train()
    logs = trainer.state.log_history
    evaluations = [{k: v for k, v in log.items() if k.startswith("eval_")} for log in logs if "eval_loss" in log]
    return [log["loss"] for log in logs if "loss" in log], weights_of(model), evaluations


def lightning_trainer(args, **options):
    limit = {"max_epochs": -1, "max_steps": args.max_steps} if args.max_steps > 0 else {
        "max_epochs": int(args.num_train_epochs)
    }  # fmt: skip
    precision = {"precision": "bf16-mixed"} if args.bf16 else {}
    return pl.Trainer(**{**QUIET, "enable_checkpointing": False, **limit, **precision, **options})


def natively(folder, case, evaluates=False, **options):
    args, model, losses = arguments(folder, case), make_model(case), Losses()
    extra = extras(case)
    module = HFModule(model, args, compute_metrics=extra.pop("compute_metrics", None))
    data = HFDataModule(args, case["train"](), case["eval"]() if evaluates else None, **extra)
    trainer = lightning_trainer(args, callbacks=[losses], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer.fit(module, data)
    return losses.seen, weights_of(model), dict(trainer.callback_metrics)


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_the_same_losses_and_weights(tmp_path, name, monkeypatch):
    for variable in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(variable, "")  # the variables of `full_determinism`, as they were once the test is over
    losses, weights, _ = by_trainer(tmp_path / "trainer", CASES[name])
    native_losses, native_weights, _ = natively(tmp_path / "native", CASES[name])
    if name not in LEFT_OVER:
        assert native_losses == losses
    assert len(losses) == len(native_losses) > 0
    assert same(native_weights, weights)


@pytest.mark.parametrize("name", ["metrics", "bf16", "causal_lm", "random_collator", "tuple_outputs", "drop_last"])
def test_evaluation_gives_the_same_metrics(tmp_path, name):
    _, weights, evaluations = by_trainer(tmp_path / "trainer", CASES[name], evaluates=True)
    _, native_weights, metrics = natively(tmp_path / "native", CASES[name], evaluates=True)
    timed = ("_runtime", "_per_second", "_time")
    expected = {k: v for k, v in evaluations[-1].items() if not k.endswith(timed)}
    assert expected and same(native_weights, weights)
    assert {k: float(metrics[k]) for k in expected} == pytest.approx(expected, rel=1e-6)  # Lightning keeps 32 bits


@pytest.mark.parametrize("name", ["baseline", "accumulation", "random_collator"])
def test_a_run_that_is_resumed_within_an_epoch_ends_as_the_trainers_uninterrupted_one(tmp_path, name, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    case = CASES[name]
    _, weights, _ = by_trainer(tmp_path / "trainer", case)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        args, model = arguments(tmp_path / "native", case), make_model(case)
        data = HFDataModule(args, case["train"](), **extras(case))
        trainer = pl.Trainer(**QUIET, max_epochs=2, callbacks=[saver])
        trainer.fit(HFModule(model, args), data)
        assert same(weights_of(model), weights)
        hf_compat.set_seed(99)
        other = case["model"]()
        data = HFDataModule(args, case["train"](), **extras(case))
        trainer = lightning_trainer(args, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(HFModule(other, args), data, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert same(weights_of(other), weights)
    assert "PL_GLOBAL_SEED" not in os.environ
