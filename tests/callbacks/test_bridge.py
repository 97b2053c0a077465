"""What the bridge does at a hook, condition by condition, without a run."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from helpers import toy
from hf_compat import TrainerControl, TrainerState
from hf_compat.callbacks.bridge import HFBridge, HFEvents
from hf_compat.errors import DataError

FLAGS = {"should_log": True, "should_evaluate": True, "should_save": True}


class Calls(list):
    """An object whose methods note that they were called."""

    def __init__(self, **values):
        super().__init__()
        self.__dict__ |= values

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.append(name)


def bridge(run=None, **host):
    made = HFBridge.__new__(HFBridge)
    made.host = SimpleNamespace(
        **({"control": TrainerControl(), "state": TrainerState(), "accelerator": SimpleNamespace()} | host)
    )
    made.run, made.requested, made.keep_requested_kwargs = run, set(), lambda: None
    return made


@pytest.mark.parametrize(
    ("epoch", "is_resumed", "is_open", "is_over", "norm", "keeps_flags"),
    [
        (1, True, True, False, 0.5, True),
        (2, True, True, False, None, True),
        (1, False, True, False, None, True),
        (1, True, False, False, None, True),
        (1, True, None, False, None, True),
        (1, False, None, True, None, False),
        (2, False, None, True, None, True),
    ],
)
def test_an_epoch_begins(epoch, is_resumed, is_open, is_over, norm, keeps_flags):
    position = None if is_open is None else SimpleNamespace(is_open=is_open)
    start = SimpleNamespace(epoch=2, position=position, epoch_is_over=is_over)
    resumed = SimpleNamespace(grad_norm=0.5, learning_rate=0.25) if is_resumed else None
    run = SimpleNamespace(start=start, resumed=resumed, grad_norm=1.0, learning_rate=1.0)
    made = bridge(run, control=TrainerControl(**FLAGS))
    made.epoch = epoch
    made.prepare("on_epoch_begin", None, None)
    assert (made.epoch, run.grad_norm, run.learning_rate) == (epoch + 1, norm, norm and norm / 2)
    assert all(getattr(made.host.control, name) is keeps_flags for name in FLAGS)


@pytest.mark.parametrize(("is_complete", "count", "syncs"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_gradients_are_exchanged_in_a_window_of_one_micro_batch(is_complete, count, syncs):
    made = bridge(SimpleNamespace())
    made.prepare("on_step_begin", None, None, SimpleNamespace(is_complete=is_complete, micro_batches=[0] * count))
    assert made.host.accelerator.sync_gradients is syncs


@pytest.mark.parametrize(
    ("saw_data", "data", "updates", "outcome"),
    [
        (None, toy.Stream([]), 0, "goes on"),
        (True, toy.Stream([]), 0, "goes on"),
        (False, toy.Stream([]), 0, "refused"),
        (False, toy.Stream([]), 1, "stops"),
        (False, [], 0, "stops"),
    ],
)
def test_an_epoch_without_samples_ends_the_run(caplog, saw_data, data, updates, outcome):
    windows = None if saw_data is None else SimpleNamespace(saw_data=saw_data)
    made = bridge(
        SimpleNamespace(windows=windows, loader=SimpleNamespace(dataset=data)), state=TrainerState(global_step=updates)
    )
    made.epoch, trainer = 0, SimpleNamespace(should_stop=True)
    if outcome == "refused":
        with pytest.raises(DataError, match="gave no samples"):
            made.prepare("on_epoch_end", trainer, None)
    else:
        with caplog.at_level(logging.WARNING):
            made.prepare("on_epoch_end", trainer, None)
        assert made.host.control.should_training_stop is ("no samples" in caplog.text) is (outcome == "stops")
    assert trainer.should_stop is False


@pytest.mark.parametrize(
    ("event", "requested", "batch", "seen"),
    [
        ("on_prediction_step", {"loss"}, {"x": 1}, {"loss": 2, "inputs": {"x": 1}}),
        ("on_prediction_step", {"loss"}, SimpleNamespace(inputs=3), {"loss": 2, "inputs": 3}),
        ("on_prediction_step", set(), {"x": 1}, {}),
        ("on_save", {"loss"}, {"x": 1}, {}),
    ],
)
def test_a_prediction_is_given_to_callbacks_that_ask_for_it(event, requested, batch, seen):
    made = bridge(callback_handler=SimpleNamespace(requestable_kwargs={}))
    made.requested = requested
    made.prepare(event, None, None, 2, batch)
    assert made.host.callback_handler.requestable_kwargs == seen


@pytest.mark.parametrize(
    ("start", "state", "evaluates", "stops"),
    [
        ({}, {"global_step": 3, "max_steps": 4}, False, (False, False)),
        ({}, {"global_step": 4, "max_steps": 4}, True, (False, True)),
        ({}, {"global_step": 0, "max_steps": 0}, False, (False, False)),
        ({}, {"global_step": 1, "max_steps": 0}, False, (False, True)),
        ({"is_finished": True}, {"global_step": 4, "max_steps": 4}, False, (True, False)),
        ({"stops_at_start": True}, {"global_step": 3, "max_steps": 4}, True, (True, False)),
    ],
)
def test_a_training_starts(monkeypatch, start, state, evaluates, stops):
    monkeypatch.setattr(HFEvents, "on_train_start", lambda *given: None)
    calls = Calls()
    run = SimpleNamespace(start=SimpleNamespace(is_finished="is_finished" in start), trial=None)
    run.stops_at_start, run.ignore_keys_for_eval = "stops_at_start" in start, None
    made = bridge(run, state=TrainerState(**state), args=SimpleNamespace(eval_on_start=evaluates))
    made.host._refuse_late_overrides, made.host._evaluate = calls.refuse, calls.evaluate
    trainer = SimpleNamespace(should_stop=False)
    made.on_train_start(trainer, None)
    assert calls == ["refuse", "evaluate"][: 1 + evaluates]
    assert (trainer.should_stop, made.host.control.should_training_stop) == stops


@pytest.mark.parametrize(
    ("batch", "given", "calls", "stops"),
    [
        ("trained complete", "", ["act"], (False, False)),
        ("complete", "", [], (False, False)),
        ("trained complete", "writer", ["act"], (False, False)),
        ("trained complete", "writer under_way", ["wait", "act"], (False, False)),
        ("trained complete", "writer lost", ["check_folder", "act"], (False, False)),
        ("trained complete", "lost", ["act"], (False, False)),
        ("trained complete", "should_stop", ["act", "leave over=False"], (True, True)),
        ("trained complete", "signal", ["act"], (False, False)),
        ("trained complete", "signal watched", ["act", "signals"], (False, False)),
        ("trained complete", "watched", ["act"], (False, False)),
        ("complete", "signal watched", [], (False, False)),
        ("trained complete", "epoch_stop", ["act", "leave over=True"], (False, False)),
        ("complete", "epoch_stop", ["leave over=True"], (False, False)),
        ("complete", "should_stop", ["rewind", "leave over=False"], (True, True)),
        ("", "should_stop", ["leave over=False"], (True, True)),
        ("complete", "should_stop no_windows", [], (True, True)),
    ],
)
def test_an_update_ends(monkeypatch, batch, given, calls, stops):
    monkeypatch.setattr(HFEvents, "on_train_batch_end", lambda *given: None)
    seen, given = [], given.split()
    sources = SimpleNamespace(in_updates=False, in_windows=False)
    run = SimpleNamespace(losses=Calls(), flag_agreement=SimpleNamespace(sources=sources), windows=None)
    if "no_windows" not in given:
        leave = lambda is_over: seen.append(f"leave over={is_over}")  # noqa: E731
        run.windows = SimpleNamespace(rewind=lambda batch: seen.append("rewind"), leave_epoch=leave)
    signals = SimpleNamespace(are_watched="watched" in given, agree=lambda: "signal" in given)
    made = bridge(run, control=TrainerControl(should_epoch_stop="epoch_stop" in given), stop_signals=signals)
    made._writer = None
    if "writer" in given:
        under_way = 1 if "under_way" in given else None
        made._writer = SimpleNamespace(under_way=under_way, wait=lambda only_if_ended: seen.append("wait"))
    made.saver = SimpleNamespace(has_lost_folder="lost" in given, check_folder=lambda: seen.append("check_folder"))
    made._act_on_flags = lambda trainer, may_differ: seen.append("act")
    made._obey_signals = lambda: seen.append("signals")
    trainer = SimpleNamespace(should_stop="should_stop" in given)
    window = SimpleNamespace(is_trained="trained" in batch, is_complete="complete" in batch)
    made.on_train_batch_end(trainer, None, None, window, 0)
    assert seen == calls and run.losses == ["end_update"] * ("trained" in batch)
    assert (trainer.should_stop, made.host.control.should_training_stop) == stops


@pytest.mark.parametrize(
    ("saved_at", "has_writer", "requeues", "is_first", "calls"),
    [
        (3, False, False, True, ["settle", "obey"]),
        (2, False, False, True, ["save", "on_save", "end", "settle", "obey"]),
        (3, True, False, True, ["wait", "settle", "obey"]),
        (3, False, True, True, ["settle", "requeue", "obey"]),
        (3, False, True, False, ["settle", "obey"]),
    ],
)
def test_a_signal_is_obeyed(monkeypatch, saved_at, has_writer, requeues, is_first, calls):
    seen = []
    monkeypatch.setattr("hf_compat.callbacks.bridge.requeue", lambda folder: seen.append("requeue"))
    signals = SimpleNamespace(asks_for_requeue=requeues, obey=lambda: seen.append("obey"))
    made = bridge(
        SimpleNamespace(trial=None),
        state=TrainerState(global_step=3, is_world_process_zero=is_first),
        stop_signals=signals,
        model=None,
        args=SimpleNamespace(output_dir="out"),
        _save_checkpoint=lambda *given: seen.append("save"),
    )
    made._last_saved, made.fire = saved_at, seen.append
    made._writer = SimpleNamespace(wait=lambda: seen.append("wait")) if has_writer else None
    mirror = SimpleNamespace(settle_now=lambda: seen.append("settle"))
    made.saver = SimpleNamespace(end_of_event=lambda: seen.append("end"), mirror=mirror)
    made._obey_signals()
    assert seen == calls and made.host.control.should_training_stop


@pytest.mark.parametrize(
    ("differs", "flags", "stops_after", "outcome"),
    [
        (False, {}, False, (0, -1, False)),
        (True, {}, False, (1, -1, False)),
        (False, {"should_save": True}, False, (0, 3, False)),
        (False, {}, True, (0, -1, True)),
    ],
)
def test_flags_are_acted_on(differs, flags, stops_after, outcome):
    agreed = []
    losses = SimpleNamespace(since_last_log=0.0)
    run = SimpleNamespace(losses=losses, grad_norm=None, learning_rate=None, trial=None, ignore_keys_for_eval=None)
    run.start_time, run.flag_agreement = 0.0, SimpleNamespace(agree=agreed.append)
    made = bridge(run, control=TrainerControl(**flags), state=TrainerState(global_step=3), model=None)
    trainer = SimpleNamespace(should_stop=False)

    def act(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None):
        trainer.should_stop = stops_after

    made.host._maybe_log_save_evaluate, made.epoch, made._last_saved = act, 0, -1
    made._act_on_flags(trainer, differs)
    assert (len(agreed), made._last_saved, made.host.control.should_training_stop) == outcome


@pytest.mark.parametrize(
    ("watched", "agree", "obeys"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_signal_after_the_last_update_is_obeyed(watched, agree, obeys):
    asked, obeyed = [], []
    signals = SimpleNamespace(are_watched=watched, agree=lambda: asked.append(True) or agree)
    bridge = object.__new__(HFBridge)
    bridge.host = SimpleNamespace(stop_signals=signals)
    bridge._obey_signals = lambda: obeyed.append(True)
    bridge.on_train_end(None, None)
    assert obeyed == [True] * obeys and asked == [True] * watched
