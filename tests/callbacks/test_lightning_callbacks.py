"""Lightning callbacks in a Trainer's list each take effect, and all see a Lightning trainer with true values."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger

import hf_compat
from helpers.toy import EVENTS, Classifier, Stream, rows
from hf_compat import EarlyStoppingCallback, HFDataModule, HFModule, Trainer, TrainerCallback
from hf_compat.callbacks import callback_set
from hf_compat.callbacks.callback_set import SavedCallbackStates, check_lightning_callback
from hf_compat.errors import ArgumentError, CallbackError, HfCompatWarning

TOLD = [event for event in EVENTS if event != "on_init_end"]  # which comes before any run
HOOKS = [
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
]


def hf_tracer(trace, name="hf"):
    def record(event):
        def method(self, args, state, control, **kwargs):
            trace.append(f"{name}.{event}")

        return method

    return type("HFTracer", (TrainerCallback,), {event: record(event) for event in TOLD})()


def pl_tracer(trace, name="pl", hooks=HOOKS):
    def record(hook):
        def method(self, trainer, pl_module, *args, **kwargs):
            trace.append(f"{name}.{hook}")

        return method

    return type("PLTracer", (pl.Callback,), {hook: record(hook) for hook in hooks})()


def make(make_args, callbacks, *, samples=16, model=None, **values):
    torch.manual_seed(0)
    args = make_args(**{"num_train_epochs": 1, "logging_steps": 100, **values})
    return Trainer(
        model or Classifier(dropout=0.0),
        args,
        train_dataset=rows(samples),
        eval_dataset=rows(8, seed=1),
        callbacks=callbacks,
        compute_metrics=lambda p: {"f1": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )


UPDATE = """
    pl.on_train_batch_start hf.on_step_begin
    pl.on_before_backward pl.on_after_backward hf.on_substep_end
    pl.on_before_backward pl.on_after_backward
    pl.on_before_optimizer_step hf.on_pre_optimizer_step
    hf.on_optimizer_step pl.on_before_zero_grad
    pl.on_train_batch_end hf.on_step_end
"""
EVALUATION = """
    pl.on_validation_start pl.on_validation_epoch_start
    pl.on_validation_batch_start pl.on_validation_batch_end hf.on_prediction_step
    pl.on_validation_epoch_end pl.on_validation_end
    hf.on_log hf.on_evaluate
"""


def test_events_and_hooks_interleave_as_documented(make_args):
    """Two micro-batches an update, evaluations after updates 1 and 2, a checkpoint at 2, then an early stop."""
    trace = []

    class StopAtTwo(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer = make(
        make_args,
        [pl_tracer(trace), hf_tracer(trace), StopAtTwo()],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
        max_steps=4,
    )
    trainer.train()
    expected = f"""
    pl.on_fit_start pl.on_train_start hf.on_train_begin
    pl.on_train_epoch_start hf.on_epoch_begin
    {UPDATE}{EVALUATION}
    {UPDATE}{EVALUATION}
    hf.on_save
    pl.on_train_epoch_end hf.on_epoch_end
    pl.on_train_end pl.on_fit_end
    hf.on_log hf.on_train_end
    """
    assert trace == expected.split()


@pytest.mark.parametrize("order", [["h1", "p1", "h2", "p2"], ["p1", "h1", "h2", "p2"], ["p2", "h2", "p1", "h1"]])
def test_both_kinds_are_called_in_the_order_of_the_list(make_args, order):
    trace = []
    hooks = ["on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"]
    made = [hf_tracer(trace, n) if n[0] == "h" else pl_tracer(trace, n, hooks) for n in order]
    make(make_args, made, samples=4).train()
    for hook, event in (
        ("on_train_start", "on_train_begin"),
        ("on_train_batch_start", "on_step_begin"),
        ("on_train_batch_end", "on_step_end"),
        ("on_train_epoch_end", "on_epoch_end"),
    ):
        assert [t.split(".")[0] for t in trace if t.split(".")[1] in (hook, event)] == order


class Seen(pl.Callback):
    def __init__(self):
        self.steps, self.metrics, self.epochs = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)
        self.epochs.append(trainer.current_epoch)
        self.optimizer = trainer.optimizers[0]

    def on_validation_end(self, trainer, pl_module):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def test_the_lightning_trainer_tells_the_truth(make_args):
    seen = Seen()
    trainer = make(
        make_args, [seen], num_train_epochs=2, gradient_accumulation_steps=2, eval_strategy="epoch", logging_steps=1
    )
    trainer.train()
    assert seen.steps == [1, 2, 3, 4] and seen.epochs == [0, 0, 1, 1]
    assert trainer.state.global_step == 4 and trainer.lightning_trainer.global_step == 4
    assert seen.optimizer is trainer.optimizer.optimizer  # HF callbacks see it wrapped
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    for log, metrics in zip(evaluations, seen.metrics, strict=True):
        assert metrics["eval_loss"] == pytest.approx(log["eval_loss"], rel=1e-6)  # Lightning keeps float32
        assert metrics["eval_f1"] == pytest.approx(log["eval_f1"], rel=1e-6)
        assert "loss" in metrics and "learning_rate" in metrics


def test_means_that_a_callback_logs_are_weighted_by_samples_or_as_it_says(make_args):
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("by_samples", float(batch_idx), on_step=False, on_epoch=True)
            pl_module.log("by_hand", float(batch_idx), on_step=False, on_epoch=True, batch_size=1)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("validated", float(batch_idx), on_step=False, on_epoch=True)
            losses.append(float(outputs))

    losses = []
    args = make_args(num_train_epochs=1, eval_strategy="epoch", gradient_accumulation_steps=2)
    trainer = Trainer(Classifier(), args, train_dataset=rows(13), eval_dataset=rows(10), callbacks=[Logs()])
    assert (args.train_batch_size, args.eval_batch_size) == (4, 8)
    trainer.train()
    found = {name: float(value) for name, value in trainer.lightning_trainer.callback_metrics.items()}
    assert found["by_samples"] == pytest.approx((0 * 8 + 1 * 5) / 13) and found["by_hand"] == 0.5
    assert found["validated"] == pytest.approx((0 * 8 + 1 * 2) / 10)
    assert found["eval_loss"] == pytest.approx((losses[0] * 8 + losses[1] * 2) / 10), "a callback is shown the loss"


def test_early_stopping_of_lightning_stops_the_run(make_args):
    stop = plc.EarlyStopping("eval_loss", patience=1, min_delta=100.0)
    trainer = make(make_args, [stop], num_train_epochs=5, eval_strategy="epoch")
    trainer.train()
    assert trainer.state.epoch == 2.0 and trainer.control.should_training_stop


def test_early_stopping_on_the_training_loss_at_the_end_of_an_epoch(make_args):
    stop = plc.EarlyStopping("loss", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    trainer = make(make_args, [stop], num_train_epochs=6, logging_steps=1)
    trainer.train()
    assert trainer.state.epoch == 2.0


def test_model_checkpoint_writes_its_best(make_args, tmp_path):
    keep = plc.ModelCheckpoint(tmp_path / "ckpt", monitor="eval_loss", save_top_k=1, filename="{step}")
    trainer = make(make_args, [keep], num_train_epochs=2, eval_strategy="epoch")
    trainer.train()
    best = min((log for log in trainer.state.log_history if "eval_loss" in log), key=lambda log: log["eval_loss"])
    assert keep.best_model_path.endswith(f"step={best['step']}.ckpt")
    assert float(keep.best_model_score) == pytest.approx(best["eval_loss"], rel=1e-6)
    weights = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    assert "model.inner.weight" in weights


def test_learning_rate_monitor_logs_into_the_history_and_to_reporters(make_args):
    told = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            told.append(dict(logs))

    monitor = plc.LearningRateMonitor(logging_interval="step")
    trainer = make(make_args, [monitor, Reporter()], logging_steps=1)
    trainer.train()
    rates = [log["lr-AdamW/pg1"] for log in trainer.state.log_history if "lr-AdamW/pg1" in log]
    logged = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == logged and len(rates) == 4
    assert [log["lr-AdamW/pg1"] for log in told if "lr-AdamW/pg1" in log] == rates
    assert sum("loss" in log for log in told) == 4  # a rider's log does not take HF's away


def test_learning_rate_monitor_logs_to_a_lightning_logger_once(make_args, tmp_path):
    logger = CSVLogger(tmp_path, name="csv", version=0)
    make(make_args, [plc.LearningRateMonitor("step"), logger], logging_steps=1).train()
    lines = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("lr-AdamW/pg1")
    assert len([line for line in lines[1:] if line.split(",")[column]]) == 4
    assert "train/loss" in lines[0]


def test_device_stats_monitor_logs_statistics(make_args):
    trainer = make(make_args, [plc.DeviceStatsMonitor(cpu_stats=True)], logging_steps=1)
    trainer.train()
    assert any("cpu_percent" in name for log in trainer.state.log_history for name in log)


def test_timer_stops_the_run(make_args):
    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(0.05)

    timer = plc.Timer(duration=timedelta(seconds=0.2), interval="step")
    trainer = make(make_args, [timer, Slow()], num_train_epochs=100)
    trainer.train()
    assert 1 < trainer.state.global_step < 100 and timer.time_elapsed("train") >= 0.2


def test_a_run_whose_time_is_up_already_begins_and_ends(make_args):
    """Lightning skips a fit with `should_stop` set at its start, but HF's callbacks rely on `on_train_begin`."""
    events = []

    class Events(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            events.append("begin")

        def on_step_begin(self, args, state, control, **kwargs):
            events.append("step")

        def on_train_end(self, args, state, control, **kwargs):
            events.append("end")

    class TimeIsUp(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.should_stop = True

    trainer = make(make_args, [TimeIsUp(), Events()])
    trainer.train()
    assert events == ["begin", "end"] and trainer.state.global_step == 0


def test_rich_progress_bar_and_model_summary_show_something(make_args, capsys):
    make(make_args, [plc.RichProgressBar(leave=True), plc.ModelSummary(max_depth=2)]).train()
    shown = capsys.readouterr().out
    assert "Epoch 0" in shown and "4/4" in shown


def test_model_summary_is_printed(make_args, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        make(make_args, [plc.ModelSummary(max_depth=2)]).train()
    assert any("model.inner" in record.message for record in caplog.records)


def test_lambda_callback_is_called(make_args):
    counted = []
    make(make_args, [plc.LambdaCallback(on_train_batch_end=lambda *parts: counted.append(1))]).train()
    assert len(counted) == 4


@pytest.mark.parametrize("averaging", [lambda: plc.WeightAveraging(), lambda: plc.EMAWeightAveraging(decay=0.5)])
def test_averaged_weights_are_evaluated_saved_and_left(make_args, tmp_path, averaging):
    class Keep(TrainerCallback):
        def __init__(self):
            self.weights = []

        def on_step_end(self, args, state, control, model, **kwargs):
            self.weights.append(model.outer.bias.detach().clone())

    keep, callback = Keep(), averaging()
    trainer = make(
        make_args, [callback, keep], eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4
    )
    trainer.train()
    if isinstance(callback, plc.EMAWeightAveraging):
        expected = keep.weights[0]
        for weights in keep.weights[1:]:
            expected = 0.5 * expected + 0.5 * weights
    else:
        expected = torch.stack(keep.weights).mean(0)
    assert torch.allclose(trainer.model.outer.bias, expected, atol=1e-6)
    assert not torch.equal(trainer.model.outer.bias, keep.weights[-1])
    from safetensors.torch import load_file

    saved = load_file(trainer.args.output_dir + "/checkpoint-4/model.safetensors")
    assert torch.equal(saved["outer.bias"], trainer.model.outer.bias)
    evaluated = trainer.state.log_history[-2]["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == evaluated


def test_averages_go_on_after_a_resume_bit_for_bit(make_args, tmp_path):
    def run(folder, resume=None):
        trainer = make(
            make_args,
            [plc.EMAWeightAveraging(decay=0.7)],
            output_dir=str(folder),
            num_train_epochs=3,
            save_strategy="steps",
            save_steps=5,
            model=Classifier(dropout=0.2),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-5"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_stochastic_weight_averaging_changes_rates_and_weights(make_args):
    def run(callbacks):
        trainer = make(make_args, callbacks, num_train_epochs=4, logging_steps=4)
        trainer.train()
        return trainer

    plain, averaged = run([]), run([plc.StochasticWeightAveraging(swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=1)])
    assert not torch.equal(plain.model.outer.bias, averaged.model.outer.bias)
    rates = [log["learning_rate"] for log in averaged.state.log_history if "learning_rate" in log]
    assert rates[-1] == pytest.approx(0.5) and averaged.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("callback", "hint"),
    [
        (lambda: plc.GradientAccumulationScheduler({0: 2}), "gradient_accumulation_steps"),
        (lambda: plc.BatchSizeFinder(), "auto_find_batch_size=True"),
        (lambda: plc.LearningRateFinder(), "max_steps=100"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(make_args, callback, hint):
    with pytest.raises(CallbackError, match=hint):
        make(make_args, [callback()])


def test_averaging_that_needs_another_epoch_is_refused(make_args):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    with pytest.raises(CallbackError, match="WeightAveraging"):
        make(make_args, [plc.StochasticWeightAveraging(1e-2)], model=model)


def test_it_is_refused_beside_updates_of_the_authors_own_too(make_args):
    class Manual(HFModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    module = Manual(Classifier(), make_args())
    module.beside = torch.nn.BatchNorm1d(8)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[plc.StochasticWeightAveraging(1e-2)],
    )  # fmt: skip
    with pytest.raises(CallbackError, match="must not train in it"):
        trainer.fit(module, HFDataModule(None, rows(16)))


def test_hooks_that_never_come_are_warned_about(make_args):
    with pytest.warns(HfCompatWarning, match="on_predict_start will not be called"):
        make(make_args, [plc.LambdaCallback(on_predict_start=lambda *parts: None)])


def test_a_mixture_works_together(make_args, tmp_path):
    """The callbacks of the issue's list, in one run."""
    keep = plc.ModelCheckpoint(tmp_path / "ckpt", monitor="eval_f1", mode="max")
    trainer = make(
        make_args,
        [
            EarlyStoppingCallback(2),
            plc.LearningRateMonitor(),
            keep,
            plc.EarlyStopping("eval_loss", patience=9),
            plc.Timer(duration=timedelta(minutes=5)),
            plc.ModelSummary(),
            plc.EMAWeightAveraging(decay=0.9),
        ],
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        logging_steps=1,
    )
    trainer.train()
    assert keep.best_model_path and trainer.state.best_metric == pytest.approx(float(keep.best_model_score))


def test_a_callback_that_names_them_sees_the_inside(make_args):
    seen = []

    class Curious(TrainerCallback):
        def on_step_end(self, args, state, control, trainer, loss, inputs, outputs, **kwargs):
            seen.append((trainer, loss, inputs, outputs, sorted(kwargs)))

    class Plain(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(sorted(kwargs))

    trainer = make(make_args, [Curious(), Plain()], samples=4, logging_steps=1)
    trainer.train()
    (given, loss, inputs, outputs, rest), plain = seen
    assert given is trainer and rest == plain and not {"trainer", "loss", "inputs", "outputs"} & set(plain)
    assert float(loss) == pytest.approx(trainer.state.log_history[0]["loss"]) and not loss.requires_grad
    assert inputs["x"].shape == (4, 8) and outputs["logits"].shape == (4, 3)
    assert not outputs["logits"].requires_grad and not trainer.model._forward_hooks
    assert trainer.callback_handler.requestable_kwargs["outputs"] is None, "they take memory"


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("data", ["map", "stream"])
def test_a_resumed_epoch_numbers_its_batches_as_the_whole_one(make_args, tmp_path, data, step):
    def run(resume_from=None):
        seen = []
        see = plc.LambdaCallback(
            on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(
                (trainer.global_step, trainer.current_epoch, index, trainer.is_last_batch)
            ),
            on_train_epoch_end=lambda trainer, module: seen.append((trainer.current_epoch, trainer.is_last_batch)),
        )
        length = {"num_train_epochs": 2} if data == "map" else {"max_steps": 6}
        args = make_args(**length, save_strategy="steps", save_steps=1, gradient_accumulation_steps=2)
        samples = rows(24) if data == "map" else Stream(rows(24))
        Trainer(Classifier(), args, train_dataset=samples, callbacks=[see]).train(resume_from_checkpoint=resume_from)
        return seen

    whole = run()
    resumed = run(str(tmp_path / "out" / f"checkpoint-{step}"))
    start = next(place for place, entry in enumerate(whole) if len(entry) == 4 and entry[0] == step + 1)
    assert resumed[-len(whole[start:]) :] == whole[start:] and len([e for e in resumed if len(e) == 4]) == 6 - step


class Counts(pl.Callback):
    """A callback of the user's that says what of it is kept."""

    def __init__(self, shared):
        self.count, self.shared, self.seen = 0, shared, [0]

    def state_dict(self):
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state):
        self.count, self.seen = state["count"], state["seen"]


class Stops(pl.callbacks.EarlyStopping):
    def __init__(self, shared):
        super().__init__("eval_loss")
        self.shared, self.own = shared, "first"


def test_callbacks_begin_each_trial_as_the_first(tmp_path):
    shared = ["the script's"]
    counts, stops, silent = Counts(shared), Stops(shared), pl.Callback()
    silent.value = 1
    lightnings = pl.callbacks.ModelCheckpoint(tmp_path)
    saved = SavedCallbackStates([counts, stops, silent, lightnings])
    for _ in range(2):
        counts.count, counts.seen, silent.value, stops.own = 5, counts.seen, 2, "changed"
        counts.seen.append(1)
        stops.wait_count += 3
        stops.best_score += 1
        lightnings.best_k_models["a"] = 1
        shared.append("by a trial")
        saved.restore()
        assert (counts.count, counts.seen, silent.value) == (0, [0], 2)
        assert (stops.wait_count, stops.own, lightnings.best_k_models) == (0, "first", {})
        assert torch.isinf(stops.best_score) and stops.shared is counts.shared is shared
    assert len(shared) == 3


def test_a_class_of_both_families_is_refused():
    class Both(pl.Callback, hf_compat.TrainerCallback):
        pass

    with pytest.raises(CallbackError, match="Both is both a Lightning and an HF callback"):
        check_lightning_callback(Both(), Classifier())


def test_a_tracker_is_the_loggers_experiment_in_the_first_process(make_args):
    class Tracks(hf_compat.TrainerCallback):
        def experiment(self, args, state):
            return args, state

    trainer = Trainer(Classifier(), make_args(), train_dataset=rows(4))
    assert trainer._callbacks.loggers()[-1].experiment is None
    trainer.add_callback(Tracks())
    trainer.state.is_world_process_zero = True
    assert trainer._callbacks.loggers()[-1].experiment == (trainer.args, trainer.state)
    trainer.state.is_world_process_zero = False
    assert type(trainer._callbacks.loggers()[-1].experiment).__name__ == "_DummyExperiment"


def taking(name):
    return type("Taking", (pl.Callback,), {name: lambda self, *given: None})()


@pytest.mark.parametrize(
    ("callback", "hooks", "found"),
    [
        (taking("on_predict_start"), ["on_predict_start", "on_fit_start"], ["on_predict_start"]),
        (plc.EarlyStopping("a"), ["on_validation_end"], []),  # Lightning's own
        (plc.LambdaCallback(on_predict_start=print), ["on_predict_start"], ["on_predict_start"]),
        (pl.Callback(), ["on_predict_start"], []),
    ],
)
def test_the_hooks_that_a_user_wrote(callback, hooks, found):
    assert callback_set.hooks_of_user(callback, hooks) == found


def holding(**parts):
    model = torch.nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


@pytest.mark.parametrize(
    ("model", "trained", "refused"),
    [
        (holding(), holding(), True),
        (holding(backbone=torch.nn.Linear(1, 1)), holding(), False),
        (holding(base_model=torch.nn.Linear(1, 1)), holding(), False),
        (holding(), holding(backbone=torch.nn.Linear(1, 1)), False),
        (holding(backbone=3), holding(backbone=3), True),
    ],
)
def test_a_backbone_is_needed_where_one_is_unfrozen(model, trained, refused):
    callback_set.check_model_of(plc.EarlyStopping("a"), model, trained)
    if refused:
        with pytest.raises(CallbackError, match="has none"):
            callback_set.check_model_of(plc.BackboneFinetuning(), model, trained)
    else:
        callback_set.check_model_of(plc.BackboneFinetuning(), model, trained)
    own = torch.nn.Module()
    object.__setattr__(own, "base_model", own)  # a model of transformers without a head
    assert callback_set.backbone_of(own) is None


@pytest.mark.parametrize(
    ("callback", "norms", "refused"),
    [
        (plc.StochasticWeightAveraging(0.1), True, True),
        (plc.StochasticWeightAveraging(0.1), False, False),
        (plc.EarlyStopping("a"), True, False),
    ],
)
def test_an_average_of_a_batch_norm_is_refused(callback, norms, refused):
    model = holding(norm=torch.nn.BatchNorm1d(2) if norms else torch.nn.LayerNorm(2))
    try:
        callback_set.check_averaging_of(callback, model)
        assert not refused
    except CallbackError:
        assert refused


@pytest.mark.parametrize("exists", [True, False])
def test_a_checkpoint_of_an_exception_is_gone_on_from(tmp_path, exists):
    callback = plc.OnExceptionCheckpoint(tmp_path)
    if exists:
        Path(callback.ckpt_path).write_text("")
    held = callback_set.CallbackSet(None)
    held.lightning = [plc.EarlyStopping("a"), callback]
    assert held.checkpoint_of_exception() == (callback.ckpt_path if exists else None)


class Writer(TrainerCallback):
    def experiment(self, args, state):
        return "writer"


@pytest.mark.parametrize(
    ("callbacks", "is_first", "found"), [([Writer()], True, "writer"), ([], True, None), ([], False, None)]
)
def test_the_experiment_is_the_first_trackers(callbacks, is_first, found):
    host = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[object(), *callbacks]), _log_of_lightning=print)
    host.args, host.state = None, SimpleNamespace(is_world_process_zero=is_first)
    assert callback_set.CallbackSet(host).loggers()[-1].experiment == found


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("x", ArgumentError),
        ({1}, ArgumentError),
        ([object()], CallbackError),
        ((EarlyStoppingCallback(2),), None),
        (None, None),
    ],
)
def test_callbacks_are_a_list(make_args, given, error):
    if error is None:
        assert len(Trainer(Classifier(), make_args(), callbacks=given).callback_handler.callbacks) >= 2
    else:
        with pytest.raises(error):
            Trainer(Classifier(), make_args(), callbacks=given)


def test_containers_of_lightnings_own_class_are_restored_and_those_of_a_subclass_are_not():
    own, further = plc.LearningRateMonitor(), type("Further", (plc.LearningRateMonitor,), {})()
    for callback in (own, further):
        callback.lrs = {"a": [1]}
    saved = SavedCallbackStates([own, further])
    for callback in (own, further):
        callback.lrs["b"], callback.logging_interval = [2], "step"
    saved.restore()
    assert (own.lrs, further.lrs) == ({"a": [1]}, {"a": [1], "b": [2]})
    assert own.logging_interval is further.logging_interval is None
