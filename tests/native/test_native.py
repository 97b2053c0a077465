"""HFModule in a trainer of the user's own: what the arguments and the trainer both say has to agree."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.engine.windows import Window, Windows
from hf_compat.errors import ArgumentError, DataError, InertArgumentWarning
from hf_compat.native import datamodule, overrides
from hf_compat.native import module as module_of_native
from hf_compat.native import steps as steps_of_native
from hf_compat.native.datamodule import PlainEvaluationBatches, PredictionBatches
from hf_compat.native.loading import LoadableModule
from hf_compat.native.overrides import GuardedStep
from hf_compat.native.steps import NO_END, NativeEvaluations, NativeSteps, share_arguments


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


@pytest.mark.parametrize(
    ("is_automatic", "args", "facts", "told", "done"),
    [
        (False, {}, {}, ["max_epochs", "max_steps", "precision"], "schedules count1"),
        (False, {}, {"with_data": True}, ["max_epochs", "max_steps", "precision"], "schedules count1"),
        (False, {"gradient_accumulation_steps": 2}, {}, ["max_epochs", "max_steps", "precision"], "schedules count2"),
        (False, {"gradient_accumulation_steps": 2}, {"with_data": True}, None, "schedules count1"),
        (True, {"gradient_accumulation_steps": 2}, {"precision": "odd"}, ["max_epochs", "max_steps"], ""),
        (True, {}, {"accumulate_grad_batches": 2}, None, ""),
        (
            True,
            {"gradient_accumulation_steps": 2},
            {"accumulate_grad_batches": 2},
            "both set the size of an update",
            "",
        ),
        (True, {}, {"fast_dev_run": True}, ["precision"], ""),
        (True, {}, {"max_epochs": -1, "max_steps": 5}, ["max_steps", "precision"], ""),
        (True, {}, {"max_epochs": 3, "max_steps": 5}, ["max_epochs", "max_steps", "precision"], ""),
        (True, {}, {"max_epochs": -1}, ["max_epochs", "max_steps", "precision"], ""),
        (True, {}, {"is_spawned": True}, None, "seed"),
        (True, {"use_liger_kernel": True}, {}, None, "liger"),
    ],
)
def test_how_a_fit_is_set_up(monkeypatch, is_automatic, args, facts, told, done):
    of_trainer = {
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "fast_dev_run": False,
        "max_steps": -1,
        "max_epochs": 3,
    }
    trainer = SimpleNamespace(**{name: facts.get(name, value) for name, value in of_trainer.items()})
    done_here, compared = [], []
    for name, does in {
        "refuse_samples": lambda given: None,
        "given_to_fit": lambda trainer: None,
        "seed_from": lambda args: done_here.append("seed"),
        "check_native": lambda args, told, parts: compared.extend(sorted(told)),
        "check_liger": lambda model, config: None,
        "apply_liger": lambda model, config: done_here.append("liger"),
        "steps_of_data": lambda trainer: object() if facts.get("with_data") else None,
        "count_updates": lambda trainer, batches: done_here.append(f"count{batches}"),
        "begin_hooks": lambda *_: None,
    }.items():
        monkeypatch.setattr(module_of_native, name, does)
    module = HFModule(Classifier().eval(), TrainingArguments(use_cpu=True, **args))
    module._seeded_in += bool(facts.get("is_spawned"))
    done_here.clear()
    monkeypatch.setattr(HFModule, "trainer", trainer)
    monkeypatch.setattr(HFModule, "automatic_optimization", is_automatic)
    monkeypatch.setattr(HFModule, "_read_schedules", lambda self: done_here.append("schedules"))
    if isinstance(told, str):
        with pytest.raises(ArgumentError, match=told):
            module._set_up_fit()
    else:
        module._set_up_fit()
        assert told in (None, compared) and " ".join(done_here) == done and module.model.training


ALL_LOADERS = {"a": "A", "b": "B"}


@pytest.mark.parametrize(
    ("loaders", "facts", "names", "model", "loss_only"),
    [
        ("A", {}, ["eval A"], "compiled", False),
        (["A"], {}, ["eval A"], "compiled", False),
        (["A", "B"], {}, ["eval_0 A", "eval_1 B"], "compiled", False),
        (ALL_LOADERS, {}, ["eval_a A", "eval_b B"], "compiled", False),
        ("A", {"testing": True}, ["test A"], "compiled", False),
        (ALL_LOADERS, {"testing": True, "fn": "test"}, ["test_a A", "test_b B"], "compiled", False),
        ("A", {"fn": "fit"}, ["eval A"], "plain", False),
        ("A", {"loss_only": True}, ["eval A"], "compiled", True),
        ("A", {"metrics": None}, ["eval A"], "compiled", True),
    ],
)
def test_each_loader_has_an_evaluation(monkeypatch, loaders, facts, names, model, loss_only):
    class Run:
        def __init__(self, steps, model, loader, prefix, **options):
            made.append((model, f"{prefix} {loader}", options))

        def finish(self):
            return SimpleNamespace(metrics={f"loss{len(made)}": 1.0} if len(made) > 1 else None)

    made = []
    monkeypatch.setattr(steps_of_native, "EvaluationRun", Run)
    monkeypatch.setattr(steps_of_native, "uncompiled", lambda model: "plain")
    steps = SimpleNamespace(
        model_wrapped=None, compiled=lambda model: "compiled", evaluates_as_seq2seq=False,
        args=SimpleNamespace(prediction_loss_only=facts.get("loss_only", False)),
    )  # fmt: skip
    is_testing = facts.get("testing", False)
    trainer = SimpleNamespace(
        testing=is_testing, state=SimpleNamespace(fn=facts.get("fn", "validate")),
        test_dataloaders=loaders if is_testing else ["other"], val_dataloaders=["other"] if is_testing else loaders,
    )  # fmt: skip
    evaluations = NativeEvaluations(steps, facts.get("metrics", len))
    assert not evaluations.has_run
    runs = [evaluations.run_of(trainer, index) for index, _ in enumerate(names)]
    assert [name for _, name, _ in made] == names and evaluations.run_of(trainer, len(names) - 1) is runs[-1]
    assert {one for one, _, _ in made} == {model} and {one["loss_only"] for _, _, one in made} == {loss_only}
    assert made[0][2]["drops_fillers"] and evaluations.has_run and len(made) == len(names)
    assert evaluations.finish() == ({"loss2": 1.0} if len(made) > 1 else {}) and not evaluations.has_run


@pytest.mark.parametrize(
    ("interval", "frequency", "calls", "epoch", "is_stepped", "left", "told"),
    [
        ("step", 2, 1, 9, False, 1, 0),
        ("step", 2, 2, 0, False, 0, 1),
        ("step", 2, 3, 0, False, 0, 1),
        ("step", 2, 2, 0, True, 0, 0),
        ("step", 2, 1, 0, True, 0, 0),
        ("epoch", 1, 9, 3, False, 1, 0),
        ("epoch", 1, 0, 4, False, 0, 1),
        (None, 1, 0, 4, False, None, 0),
    ],
)
def test_a_schedule_that_nothing_steps_is_told_when_it_is_due(
    interval, frequency, calls, epoch, is_stepped, left, told
):
    tells, guarded = [], object.__new__(GuardedStep)
    config = SimpleNamespace(
        scheduler=SimpleNamespace(last_epoch=5 + is_stepped), interval=interval, frequency=frequency
    )
    guarded.module = SimpleNamespace(trainer=SimpleNamespace(current_epoch=epoch))
    guarded._first_epoch, guarded._calls, guarded._tell_of = 3, calls, tells.append
    guarded._unstepped = None if interval is None else [(config, 5)]
    guarded._tell_of_schedules()
    assert guarded._unstepped == (None if left is None else [(config, 5)] * left) and tells == [config] * told


def windows_of(finite, max_steps, has_trainer=True):
    seen = []
    steps = SimpleNamespace(
        args=SimpleNamespace(max_steps=7), set_initial_training_values=lambda args, loader: seen.append(args.max_steps)
    )
    trainer = SimpleNamespace(max_steps=max_steps) if has_trainer else None
    loader = [1] if finite else iter([1])
    kind = HFDataModule._windows(SimpleNamespace(trainer=trainer), steps, loader, lambda loader, **given: given)
    return seen[0], kind["has_length"], steps.args.max_steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((True, 5), (7, True, 7)),
        ((False, 5), (5, False, 7)),
        ((False, 1), (1, False, 7)),
        ((False, 0), (NO_END, False, 7)),
        ((False, -1), (NO_END, False, 7)),
        ((False, 5, False), (7, False, 7)),
    ],
)
def test_a_stream_ends_with_the_trainers_updates(given, expected):
    assert windows_of(*given) == expected


@pytest.mark.parametrize(
    ("kind", "is_automatic", "is_running", "batches", "told", "expected"),
    [
        (None, True, True, 1, 1, "loader"),
        (HFModule, False, False, 4, 1, "loader"),
        (HFModule, False, True, 4, 1, "Windows 4"),
        (HFModule, True, True, 4, 1, "MicroBatches 1"),
        (pl.LightningModule, True, True, 1, 3, "MicroBatches 1"),
        (pl.LightningModule, True, True, 3, 3, "MicroBatches 1"),
        (pl.LightningModule, True, True, 3, 1, "give `accumulate_grad_batches=3` to lightning.Trainer"),
        (pl.LightningModule, False, True, 3, 1, "leave the argument out, as the module's manual optimization"),
    ],
)
@pytest.mark.parametrize("overfits", [0, 2])
def test_the_training_loader_of_a_module(
    monkeypatch, kind, is_automatic, is_running, batches, told, expected, overfits
):
    class Steps(SimpleNamespace):
        def get_train_dataloader(self):
            strategies.append(self.args.train_sampling_strategy)
            return "loader"

    def windows(steps, loader, kind):
        return SimpleNamespace(shown=f"{kind.__name__} {steps.args.gradient_accumulation_steps}", is_held=None)

    strategies = []
    steps = Steps(args=SimpleNamespace(gradient_accumulation_steps=batches, train_sampling_strategy="random"))
    monkeypatch.setattr(HFModule, "automatic_optimization", is_automatic)
    monkeypatch.setattr(datamodule, "has_length", lambda loader: False)
    module = None if kind is None else object.__new__(kind)
    if kind is pl.LightningModule:
        module._automatic_optimization = is_automatic
    trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=told, overfit_batches=overfits)
    data = Loads(None if kind is None else trainer)
    data.steps, data._windows = steps, windows
    trainer.is_running = is_running
    if "`" in expected or "leave" in expected:
        with pytest.raises(ArgumentError, match=expected):
            HFDataModule.train_dataloader(data)
    else:
        found = HFDataModule.train_dataloader(data)
        assert getattr(found, "shown", found) == expected
        assert getattr(found, "is_held", None) is (True if "Windows" in expected else None)
    assert strategies == ["sequential" if overfits and kind else "random"]
    assert (steps.args.gradient_accumulation_steps, steps.args.train_sampling_strategy) == (batches, "random")


@pytest.mark.parametrize(
    ("kind", "before", "shares", "places", "takes", "removes"),
    [
        (None, None, False, False, None, False),
        (None, "model", False, False, None, True),
        ("no module", None, False, True, None, False),
        (pl.LightningModule, None, False, True, "model None", True),
        (pl.LightningModule, "model", False, True, None, True),
        (pl.LightningModule, "other", False, True, "model None", True),
        (HFModule, None, True, True, "model owner", True),
        (HFModule, "model", True, True, None, True),
    ],
)
def test_a_data_module_follows_its_trainer(monkeypatch, kind, before, shares, places, takes, removes):
    def take_model(model, owner):
        taken.append(f"{model} {owner}")
        steps.model = model

    taken, placed, shared = [], [], []
    monkeypatch.setattr(datamodule, "share_arguments", lambda model, data: shared.append(model))
    monkeypatch.setattr(HFModule, "forward_owner", "owner")
    steps = SimpleNamespace(take_place=placed.append, take_model=take_model, compute_loss_func=None)
    steps.args = SimpleNamespace(remove_unused_columns=True)
    if before is not None:
        steps.model = before
    module = None
    if kind not in (None, "no module"):
        module = object.__new__(kind)
        own = object.__new__(NativeSteps)
        own.compute_loss_func = "function"
        vars(module).update(model="model", steps=own)
    data = SimpleNamespace(steps=steps, trainer=None if kind is None else SimpleNamespace(lightning_module=module))
    with HFDataModule._entered(data) as entered:
        assert entered is steps and steps.args.remove_unused_columns is removes
    assert (bool(shared), bool(placed), taken) == (shares, places, [] if takes is None else [takes])
    assert steps.compute_loss_func == ("function" if takes else None)


@pytest.mark.parametrize(
    ("count", "is_final", "is_trainable", "is_scaled", "loss", "checked"),
    [
        (None, False, False, False, 1.0, 0),
        (None, True, False, False, 1.0, 1),
        (None, True, True, False, 1.0, 0),
        (2, False, False, True, 3.0, 2),
        (2, False, True, False, 1.5, 0),
    ],
)
def test_the_loss_of_a_batch_and_of_a_window(monkeypatch, count, is_final, is_trainable, is_scaled, loss, checked):
    seen = []
    steps = SimpleNamespace(
        check_loss=lambda loss, inputs: seen.append(inputs),
        _is_scaled_for_window=lambda items: is_scaled and items == 7,
    )
    monkeypatch.setattr(
        overrides, "loss_of_micro_batch", lambda steps, inputs, items: torch.tensor(inputs * (items or 7) / 7)
    )
    monkeypatch.setattr(overrides, "is_trainable", lambda loss: is_trainable)
    batch = 1.0 if count is None else Window([1.0, 2.0], 7, True, 1.0)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert overrides.loss_of_batch(steps, batch, is_final).item() == loss
        assert len(seen) == (checked if grad else 0)
