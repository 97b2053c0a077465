"""A LightningModule under `HFCallbackAdapter` and the same model under `Trainer` share run logic and history."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import asdict
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import hf_compat
from helpers.handwritten import ARGS, HandWritten, bare_trainer, data, loaders
from helpers.toy import Classifier, NanAt
from hf_compat import HFCallbackAdapter, TrainingArguments
from hf_compat.callbacks import hf_in_lightning
from hf_compat.callbacks.hf_in_lightning import AdaptedRun, arguments_of
from hf_compat.errors import ArgumentError, CallbackError, MissingMetric
from hf_compat.hf.state import TrainerState

pytestmark = pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")

UPDATES = 18
SPEEDS = ("_runtime", "_per_second")


class Scored(HandWritten):
    """Also logs an accuracy."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        hits = (self.model(**batch)["logits"].argmax(-1) == batch["labels"]).float().mean()
        self.log("val_accuracy", hits, batch_size=len(batch["labels"]))


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def under_trainer(folder, model, callbacks=(), resume=None, **arguments):
    """Train with the Trainer. Return its state."""
    train, evaluation = data()
    trainer = hf_compat.Trainer(
        model,
        hf_compat.TrainingArguments(str(folder), **{**ARGS, **arguments}),
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=accuracy,
        callbacks=[copy.deepcopy(callback) for callback in callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state


def under_adapter(folder, model, callbacks=(), resume=None, module=Scored, trainer=None, **arguments):
    """Train with a Lightning trainer. Return the adapter's state."""
    args = hf_compat.TrainingArguments(str(folder), **{**ARGS, **arguments})
    given = [hf_compat.DefaultFlowCallback(), *(copy.deepcopy(callback) for callback in callbacks)]
    adapter = HFCallbackAdapter(given, args=args)
    options = {"gradient_clip_val": args.max_grad_norm or None, "max_epochs": int(args.num_train_epochs)}
    bare = bare_trainer([adapter], folder, **options, **(trainer or {}))
    bare.fit(module(model, updates=UPDATES), *loaders(), ckpt_path=resume, weights_only=True if resume else None)
    return adapter.state


def assert_same_history(mine, theirs):
    assert len(mine) == len(theirs)
    for own, other in zip(mine, theirs, strict=True):
        assert list(own) == list(other), "the same entries, in the same order"
        for name, value in other.items():
            if name.endswith(SPEEDS):
                assert own[name] >= 0
            else:
                assert own[name] == pytest.approx(value, rel=1e-4, nan_ok=True), name


def nan_at(*passes):
    model = NanAt(passes)
    model.body.dropout.p = 0.0
    return model


def saved(folder):
    return sorted(path.name.removesuffix(".ckpt") for path in folder.glob("checkpoint-*"))


def crossed(tmp_path, model=None, **options):
    """Train one model both ways, compare histories, best evaluation and checkpoints, and return the state."""
    torch.manual_seed(0)
    model = Classifier(dropout=0.0) if model is None else model
    theirs = under_trainer(tmp_path / "trainer", copy.deepcopy(model), **options)
    mine = under_adapter(tmp_path / "adapter", copy.deepcopy(model), **options)
    assert_same_history(mine.log_history, theirs.log_history)
    assert saved(tmp_path / "adapter") == saved(tmp_path / "trainer")
    assert (mine.best_metric is None) == (theirs.best_metric is None)
    assert mine.best_metric is None or mine.best_metric == pytest.approx(theirs.best_metric, rel=1e-5)
    assert mine.best_global_step == theirs.best_global_step
    best = [state.best_model_checkpoint for state in (mine, theirs)]
    assert len({path and path.rpartition("/")[2].removesuffix(".ckpt") for path in best}) == 1
    return mine


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"save_strategy": "no"},
        {"metric_for_best_model": None, "greater_is_better": None},
        {"metric_for_best_model": "accuracy", "greater_is_better": True},
        {"save_total_limit": 2},
        {"save_total_limit": 1},
        {"max_grad_norm": 0.0},
        {"eval_on_start": True},
        {"logging_steps": 5, "eval_steps": 7, "save_steps": 7},
        {"save_strategy": "best"},
        {"save_strategy": "best", "metric_for_best_model": "accuracy", "greater_is_better": True},
        {"save_strategy": "best", "save_total_limit": 1},
    ],
    ids=str,
)
def test_both_tell_the_same(tmp_path, arguments):
    crossed(tmp_path, **arguments)


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite(tmp_path, filtered):
    state = crossed(tmp_path, nan_at(3, 4, 9), logging_nan_inf_filter=filtered)
    told = [log.get("nonfinite_steps") for log in state.log_history if "loss" in log]
    assert told[-1] == (2 if filtered else None)  # updates 2 (both micro-batches) and 5


def test_with_the_strategy_best_an_improvement_is_saved(tmp_path):
    state = crossed(tmp_path, save_strategy="best")
    best, improvements = float("inf"), []
    for log in state.log_history:
        if log.get("eval_loss", best) < best:
            best = log["eval_loss"]
            improvements.append(f"checkpoint-{log['step']}")
    assert 0 < len(improvements) < 9 and saved(tmp_path / "adapter") == sorted(improvements)


def test_at_the_end_a_limit_of_one_leaves_the_best(tmp_path):
    state = crossed(tmp_path, save_total_limit=1, save_steps=2)
    assert saved(tmp_path / "adapter") == [f"checkpoint-{state.best_global_step}"]


@pytest.mark.parametrize("interval", [1.0, 2])  # an epoch, or an update
def test_lightnings_own_interval_saves_the_best_too(tmp_path, interval):
    args = hf_compat.TrainingArguments(
        str(tmp_path), save_strategy="best", eval_strategy="epoch", metric_for_best_model="loss", use_cpu=True
    )
    torch.manual_seed(0)
    adapter = HFCallbackAdapter(hf_compat.TrainerCallback(), args=args)
    trainer = bare_trainer([adapter], tmp_path, log_every_n_steps=1, val_check_interval=interval)
    trainer.fit(HandWritten(Classifier(dropout=0.0), updates=UPDATES), *loaders())
    losses = {log["step"]: log["eval_loss"] for log in adapter.state.log_history if "eval_loss" in log}
    best = [step for step, loss in losses.items() if loss <= min(losses[one] for one in losses if one <= step)]
    assert adapter.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best[-1]}.ckpt")
    assert {*saved(tmp_path)} == {f"checkpoint-{step}" for step in best}


def test_the_best_checkpoint_knows_that_it_is_the_best(tmp_path):
    state = crossed(tmp_path, save_strategy="best")
    written = torch.load(state.best_model_checkpoint, weights_only=True)
    (key,) = [key for key in written["callbacks"] if key.startswith("HFCallbackAdapter")]
    assert written["callbacks"][key]["state"]["best_model_checkpoint"] == state.best_model_checkpoint


class Stop(hf_compat.TrainerCallback):
    """Saves and stops at one update."""

    def __init__(self, update):
        self.update = update

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.update:
            control.should_save = control.should_training_stop = True


def test_a_resumed_run_goes_on_with_its_loss_and_its_mean(tmp_path):
    """Update 6 lies between two logs."""
    torch.manual_seed(0)
    model = nan_at(3)
    options = {"logging_steps": 4, "save_strategy": "no"}
    whole = under_adapter(tmp_path / "whole", copy.deepcopy(model), [Stop(99)], **options)
    under_adapter(tmp_path / "parts", copy.deepcopy(model), [Stop(6)], **options)
    again = copy.deepcopy(model)
    again.steps = set()  # the loss that is not finite is behind it
    resumed = under_adapter(
        tmp_path / "parts", again, [Stop(99)], resume=tmp_path / "parts/checkpoint-6.ckpt", **options
    )
    assert resumed.log_history[-1]["train_loss"] == pytest.approx(whole.log_history[-1]["train_loss"], rel=1e-5)
    assert_same_history(resumed.log_history, whole.log_history)


def test_a_metric_that_no_evaluation_has_is_an_error_as_in_the_trainer(tmp_path):
    with pytest.raises(MissingMetric, match="eval_f1"):
        under_adapter(tmp_path, Classifier(), metric_for_best_model="f1")


def test_an_evaluation_outside_of_training_is_not_the_best(tmp_path):
    args = hf_compat.TrainingArguments(str(tmp_path), metric_for_best_model="loss", use_cpu=True)
    adapter = HFCallbackAdapter(hf_compat.TrainerCallback(), args=args)
    bare_trainer([adapter], tmp_path).validate(HandWritten(Classifier(), 1), loaders()[1], verbose=False)
    assert adapter.state.best_metric is None
    assert "eval_loss" in adapter.state.log_history[0]


def test_files_of_other_names_are_not_rotated(tmp_path):
    (tmp_path / "checkpoint-mine.ckpt").write_text("the user's own")
    under_adapter(tmp_path, Classifier(), save_total_limit=1, save_steps=2, metric_for_best_model=None)
    assert saved(tmp_path) == ["checkpoint-18", "checkpoint-mine"]


def test_what_an_earlier_run_left_is_rotated_before_fresh_checkpoints(tmp_path):
    (tmp_path / "checkpoint-30.ckpt").write_text("of an earlier run")
    under_adapter(tmp_path, Classifier(), save_total_limit=2, save_steps=6, metric_for_best_model=None)
    assert saved(tmp_path) == ["checkpoint-12", "checkpoint-18"]


def test_a_checkpoint_that_cannot_be_removed_does_not_end_a_native_run(tmp_path, caplog):
    (tmp_path / "checkpoint-1.ckpt").mkdir()
    (tmp_path / "checkpoint-1.ckpt" / "mine").write_text("of the user")
    with caplog.at_level("WARNING", logger="hf_compat"):
        under_adapter(tmp_path, Classifier(), save_total_limit=1, save_steps=9, metric_for_best_model=None)
    assert "checkpoint-18" in saved(tmp_path)


def test_a_checkpoint_of_the_first_versions_is_refused(tmp_path):
    run = AdaptedRun(hf_compat.TrainingArguments(str(tmp_path), use_cpu=True), has_own_arguments=True)
    with pytest.raises(hf_compat.errors.CheckpointError, match=r"adapter's state does not fit.*'losses'"):
        run.restore({"state": asdict(TrainerState()), "callbacks": {}, "loss_sum": 1.5, "last_logged": 4})


class Uneven(HandWritten):
    """Takes any batches."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", 1.0, batch_size=1)


@pytest.mark.parametrize("limit", [None, 2])
def test_samples_of_several_loaders_are_counted(tmp_path, limit):
    """Sets of 5 and 4 samples in batches of 2. A short batch counts its own samples."""
    adapter = HFCallbackAdapter(hf_compat.TrainerCallback())
    both = [DataLoader(torch.ones(size, 1), batch_size=2) for size in (5, 4)]
    trainer = bare_trainer([adapter], tmp_path, limit_val_batches=limit)
    trainer.validate(Uneven(Classifier(), 1), both, verbose=False)
    [log] = adapter.state.log_history
    samples, batches = (9, 5) if limit is None else (8, 4)
    assert log["eval_samples_per_second"] / log["eval_steps_per_second"] == pytest.approx(samples / batches, rel=1e-2)
    texts = DataLoader(["a", "b"], batch_size=2)
    trainer.validate(Uneven(Classifier(), 1), texts, verbose=False)
    assert "eval_samples_per_second" not in adapter.state.log_history[-1]


class Quiet(hf_compat.TrainerCallback):
    """Does nothing."""


def test_an_adapter_alone_has_an_empty_state_and_control():
    adapter = HFCallbackAdapter(Quiet())
    flags = adapter.control
    assert (adapter.state.global_step, flags.should_log, flags.should_training_stop) == (0, False, False)


def test_adapters_of_one_trainer_have_one_set_of_arguments(tmp_path):
    def adapters(*rates):
        given = [hf_compat.TrainingArguments(str(tmp_path), **{**ARGS, "learning_rate": rate}) for rate in rates]
        kinds = [type(f"Quiet{place}", (Quiet,), {}) for place in range(len(given))]  # of which the states have names
        return [HFCallbackAdapter(kind(), args=args) for kind, args in zip(kinds, given, strict=True)]

    same = [*adapters(0.1, 0.1), HFCallbackAdapter(Quiet())]
    trainer = bare_trainer(same, tmp_path, max_epochs=1)
    same[0].setup(trainer, HandWritten(Classifier(), updates=1), "fit")
    with pytest.raises(ArgumentError, match="of one Lightning trainer have different `args`"):
        other = adapters(0.1, 0.2)
        other[0].setup(bare_trainer(other, tmp_path, max_epochs=1), HandWritten(Classifier(), updates=1), "fit")


class Asks(hf_compat.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 1


@pytest.mark.parametrize(("strategy", "told"), [
    ("steps", ["`eval_strategy='steps'`, but the Lightning trainer does not validate",
               "`load_best_model_at_end=True` has no effect"]),
    ("no", ["a callback requests an evaluation, but the Lightning trainer has no validation"]),
])  # fmt: skip
def test_evaluations_that_cannot_be_made_are_told_of(tmp_path, strategy, told):
    evaluates = strategy == "steps"
    arguments = {**ARGS, "eval_strategy": strategy, "load_best_model_at_end": evaluates, "save_strategy": strategy}
    args = hf_compat.TrainingArguments(str(tmp_path), **arguments)
    adapter = HFCallbackAdapter(Quiet() if evaluates else Asks(), args=args)
    trainer = bare_trainer([adapter], tmp_path, max_epochs=1, limit_train_batches=4, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(HandWritten(Classifier(), updates=UPDATES), *loaders())
    texts = [text for text in (str(one.message) for one in said) if text.startswith("HFCallbackAdapter: ")]
    assert len(texts) == len(told) and all(part in text for part, text in zip(told, texts, strict=True)), texts
    assert (adapter.state.num_train_epochs, adapter.state.max_steps, adapter.control.should_evaluate) == (1, 2, False)


LIGHTNING = vars(
    SimpleNamespace(
        max_epochs=3, max_steps=-1, check_val_every_n_epoch=1, val_check_interval=1.0, log_every_n_steps=50,
        enable_validation=True, lightning_module=None, accumulate_grad_batches=2, gradient_clip_val=None,
        default_root_dir="out", strategy=SimpleNamespace(root_device=torch.device("cpu")),
        estimated_stepping_batches=7, global_step=2, current_epoch=1, is_global_zero=True, local_rank=0,
    )
)  # fmt: skip
BY_STEPS = {"check_val_every_n_epoch": None}


def module_of(**values):
    return {"lightning_module": SimpleNamespace(args=TrainingArguments("a", use_cpu=True, **values))}


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"num_train_epochs": 3, "eval_strategy": "epoch", "eval_steps": None, "max_steps": -1}),
        ({}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "use_cpu": True, "save_strategy": "no"}),
        ({}, {"metric_for_best_model": "loss", "output_dir": "out", "logging_steps": 50}),
        ({"max_epochs": 1}, {"num_train_epochs": 1}),
        ({"max_epochs": None}, {"num_train_epochs": 10**6}),
        ({"max_epochs": -1}, {"num_train_epochs": 10**6}),
        ({"max_epochs": 0}, {"num_train_epochs": 10**6}),
        ({"val_check_interval": 5}, {"eval_strategy": "epoch", "eval_steps": None}),
        ({**BY_STEPS, "val_check_interval": 5}, {"eval_strategy": "steps", "eval_steps": 5}),
        ({**BY_STEPS, "val_check_interval": 1}, {"eval_strategy": "steps", "eval_steps": 1}),
        ({**BY_STEPS, "val_check_interval": 0.5}, {"eval_strategy": "epoch", "eval_steps": None}),
        ({**BY_STEPS, "val_check_interval": None}, {"eval_strategy": "epoch", "eval_steps": None}),
        ({"enable_validation": False}, {"eval_strategy": "no"}),
        ({"log_every_n_steps": 0}, {"logging_steps": 1}),
        ({"gradient_clip_val": 0.5}, {"max_grad_norm": 0.5}),
        ({"strategy": SimpleNamespace(root_device=torch.device("cuda", 0))}, {"use_cpu": False}),
        (module_of(max_grad_norm=0.25), {"metric_for_best_model": "loss", "max_grad_norm": 0.25}),
        (module_of(metric_for_best_model="f1"), {"metric_for_best_model": "f1", "gradient_accumulation_steps": 1}),
        ({"lightning_module": SimpleNamespace(args="odd")}, {"metric_for_best_model": "loss", "max_grad_norm": 0.0}),
    ],
)
def test_arguments_describe_the_settings_of_a_lightning_trainer(settings, arguments):
    made = arguments_of(SimpleNamespace(**(LIGHTNING | settings)))
    assert {name: getattr(made, name) for name in arguments} == arguments


@pytest.mark.parametrize(
    ("settings", "values", "state", "told"),
    [
        ({}, {}, {"max_steps": 7, "num_train_epochs": 3, "global_step": 2, "epoch": 1.0}, ""),
        ({}, {}, {"is_world_process_zero": True, "is_local_process_zero": True}, ""),
        ({"local_rank": 1, "is_global_zero": False}, {}, {"is_world_process_zero": False}, ""),
        ({"local_rank": 1}, {}, {"is_local_process_zero": False}, ""),
        ({"estimated_stepping_batches": float("inf")}, {}, {"max_steps": sys.maxsize}, ""),
        ({"estimated_stepping_batches": 0}, {}, {"max_steps": sys.maxsize}, ""),
        ({"estimated_stepping_batches": 1}, {}, {"max_steps": 1}, ""),
        ({"max_epochs": None}, {}, {"num_train_epochs": sys.maxsize}, ""),
        ({"max_epochs": -1}, {}, {"num_train_epochs": sys.maxsize}, ""),
        ({"enable_validation": False}, {}, {}, ""),
        ({}, {"eval_strategy": "epoch"}, {}, ""),
        ({"enable_validation": False}, {"eval_strategy": "epoch"}, {}, "the Lightning trainer does not validate"),
        ({}, {"load_best_model_at_end": True, "save_strategy": "best"}, {}, "`load_best_model_at_end=True` has no"),
    ],
)
def test_a_state_begins_as_lightnings_progress_says(monkeypatch, settings, values, state, told):
    warned = []
    monkeypatch.setattr(hf_in_lightning, "warn_once", warned.append)
    run = AdaptedRun(TrainingArguments("a", use_cpu=True, **values), True)
    run._begin(SimpleNamespace(**(LIGHTNING | settings)))
    assert {name: getattr(run.state, name) for name in state} == state
    assert len(warned) == bool(told) and told in "".join(warned)


@pytest.mark.parametrize(
    ("name", "prefix", "found"),
    [
        ("val_loss", "eval", "eval_loss"),
        ("val/loss", "eval", "eval_loss"),
        ("eval_loss", "eval", "eval_loss"),
        ("loss", "eval", "eval_loss"),
        ("val_loss", "test", "test_val_loss"),
        ("test/loss", "test", "test_loss"),
    ],
)
def test_a_modules_metric_has_a_name_of_transformers(name, prefix, found):
    assert hf_in_lightning.hf_metric_name(name, prefix) == found


@pytest.mark.parametrize(
    ("step", "saved", "epoch"), [(2, {"global_step": 2, "epoch": 1.5}, 1.5), (3, {"global_step": 2, "epoch": 1.5}, 0.0)]
)
def test_a_restored_epoch_is_that_of_the_same_update(step, saved, epoch):
    run = AdaptedRun(TrainingArguments("a", use_cpu=True), True)
    run.state.epoch, run.state.global_step = 0.0, step
    state = asdict(TrainerState(**saved, best_metric=0.5))
    run.restore({"state": state, "callbacks": {}, "losses": run.run.losses.state_dict()})
    assert (run.state.epoch, run.state.best_metric, run.state.global_step) == (epoch, 0.5, step)
    run.restore({"state": None, "callbacks": {}})
    assert run.state.best_metric == 0.5


@pytest.mark.parametrize(("batches", "progress"), [(4, 0.5), (float("inf"), 0.0)])
def test_the_progress_of_an_epoch(batches, progress):
    trainer = SimpleNamespace(num_training_batches=batches, train_dataloader=None)
    assert hf_in_lightning._epoch_progress(trainer, {}, 1) == progress


class Noted(hf_compat.TrainerCallback):
    """Notes events, and asks for something at one of them."""

    def __init__(self, at=None, flag=None):
        self.seen, self.at, self.flag = [], at, flag

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def method(args, state, control, **kwargs):
            self.seen.append(name)
            if name == self.at:
                setattr(control, self.flag, True)

        return method


def adapted(noted=None, flags_decide=False, **values):
    """A run of an adapter without a trainer, and the events that it fires."""
    run = AdaptedRun(TrainingArguments("a", use_cpu=True, **values), True)
    noted = noted or Noted()
    run.callback_handler.callbacks[:] = [noted]
    run.flags_decide = flags_decide
    sources = SimpleNamespace(in_updates=False, in_epochs=False, in_windows=False)
    run.run.flag_agreement = SimpleNamespace(sources=sources, agree=lambda control: noted.seen.append("agrees"))
    for name in ("_act_on_flags", "_save", "_obey"):
        setattr(run, name, lambda *given, name=name: noted.seen.append(name))
    return run, noted.seen


@pytest.mark.parametrize(
    ("checks", "function", "cause", "values", "noted", "events"),
    [
        (True, "fit", "interval", {}, None, []),
        (False, "validate", "interval", {}, None, ["on_log", "on_evaluate"]),
        (False, "fit", "start", {}, None, ["on_log", "on_evaluate"]),
        (False, "fit", "flag", {}, None, ["on_log", "on_evaluate", "agrees", "_obey"]),
        (False, "fit", "interval", {}, ("on_evaluate", "should_save"),
         ["on_log", "on_evaluate", "agrees", "_save", "_obey"]),
        (False, "fit", "flag", {}, ("on_evaluate", "should_save"), ["on_log", "on_evaluate", "agrees", "_obey"]),
        (False, "fit", "interval", {"save_strategy": "best", "metric_for_best_model": "loss"}, None,
         ["on_log", "on_evaluate", "agrees", "_save", "_obey"]),
    ],
)  # fmt: skip
def test_an_evaluation_of_lightning_ends(checks, function, cause, values, noted, events):
    run, seen = adapted(Noted(*noted or ()), **values)
    run.evaluation_cause = cause
    run._metrics = lambda trainer, prefix: {"eval_loss": 0.5}
    trainer = SimpleNamespace(sanity_checking=checks, state=SimpleNamespace(fn=function))
    run.on_validation_end(trainer, None)
    assert seen == events


@pytest.mark.parametrize(
    ("has_own", "metrics", "tracks"),
    [(True, {"eval_loss": 0.5}, True), (False, {"eval_loss": 0.5}, True), (False, {"eval_f1": 0.5}, False)],
)
def test_a_default_metric_is_followed_where_it_is_there(has_own, metrics, tracks):
    run, _ = adapted(metric_for_best_model="loss", greater_is_better=False)
    run.has_own_arguments, run._metrics = has_own, lambda trainer, prefix: metrics
    run.on_validation_end(SimpleNamespace(sanity_checking=False, state=SimpleNamespace(fn="fit")), None)
    assert (run.state.best_metric is not None) is tracks


@pytest.mark.parametrize(
    ("checks", "tests", "loader"), [(True, False, None), (False, False, "val"), (False, True, "test")]
)
def test_a_batch_of_an_evaluation_is_counted(checks, tests, loader):
    run, seen = adapted()
    trainer = SimpleNamespace(sanity_checking=checks, testing=tests, test_dataloaders="test", val_dataloaders="val")
    batch, asked = {"x": torch.ones(3)}, run.callback_handler.requestable_kwargs
    asked.update(loss="of before", inputs=None, outputs=None)
    run.on_validation_batch_end(trainer, None, "outputs", batch, 0)
    given = ("of before", None, None) if checks else (None, batch, "outputs")
    assert (asked["loss"], asked["inputs"], asked["outputs"]) == given
    assert (run._evaluated_batches, run._evaluated_samples) == ((0, 0) if checks else (1, 3))
    assert run.callback_handler.eval_dataloader == loader and seen == ["on_prediction_step"] * (not checks)


@pytest.mark.parametrize(
    ("outputs", "step", "told", "automatic", "decide", "interval", "events", "logs"),
    [
        (torch.tensor(0.5), 1, False, True, False, 2,
         ["on_optimizer_step", "on_step_end", "_act_on_flags", "_obey"], False),
        ({"loss": torch.tensor(0.5)}, 2, False, True, False, 2,
         ["on_optimizer_step", "on_step_end", "_act_on_flags", "_obey"], True),
        (None, 2, False, True, True, 2, ["on_optimizer_step", "on_step_end", "_act_on_flags", "_obey"], False),
        (None, 2, False, True, False, 0, ["on_optimizer_step", "on_step_end", "_act_on_flags", "_obey"], False),
        (torch.tensor(0.5), 1, True, True, False, 2, ["on_step_end", "_act_on_flags", "_obey"], False),
        (torch.tensor(0.5), 0, False, True, False, 2, ["on_substep_end", "_obey"], False),
        ({"loss": 0.5}, 0, False, False, False, 2, ["_obey"], False),
    ],
)  # fmt: skip
def test_a_batch_of_lightning_ends(outputs, step, told, automatic, decide, interval, events, logs):
    run, seen = adapted(flags_decide=decide)
    run._is_told, run.in_update, added, ended = told, True, [], []
    run.micro_batch_done = lambda loss, batch: added.append(float(loss))
    trainer = SimpleNamespace(global_step=step, current_epoch=1, num_training_batches=4, train_dataloader=None)
    trainer.log_every_n_steps = interval
    module = SimpleNamespace(automatic_optimization=automatic)
    run.run.losses.end_update = lambda: ended.append(step)
    run.on_train_batch_end(trainer, module, outputs, {"x": torch.ones(3)}, 1)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    assert seen == events and added == [0.5] * (isinstance(loss, torch.Tensor) and not told)
    assert run.control.should_log is logs and run._samples == 3 and run._is_told is False
    made = step > 0
    assert ended == [step] * made
    assert (run.state.global_step, run.state.epoch, run.in_update) == (step, 1.5 if made else 0, not made)


@pytest.mark.parametrize("sees", [True, False])
def test_a_run_leaves_its_trainer(sees):
    run, _ = adapted()
    other, module = object(), hf_compat.HFModule.__new__(hf_compat.HFModule)
    module.__dict__["observer"] = run if sees else other
    trainer = SimpleNamespace(callbacks=[other, run])
    run.teardown(trainer, module, "fit")
    run.teardown(trainer, object(), "fit")
    assert trainer.callbacks == [other] and (module.__dict__["observer"] is other) is not sees


@pytest.mark.parametrize(
    ("stop", "end"),
    [({}, (False, 0)), ({"should_training_stop": True}, (True, 0)), ({"should_epoch_stop": True}, (False, 1))],
)
def test_flags_stop_lightnings_loop(monkeypatch, stop, end):
    ended = []
    monkeypatch.setattr(hf_in_lightning, "end_epoch_after_this_batch", ended.append)
    run = AdaptedRun(TrainingArguments("a", use_cpu=True), True)
    run.control, trainer = hf_compat.TrainerControl(**stop), SimpleNamespace(should_stop=False)
    run._obey(trainer)
    assert (trainer.should_stop, len(ended)) == end


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((), ArgumentError),
        (([],), ArgumentError),
        (([pl.Callback()],), CallbackError),
        ((Noted(),), None),
        (([Noted], Noted()), None),
        (((Noted(),),), None),
    ],
)
def test_what_an_adapter_is_made_of(given, error):
    if error is not None:
        with pytest.raises(error):
            HFCallbackAdapter(*given)
    else:
        assert {type(one) for one in HFCallbackAdapter(*given).handler.callbacks} == {Noted}


@pytest.mark.parametrize(
    ("metric", "found"),
    [(None, None), ("loss", "loss"), ("eval_loss", "eval_loss"), ("val_loss", "eval_loss"), ("val/f1", "eval_f1")],
)
def test_a_metric_by_its_name_in_the_module_is_found(metric, found):
    args = TrainingArguments("a", use_cpu=True, metric_for_best_model=metric)
    given = HFCallbackAdapter(Noted(), args=args)._given_args
    assert given.metric_for_best_model == found and args.metric_for_best_model == metric


def settings(seed=1, log_format="dict"):
    return TrainingArguments("out", use_cpu=True, report_to="none", seed=seed, log_format=log_format)


SAME = settings()


@pytest.mark.parametrize(
    ("given", "differ"),
    [
        ((None, None), False),
        ((SAME, None), False),
        ((None, SAME), False),
        ((SAME, SAME), False),
        ((SAME, settings()), False),
        ((SAME, settings(2)), True),
        ((SAME, None, settings(2)), True),
        ((SAME, settings(), settings(2)), True),
    ],
)
def test_adapters_share_one_run(given, differ):
    class Stand(hf_compat.TrainerCallback):
        pass

    adapters = [HFCallbackAdapter([Stand(), hf_compat.ProgressCallback()], args=args) for args in given]
    adapters[-1].handler.processing_class = "tokenizer"
    first, last, module = pl.Callback(), pl.Callback(), pl.LightningModule()
    trainer = SimpleNamespace(**{**LIGHTNING, "progress_bar_callback": "a bar"})
    trainer.callbacks = [first, *adapters, last]
    if differ:
        with pytest.raises(ArgumentError, match="different `args`"):
            adapters[0].setup(trainer, module, "fit")
        return
    for _ in range(2):  # a fit, and another one
        for adapter in adapters:
            adapter.setup(trainer, module, "fit")
    run = adapters[0]._joined
    assert all(adapter._joined is run for adapter in adapters)
    assert trainer.callbacks == [first, adapters[0], run, *adapters[1:], last]
    assert run.has_own_arguments is any(given) and (run.args in given) is any(given)
    assert run.callback_handler.processing_class == "tokenizer" and run.callback_handler.model is module
    assert run.callback_handler.requestable_kwargs["trainer"] is trainer
    assert [type(one) for one in run.callback_handler.callbacks] == [Stand] * len(given), "one bar only"
    assert run.flags_decide is False


@pytest.mark.parametrize(
    ("event", "is_whole"),
    [("on_step_begin", False), ("on_substep_end", False), ("on_step_end", True), ("on_pre_optimizer_step", True)],
)
def test_an_event_says_whether_the_gradients_are_of_a_whole_update(event, is_whole):
    run, seen = adapted()
    run.timing.sync_gradients = not is_whole
    run.fire(event)
    assert run.timing.sync_gradients is is_whole and seen == [event]


@pytest.mark.parametrize("decide", [True, False])
@pytest.mark.parametrize("sources", [True, False])
def test_an_epoch_of_lightning_ends(decide, sources):
    run, seen = adapted(flags_decide=decide)
    run.run.flag_agreement.sources.in_epochs = sources
    acted = []
    run._act_on_flags = lambda trainer, asks: acted.append(asks)
    trainer = SimpleNamespace(should_stop=True)
    run.on_train_epoch_end(trainer, None)
    assert seen == ["on_epoch_end", "_obey"] and acted == [sources] and trainer.should_stop is not decide


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("best", [None, "checkpoint-2.ckpt"])
@pytest.mark.parametrize("samples", [0, 5])
def test_a_run_of_lightning_ends_with_a_summary(monkeypatch, limit, best, samples):
    run, seen = adapted(save_total_limit=limit)
    told, removed = [], []
    monkeypatch.setattr(hf_in_lightning, "run_summary", lambda *given: told.append(given[1:]) or "the summary")
    monkeypatch.setattr(hf_in_lightning, "remove_surplus", lambda *given: removed.append(given))
    run._log = lambda summary: seen.append(summary)
    run._checkpoints = lambda: {"checkpoint-2.ckpt": 2, "checkpoint-4.ckpt": 4}
    run.run.losses = SimpleNamespace(mean=lambda updates: updates / 10, nonfinite_updates=3)
    run.run.updates_before, run._samples = 1, samples
    run.state.global_step, run.state.total_flos, run.state.best_model_checkpoint = 4, 9, best
    strategy = SimpleNamespace(remove_checkpoint="by Lightning")
    run.on_train_end(SimpleNamespace(world_size=2, strategy=strategy), None)
    assert seen == ["the summary", "on_train_end"] and told == [(samples * 2 or None, 3, 9, 0.4, 3)]
    removal = (["checkpoint-2.ckpt", "checkpoint-4.ckpt"], 1, [best], "by Lightning")
    assert removed == [removal] * (limit == 1 and best is not None)


def test_a_run_begins_outside_of_an_update():
    run = AdaptedRun(SAME, True)
    facts = (run.in_update, run._is_told, run.flags_decide, run.evaluation_cause, run._samples, run._evaluated_batches)
    assert facts == (False, False, False, "interval", 0, 0) and run.has_own_arguments is True
