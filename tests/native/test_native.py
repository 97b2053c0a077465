"""HFModule in a trainer of the user's own: what the arguments and the trainer both say has to agree."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, DataError, InertArgumentWarning
from hf_compat.native import module as module_of_native
from hf_compat.native.datamodule import PlainEvaluationBatches, PredictionBatches
from hf_compat.native.loading import LoadableModule
from hf_compat.native.steps import NativeSteps, share_arguments


def fit(tmp_path, trainer=None, **values):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, **values)
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
               "default_root_dir": tmp_path}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", InertArgumentWarning)
        ours = pl.Trainer(**{**options, **(trainer or {})})
        ours.fit(HFModule(Classifier(), args), HFDataModule(args, train_dataset=rows(8)))
    return ours


@pytest.mark.parametrize(
    ("values", "trainer", "shown"),
    [
        ({"num_train_epochs": 5}, {}, ["num_train_epochs=5", "max_epochs=1"]),
        ({"max_steps": 3}, {"max_steps": 4, "max_epochs": -1}, ["max_steps=3", "max_steps=4"]),
        ({"bf16": True}, {}, ["bf16=True", "precision='32-true'"]),
        ({"max_steps": 3}, {}, ["max_steps=3", "max_steps=-1", "`lightning.Trainer(max_steps=3)`"]),
        (
            {"num_train_epochs": 2},
            {"max_epochs": None},
            ["num_train_epochs=2", "max_epochs=1000` of lightning.Trainer (its default)", "max_epochs=2"],
        ),
        ({"num_train_epochs": 2}, {"max_epochs": -1, "max_time": "00:00:00:01"}, ["num_train_epochs=2", "=-1"]),
    ],
)
def test_a_setting_with_two_values_is_an_error_that_shows_both(tmp_path, values, trainer, shown):
    with pytest.raises(ArgumentError) as raised:
        fit(tmp_path, trainer, **values)
    assert all(part in str(raised.value) for part in shown)


def test_updates_end_a_run_whatever_its_epochs(tmp_path):
    assert fit(tmp_path, {"max_steps": 3, "max_epochs": -1}, num_train_epochs=9).global_step == 3


def test_what_agrees_trains(tmp_path):
    assert fit(tmp_path, {"precision": "bf16-mixed"}, bf16=True, num_train_epochs=1).global_step == 2


def test_what_the_trainer_decides_is_warned_about(tmp_path):
    with pytest.raises(InertArgumentWarning, match=r"`save_strategy` \(a ModelCheckpoint\)"):
        fit(tmp_path, save_strategy="epoch")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"async_save": True}, r"`async_save` \(a ModelCheckpoint\)"),
        ({"output_store": "memory://run"}, r"`output_store` \(default_root_dir"),
    ],
)
def test_so_are_arguments_of_ours(tmp_path, values, told):
    with pytest.raises(InertArgumentWarning, match=told):
        fit(tmp_path, **values)


@dataclasses.dataclass
class Wider(TrainingArguments):
    mine: int = 1


@pytest.mark.parametrize(
    ("of_model", "of_data", "rate", "taken"),
    [
        ({"weight_decay": 0.1}, None, None, {}),
        ({"weight_decay": 0.1, "seed": 3}, {}, None, {}),
        ({}, {"seed": 3}, None, {"seed": 3}),
        ({"seed": 3}, {"seed": 3, "weight_decay": 0.0}, None, {}),
        ({}, {"output_dir": "other", "run_name": "r"}, None, {}),
        ({}, {"learning_rate": 0.5, "seed": 3}, 0.1, {"seed": 3, "learning_rate": 0.1}),
        ({"seed": 4}, {"seed": 3}, None, "`seed=3` of HFDataModule's arguments, seed=4 of HFModule's"),
        ({}, {"learning_rate": 0.5}, None, "`learning_rate=0.5`"),
        ({}, {"weight_decay": 0.5, "seed": 3}, 0.1, "`weight_decay=0.5`"),
        ({}, {"mine": 2}, None, "`mine=2`"),
    ],
)
def test_a_module_and_its_data_share_their_arguments(of_model, of_data, rate, taken):
    model = NativeSteps(None, Wider(use_cpu=True, **of_model))
    model.set_rate = rate
    data = NativeSteps(None, None if of_data is None else Wider(use_cpu=True, **of_data))
    before = model.args
    if isinstance(taken, str):
        with pytest.raises(ArgumentError, match=taken):
            share_arguments(model, data)
        assert model.args is before and data.args is not before
    else:
        for _ in range(2):
            share_arguments(model, data)
            changed = {name: value for name, value in vars(model.args).items() if vars(before).get(name) != value}
            assert changed == taken and data.args is model.args and (model.args is before) == (not taken)


class Loads:
    """What a data module of these sets has, for its loaders."""

    steps = SimpleNamespace(
        get_eval_dataloader=lambda part: f"eval {part}", get_test_dataloader=lambda part: f"test {part}"
    )
    _is_running = property(lambda self: self.trainer is not None and self.trainer.is_running)
    _is_asked_to = HFDataModule._is_asked_to

    def __init__(self, trainer):
        self.trainer = trainer

    @contextlib.contextmanager
    def _entered(self):
        yield self.steps


def a_trainer(fn="fit", is_running=True, module=None):
    return SimpleNamespace(state=SimpleNamespace(fn=fn), is_running=is_running, lightning_module=module)


SEVERAL = {"a": 1, 2: "two"}


@pytest.mark.parametrize(
    ("trainer", "command", "dataset", "expected"),
    [
        (None, "validate", None, []),
        (a_trainer("fit"), "validate", None, []),
        (a_trainer("test"), "test", None, None),
        (None, "validate", "set", "eval None"),
        (None, "validate", SEVERAL, {"a": "eval 1", "2": "eval two"}),
        (None, "test", "set", "test set"),
        (None, "predict", SEVERAL, f"test {SEVERAL}"),
        (a_trainer(is_running=False), "test", "set", "test set"),
        (a_trainer(module=pl.LightningModule()), "test", "set", (PlainEvaluationBatches, "test set")),
        (a_trainer(module=object.__new__(HFModule)), "test", "set", (PredictionBatches, "test set")),
        (a_trainer(module=pl.LightningModule()), "validate", {"a": 1}, {"a": (PlainEvaluationBatches, "eval 1")}),
    ],
)
def test_the_loaders_of_a_command(trainer, command, dataset, expected):
    def found():
        return HFDataModule._loaders(Loads(trainer), command, f"{command}_dataset", dataset)

    def shown(loader):
        return (type(loader), loader.loader) if isinstance(loader, PredictionBatches) else loader

    if expected is None:
        with pytest.raises(DataError, match=f"`{command}` needs data"):
            found()
    else:
        loaders = found()
        assert expected == (
            {name: shown(one) for name, one in loaders.items()} if isinstance(loaders, dict) else shown(loaders)
        )


@pytest.mark.parametrize(
    ("is_automatic", "own_step", "returns_loss", "optimizers", "windows", "done"),
    [
        (False, False, False, 1, True, "adopt count fit schedules"),
        (False, False, False, 2, False, "adopt fit schedules"),
        (False, False, False, 0, False, "adopt fit schedules"),
        (False, True, True, 1, False, "adopt fit serve author schedules"),
        (False, True, True, 0, False, "adopt fit serve guarded"),
        (False, True, True, 2, True, "count fit serve guarded"),
        (False, True, False, 1, False, "adopt fit serve guarded"),
        (False, True, False, 0, False, "fit serve guarded"),
        (False, True, False, 2, False, "fit serve guarded"),
        (True, True, False, 1, True, "fit serve schedules"),
        (True, False, False, 1, False, "fit schedules"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_module_connects(monkeypatch, is_automatic, own_step, returns_loss, optimizers, windows, done, is_late):
    class Guarded:
        def __init__(self, module, steps):
            calls.append("guarded")

    def noted(name):
        return lambda *args, **_: calls.append(name)

    calls = []
    for name, does in {
        "refuse_late": noted("late"),
        "take_schedules_read": lambda module: None,
        "optimizers_of": lambda trainer: [0] * optimizers,
        "adopt_optimizer": noted("adopt"),
        "count_updates": noted("count"),
        "unfreeze_optimized": lambda trainer: None,
        "serve_own_step": noted("serve"),
        "AuthorStep": noted("author"),
        "GuardedStep": Guarded,
        "LightningSchedules": noted("schedules"),
    }.items():
        monkeypatch.setattr(module_of_native, name, does)
    monkeypatch.setattr(LoadableModule, "on_fit_start", noted("fit"))
    module = HFModule(Classifier())
    loader = object.__new__(Windows) if windows else None
    for name, value in {
        "trainer": SimpleNamespace(train_dataloader=loader),
        "automatic_optimization": is_automatic,
        "_has_own_step": own_step,
        "_returns_loss_for_updates": returns_loss,
        "stepping": None,
    }.items():
        monkeypatch.setattr(HFModule, name, value)
    module._optimized = frozenset() if is_late else None
    module._connect()
    assert " ".join(calls) == ("late " if is_late else "") + done
    assert ("training_step" in vars(module)) is ("guarded" in done or "author" in done)
