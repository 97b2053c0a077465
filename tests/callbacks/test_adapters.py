"""HF callbacks in a plain lightning.Trainer and Lightning callbacks in a real transformers.Trainer: the same trace."""

from __future__ import annotations

import copy
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch import callbacks as plc

import hf_compat
from helpers.handwritten import ARGS, HandWritten, bare_trainer, data, loaders
from helpers.toy import EVENTS, FLAGS, Classifier
from hf_compat import HFCallbackAdapter, LightningCallbackAdapter
from hf_compat.errors import ArgumentError, CallbackError, HfCompatWarning
from hf_compat.hf.state import ExportableState


def tracer(api, trace, logs):
    def record(event):
        def method(self, args, state, control, **kwargs):
            trace.append((event, state.global_step, round(state.epoch, 6), tuple(getattr(control, f) for f in FLAGS)))
            if event == "on_log":
                logs.append({k: v for k, v in kwargs["logs"].items() if not k.endswith(("_runtime", "_per_second"))})

        return method

    return type("Tracer", (api.TrainerCallback,), {event: record(event) for event in EVENTS})()


def run_hf(api, folder, model):
    trace, logs = [], []
    train, evaluation = data()
    trainer = api.Trainer(
        model,
        api.TrainingArguments(str(folder), **ARGS),
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=[api.EarlyStoppingCallback(2), tracer(api, trace, logs)],
    )
    trainer.train()
    return trace, logs, trainer.state


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_the_same_callbacks_give_the_same_trace_in_all_three(tmp_path):
    torch.manual_seed(0)
    model = Classifier(dropout=0.0)
    theirs = run_hf(transformers, tmp_path / "a", copy.deepcopy(model))
    ours = run_hf(hf_compat, tmp_path / "b", copy.deepcopy(model))
    assert ours[0] == theirs[0] and ours[1] == theirs[1]
    stops = [step for event, step, _, flags in theirs[0] if event == "on_step_end"]
    assert stops[-1] < 18, "the early stop is part of the trace"

    trace, logs = [], []
    args = hf_compat.TrainingArguments(str(tmp_path / "c"), **ARGS)
    adapter = HFCallbackAdapter(
        hf_compat.DefaultFlowCallback, hf_compat.EarlyStoppingCallback(2), tracer(hf_compat, trace, logs), args=args
    )
    module = HandWritten(copy.deepcopy(model), updates=18)
    bare_trainer([adapter], tmp_path / "c").fit(module, *loaders())
    assert trace == theirs[0]
    assert len(logs) == len(theirs[1])
    for mine, reference in zip(logs[:-1], theirs[1][:-1], strict=True):
        assert mine.keys() == reference.keys()
        # not the last bit: Lightning divides each micro-batch's loss, and takes a fused norm
        assert mine == pytest.approx(reference, rel=1e-4)
    assert adapter.state.best_metric == pytest.approx(theirs[2].best_metric, rel=1e-5)
    assert adapter.state.best_global_step == theirs[2].best_global_step
    written = {path.name for path in (tmp_path / "c").glob("*.ckpt")}
    folders = {f"{path.name}.ckpt" for path in (tmp_path / "a").glob("checkpoint-*")}
    assert written == folders and written


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_without_the_flow_lightnings_intervals_count(tmp_path):
    trace, logs = [], []
    adapters = [
        HFCallbackAdapter(hf_compat.EarlyStoppingCallback(2)),
        HFCallbackAdapter(tracer(hf_compat, trace, logs)),
    ]
    trainer = bare_trainer(adapters, tmp_path)
    trainer.fit(HandWritten(Classifier(dropout=0.0), updates=18), *loaders())
    evaluations = [(step, epoch) for event, step, epoch, _ in trace if event == "on_evaluate"]
    assert evaluations and [step for step, _ in evaluations] == [3 * (n + 1) for n in range(len(evaluations))]
    assert trainer.current_epoch < 6, "HF's early stopping ended Lightning's run"
    assert logs and all("eval_loss" in log for log in logs if "train_loss" not in log)


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_epoch_stop_and_save_flags_are_obeyed(tmp_path):
    class Skip(hf_compat.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 3 == 1
            control.should_save = state.global_step == 2

    adapter = HFCallbackAdapter(Skip(), args=hf_compat.TrainingArguments(str(tmp_path), use_cpu=True))
    trainer = bare_trainer([adapter], tmp_path, accumulate_grad_batches=1, max_epochs=2, log_every_n_steps=1)
    trainer.fit(HandWritten(Classifier(), updates=12), loaders()[0])
    # epoch 1 ends after update 1, and epoch 2 runs to update 4
    assert adapter.state.global_step == 4 and (tmp_path / "checkpoint-2.ckpt").is_file()


def test_transformers_own_callbacks_ride_too(tmp_path, capsys):
    adapter = HFCallbackAdapter(transformers.EarlyStoppingCallback(1), transformers.PrinterCallback())
    trainer = bare_trainer([adapter], tmp_path, log_every_n_steps=1)
    trainer.fit(HandWritten(Classifier(dropout=0.0), updates=18), *loaders())
    assert trainer.current_epoch < 6
    assert "'eval_loss':" in capsys.readouterr().out


def test_state_of_the_adapter_is_in_lightnings_checkpoints(tmp_path):
    stop = hf_compat.EarlyStoppingCallback(50, early_stopping_threshold=100.0)  # every evaluation counts
    trainer = bare_trainer([HFCallbackAdapter(stop)], tmp_path, max_epochs=3, log_every_n_steps=1)
    trainer.fit(HandWritten(Classifier(dropout=0.0), updates=18), *loaders())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = HFCallbackAdapter(hf_compat.EarlyStoppingCallback(50, early_stopping_threshold=100.0))
    trainer = bare_trainer([again], tmp_path, max_epochs=4, log_every_n_steps=1)
    trainer.fit(HandWritten(Classifier(), updates=18), *loaders(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert [log["step"] for log in again.state.log_history if "eval_loss" in log] == [3, 6, 9, 12]
    counter = again.handler.callbacks[0].early_stopping_patience_counter
    assert counter == stop.early_stopping_patience_counter + 1 > 2


class Counting(hf_compat.TrainerCallback, ExportableState):
    def __init__(self, each=1):
        self.each, self.count = each, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += self.each

    def state(self):
        return {"args": {"each": self.each}, "attributes": {"count": self.count}}


def test_two_callbacks_of_one_class_get_their_own_states(tmp_path):
    trainer = bare_trainer([HFCallbackAdapter(Counting(), Counting(10))], tmp_path, max_epochs=1)
    trainer.fit(HandWritten(Classifier(), 18), *loaders())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = HFCallbackAdapter(Counting(), Counting())
    trainer = bare_trainer([again], tmp_path, max_epochs=2)
    trainer.fit(HandWritten(Classifier(), 18), *loaders(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert [(one.each, one.count) for one in again.handler.callbacks] == [(1, 6), (10, 60)]


def test_an_adapter_without_callbacks_says_so():
    with pytest.raises(ArgumentError, match="has no callback"):
        HFCallbackAdapter()


def transformers_trainer(folder, callbacks, **values):
    train, evaluation = data()
    args = transformers.TrainingArguments(str(folder), **{**ARGS, **values})
    torch.manual_seed(0)
    return transformers.Trainer(
        Classifier(dropout=0.0), args, train_dataset=train, eval_dataset=evaluation, callbacks=callbacks
    )


def test_lightning_callbacks_ride_in_transformers(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((trainer.global_step, trainer.current_epoch))

    keep = plc.ModelCheckpoint(tmp_path / "ckpt", monitor="eval_loss", filename="{step}")
    lightning_callbacks = [plc.EarlyStopping("eval_loss", patience=2), keep, plc.LearningRateMonitor("step"), Look()]
    trainer = transformers_trainer(tmp_path, [LightningCallbackAdapter(rider) for rider in lightning_callbacks])
    trainer.train()
    assert trainer.state.global_step < 18, "Lightning's early stopping ended transformers' run"
    best = min((log for log in trainer.state.log_history if "eval_loss" in log), key=lambda log: log["eval_loss"])
    assert keep.best_model_path.endswith(f"step={best['step']}.ckpt")
    saved = torch.load(keep.best_model_path, weights_only=True)
    assert "model.inner.weight" in saved["state_dict"] and saved["global_step"] == best["step"]
    assert any(name.startswith("lr-") for log in trainer.state.log_history for name in log)
    assert [step for step, _ in seen] == list(range(1, trainer.state.global_step + 1))
    assert seen[:4] == [(1, 0), (2, 0), (3, 0), (4, 1)], "the last step of an epoch is of that epoch"


def test_a_timer_ends_transformers_run(tmp_path):
    timer = plc.Timer(duration=timedelta(seconds=0), interval="step")
    trainer = transformers_trainer(tmp_path, [LightningCallbackAdapter(timer)], eval_strategy="no")
    trainer.train()
    assert trainer.state.global_step <= 2


def test_what_has_no_event_is_refused_or_warned_about():
    for callback in (plc.WeightAveraging(), plc.StochasticWeightAveraging(1e-2), plc.TQDMProgressBar()):
        with pytest.raises(CallbackError, match=r"hf_compat\.Trainer"):
            LightningCallbackAdapter(callback)

    class Backward(pl.Callback):
        def on_after_backward(self, trainer, pl_module): ...

    with pytest.warns(HfCompatWarning, match="on_after_backward will not be called"):
        LightningCallbackAdapter(Backward())
    with pytest.raises(CallbackError, match="not a Lightning callback"):
        LightningCallbackAdapter(hf_compat.EarlyStoppingCallback())


def test_an_adapter_in_a_trainer_of_ours_hears_the_metrics(make_args):
    """The adapter is an ordinary Lightning callback there. It passes on the Trainer's metrics."""
    heard, (samples, _) = [], data()

    class Hears(hf_compat.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            heard.append(metrics)

        def on_predict(self, args, state, control, metrics, **kwargs):
            heard.append(metrics)

    trainer = hf_compat.Trainer(
        Classifier(),
        make_args(max_steps=2, eval_strategy="steps", eval_steps=1),
        train_dataset=samples,
        eval_dataset=samples,
        compute_metrics=lambda p: {"labels": float(p.label_ids.sum()), "texts": "no number"},
        callbacks=[HFCallbackAdapter(Hears())],
    )
    trainer.train()
    told = [trainer.evaluate(), trainer.predict(samples).metrics]
    logged = [log for log in trainer.state.log_history if "eval_loss" in log]
    for metrics, expected in zip(heard, [*logged[:2], *told], strict=True):
        numbers = {n: v for n, v in expected.items() if n.endswith(("_loss", "_labels"))}
        assert len(numbers) == 2 and {name: metrics[name] for name in numbers} == numbers


def fit_natively(callbacks, folder, **values):
    args = hf_compat.TrainingArguments(str(folder), per_device_train_batch_size=8, use_cpu=True, **values)
    train, evaluation = data()
    trainer = bare_trainer(callbacks, folder, max_epochs=3, accumulate_grad_batches=1, gradient_clip_val=None)
    torch.manual_seed(0)
    trainer.fit(hf_compat.HFModule(Classifier(), args), hf_compat.HFDataModule(None, train, evaluation))
    return trainer


@pytest.mark.parametrize("api", [hf_compat, transformers])
def test_hf_callbacks_beside_an_hf_module_need_no_adapter(tmp_path, api):
    bare, adapted, seen = [], [], []

    class Look(api.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append((args.learning_rate, args.num_train_epochs, args.metric_for_best_model))

    fit_natively([tracer(api, bare, []), Look, plc.Timer()], tmp_path / "a", learning_rate=0.25)
    fit_natively([HFCallbackAdapter(tracer(api, adapted, []))], tmp_path / "b", learning_rate=0.25)
    assert bare == adapted and ("on_evaluate" in {event for event, *_ in bare})
    assert seen == [(0.25, 3, "loss")]
    stopped = fit_natively([api.EarlyStoppingCallback(1, 10.0)], tmp_path / "c", learning_rate=0.25)
    assert stopped.current_epoch == 2


def test_what_is_no_callback_at_all_is_named_beside_an_hf_module(tmp_path):
    with pytest.raises(CallbackError, match="3 is not a callback"):
        fit_natively([3], tmp_path)


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_a_metric_may_have_the_modules_own_name(tmp_path):
    args = hf_compat.TrainingArguments(str(tmp_path), metric_for_best_model="val_loss", eval_strategy="epoch")
    trainer = bare_trainer(
        [HFCallbackAdapter(hf_compat.EarlyStoppingCallback(1, 10.0), args=args)], tmp_path, max_epochs=5
    )
    trainer.fit(HandWritten(Classifier(), 15), *loaders())
    assert trainer.current_epoch == 2


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("interval", ["00:00:00:30", timedelta(0), {"minutes": 1}], ids=["text", "timedelta", "dict"])
def test_the_interval_of_validation_may_be_a_time(tmp_path, interval):
    trace = []
    trainer = bare_trainer([HFCallbackAdapter(tracer(hf_compat, trace, []))], tmp_path, max_epochs=1,
                           val_check_interval=interval)  # fmt: skip
    trainer.fit(HandWritten(Classifier(), updates=6), *loaders())
    assert any(event == "on_evaluate" for event, *_ in trace) == (interval == timedelta(0))


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_a_loss_may_have_any_shape_that_lightning_trains_with(tmp_path):
    class Shaped(HandWritten):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).reshape(1, 1)

    found = []
    for kind in (HandWritten, Shaped):
        logs = []
        args = hf_compat.TrainingArguments(str(tmp_path), logging_steps=1, use_cpu=True)
        adapter = HFCallbackAdapter(hf_compat.DefaultFlowCallback, tracer(hf_compat, [], logs), args=args)
        torch.manual_seed(0)
        bare_trainer([adapter], tmp_path, max_epochs=1).fit(kind(Classifier(dropout=0.0), updates=6), *loaders())
        found.append([one["loss"] for one in logs if "loss" in one])
    assert found[0] == found[1] != []


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.filterwarnings("ignore:`parameters` is an empty generator")
@pytest.mark.parametrize("flow", [(), (hf_compat.DefaultFlowCallback,)], ids=["intervals", "flags"])
def test_a_module_may_have_no_optimizer_or_one_without_a_rate(tmp_path, flow):
    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            return closure()

    class Reads(hf_compat.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            seen.append(optimizer is None)

    for configured, has_none in (
        (lambda module: None, True),
        (lambda module: Rateless(module.parameters()), False),
    ):
        seen, logs = [], []
        module = type("Untrained", (HandWritten,), {"configure_optimizers": configured})(Classifier(), updates=6)
        args = hf_compat.TrainingArguments(str(tmp_path), logging_steps=1, save_strategy="no", use_cpu=True)
        adapter = HFCallbackAdapter([Reads(), tracer(hf_compat, [], logs), *flow], args=args)
        bare_trainer([adapter], tmp_path, max_epochs=1).fit(module, *loaders())
        assert seen == [has_none] and logs and not any("learning_rate" in log for log in logs)
