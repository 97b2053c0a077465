"""How the handler calls callbacks: what a method is given, what it may return, which ones are called."""

from itertools import product
from types import SimpleNamespace

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from hf_compat.errors import CallbackError, UnmetRequirement
from hf_compat.hf.callbacks import EVENTS, REQUESTABLE_KWARGS, CallbackHandler
from hf_compat.hf.state import ExportableState


class Recorder:
    """No subclass of ours: one event, and only some of the keywords."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model, loss):
        self.seen.append((model, loss))


class Greedy(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = set(kwargs)


class Answers(TrainerCallback):
    def __init__(self, answer):
        self.answer = answer

    def on_step_end(self, args, state, control, **kwargs):
        return self.answer


def handler(*callbacks):
    made = CallbackHandler(callbacks, "model", "tokenizer", None, None)
    made.requestable_kwargs.update(loss=0.5)
    return made


def fire(made, args):
    return made.on_step_end(args, TrainerState(), TrainerControl())


def test_a_method_is_given_what_its_signature_names(make_args):
    recorder, greedy = Recorder(), Greedy()
    made = handler(recorder, greedy)
    fire(made, make_args())
    assert recorder.seen == [("model", 0.5)]
    assert {"model", "tokenizer", "processing_class"} <= greedy.seen and not greedy.seen & set(REQUESTABLE_KWARGS)
    assert made.requested_kwargs() == {"loss"}


def test_a_value_that_an_event_offers_goes_to_methods_that_name_it(make_args, monkeypatch):
    class Names(TrainerCallback):
        def on_step_end(self, args, state, control, seconds=None, **kwargs):
            heard.append((seconds, "seconds" in kwargs, "more" in kwargs))

    class Greedy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            heard.append((None, "seconds" in kwargs, "more" in kwargs))

    heard = []
    monkeypatch.setitem(EVENTS, "on_step_end", EVENTS["on_step_end"]._replace(offers=("seconds",)))
    made = handler(Names(), Greedy(), Names())
    made.on_step_end(make_args(), TrainerState(), TrainerControl(), seconds=0.5, more=1)
    fire(made, make_args())
    assert heard == [(0.5, False, True), (None, False, True), (0.5, False, True), *[(None, False, False)] * 3]


def test_only_active_callbacks_are_called(make_args):
    first, second = Recorder(), Recorder()
    made = handler(first)
    made.callbacks.append(second)
    made.active_ids = frozenset({id(second)})
    fire(made, make_args())
    assert (len(first.seen), len(second.seen)) == (0, 1)


def test_flags_may_be_returned_as_a_mapping_or_a_control(make_args):
    assert fire(handler(Answers({"should_save": 1})), make_args()).should_save is True
    theirs = transformers.TrainerControl(should_log=True)
    assert fire(handler(Answers(theirs)), make_args()) is theirs


@pytest.mark.parametrize("answer, text", [({"should_stop": True}, "'should_stop'"), (True, "returned True")])
def test_any_other_answer_is_refused(make_args, answer, text):
    with pytest.raises(CallbackError, match=rf"Answers.on_step_end returned.*{text}|{text}"):
        fire(handler(Answers(answer)), make_args())


def test_callbacks_are_added_found_and_removed():
    made = handler(Greedy, Recorder())
    assert made.callback_list == "Greedy\nRecorder"
    assert isinstance(made.pop_callback(Greedy), Greedy) and made.pop_callback(Greedy) is None
    made.remove_callback(Recorder)
    made.remove_callback(Recorder)  # as upstream, of a class there may be none
    kept = Recorder()
    made.add_callback(kept)
    made.remove_callback(kept)
    assert made.callbacks == []
    with pytest.raises(ValueError, match="not among"):
        made.remove_callback(Recorder())
    with pytest.raises(CallbackError, match="not a callback"):
        made.add_callback(object())


def test_the_events_are_transformers():
    theirs = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert theirs <= set(EVENTS)


def test_a_handler_without_the_default_flow_says_what_is_missing(caplog):
    handler(Recorder(), transformers.DefaultFlowCallback())
    assert caplog.messages == []
    handler(Recorder())
    assert "no DefaultFlowCallback" in caplog.text and "Recorder" in caplog.text


def flags_of(control):
    return [getattr(control, name) for name in toy.FLAGS]


@pytest.mark.parametrize("name", ["_new_training", "_new_epoch", "_new_step"])
def test_flags_are_cleared_as_upstream(name):
    found = []
    for api in (transformers, hf_compat):
        control = api.TrainerControl(*[True] * 5)
        getattr(control, name)()
        found.append(flags_of(control))
    assert found[0] == found[1] and not all(found[1])


def test_a_state_that_is_not_exported_says_so():
    class Silent(ExportableState):
        pass

    with pytest.raises(NotImplementedError, match=r"Silent inherits ExportableState and needs a `state\(\)` method"):
        Silent().state()


class Bar:
    """Remembers what a bar of progress is told."""

    made = []

    def __init__(self, **options):
        self.said = [options]
        self.made.append(self)

    def update(self, count):
        self.said.append(count)

    def write(self, text):
        self.said.append(text)

    def close(self):
        self.said.append("closed")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_bars_are_moved_by_the_first_process(make_args, monkeypatch, is_first, trains):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr("hf_compat.hf.callbacks.progress_bar", Bar)
    progress, args, control = ProgressCallback(max_str_len=3), make_args(), TrainerControl()
    state = TrainerState(max_steps=9, global_step=2, is_world_process_zero=is_first)
    if trains:
        progress.on_train_begin(args, state, control)
        state.global_step = 5
        progress.on_step_end(args, state, control)
    for loader in ([1, 2, 3], iter([1, 2])):
        progress.on_prediction_step(args, state, control, eval_dataloader=loader)
        progress.on_prediction_step(args, state, control, eval_dataloader=loader)
        progress.on_evaluate(args, state, control)
    progress.on_log(args, state, control, logs={"a": "123", "b": "1234", "c": 1 / 3, "total_flos": 4, "d": 5})
    progress.on_train_end(args, state, control)
    logs = "{'a': '123', 'b': '[4 characters; `max_str_len=3` hides them]', 'c': '0.3333', 'd': 5}"
    training = [{"total": 9, "initial": 2, "leave": True}, 3, logs, "closed"]
    prediction = [{"total": 3, "initial": 0, "leave": not trains}, 1, 1, "closed"]
    assert [bar.said for bar in Bar.made] == ([training] * trains + [prediction]) * is_first


@pytest.mark.parametrize(("greater", "values", "counts"), [
    (True, [1.0, 1.0, 1.2, 1.25, float("nan"), 3.0], [0, 1, 0, 1, 2, 0]),
    (False, [1.0, 1.1, 0.9, 0.75, 0.0, 2.0], [0, 1, 2, 0, 0, 1]),
])  # fmt: skip
def test_early_stopping_counts_as_upstream(tmp_path, greater, values, counts):
    for api in (transformers, hf_compat):
        same = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_steps": 1}
        args = api.TrainingArguments(
            str(tmp_path), use_cpu=True, metric_for_best_model="score", greater_is_better=greater, **same
        )
        callback, state, control = api.EarlyStoppingCallback(3, 0.125), api.TrainerState(), api.TrainerControl()
        callback.on_train_begin(args, state, control)
        found = []
        for value in values:
            callback.on_evaluate(args, state, control, metrics={"eval_score": value})
            found.append(callback.early_stopping_patience_counter)
            is_better = state.best_metric is None or (value > state.best_metric) == greater
            if is_better and value != state.best_metric:
                state.best_metric = value
        callback.on_evaluate(args, state, control, metrics={"eval_other": 1.0})
        assert (found, control.should_training_stop) == (counts, False), api.__name__
        for _ in range(3):
            callback.on_evaluate(args, state, control, metrics={"eval_score": state.best_metric})
        assert control.should_training_stop


def test_the_default_flow_sets_the_flags_as_upstream():
    kinds, steps = ("no", "steps", "epoch"), (1, 2, 3, 4, 5)
    for logs, evaluates, saves in product(kinds, kinds, (*kinds, "best")):
        strategies = {"logging_strategy": logs, "eval_strategy": evaluates, "save_strategy": saves}
        for step, is_first, delay, save_steps in product(steps, (False, True), (0, 3), (0, 3)):
            args = SimpleNamespace(**strategies, logging_first_step=is_first, eval_delay=delay)
            numbers = {"max_steps": 4, "logging_steps": 2, "eval_steps": 3, "save_steps": save_steps}
            flags = []
            for api in (hf_compat, transformers):
                state, flow = api.TrainerState(global_step=step, epoch=step, **numbers), api.DefaultFlowCallback()
                for event in (flow.on_step_end, flow.on_epoch_end):
                    flags.append(vars(event(args, state, api.TrainerControl())))
            assert flags[:2] == flags[2:], (strategies, args, state)


def test_who_hears_an_event():
    class Own(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            pass

    callbacks = [
        Own(),
        TrainerCallback(),
        Recorder(),
        SimpleNamespace(on_step_end=print),
        SimpleNamespace(on_save=print),
    ]
    made = handler()
    made.callbacks[:] = callbacks
    assert [callbacks.index(one) for one in made.hearing("on_step_end")] == [0, 2, 3]
    assert made.hearing("on_an_event_of_the_script") == []


@pytest.mark.parametrize("log_format", ["table", "dict"])
def test_logs_are_written_above_the_bar_in_the_form_that_is_asked_for(monkeypatch, log_format):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr("hf_compat.hf.callbacks.progress_bar", Bar)
    progress, args, control = ProgressCallback(), SimpleNamespace(log_format=log_format), TrainerControl()
    progress.on_log(args, TrainerState(), control, logs={"loss": 0.5})  # no bar, nothing to write above
    progress.on_train_begin(args, TrainerState(max_steps=9, global_step=2), control)
    progress.on_log(args, TrainerState(global_step=2), control, logs={"loss": 0.5})
    written = Bar.made[0].said[1:]
    assert written == ["{'loss': '0.5'}"] if log_format == "dict" else [one.split() for one in written] == [
        ["update", "loss"], ["2", "0.5"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "said", "count"),
    [
        ({"eval_score": 1.0}, "", 1),
        ({"eval_score": 3.0}, "", 0),
        ({"eval_score": float("nan")}, "follows eval_score, which is NaN. It does not count", 1),
        ({"eval_other": 1.0}, "follows eval_score, which this evaluation did not return", 0),
        ({}, "which this evaluation did not return", 0),
        (None, "which this evaluation did not return", 0),
    ],
)
@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_says_what_it_cannot_follow(metrics, said, count, patience, caplog):
    args = SimpleNamespace(metric_for_best_model="score", greater_is_better=True)
    callback, control = hf_compat.EarlyStoppingCallback(patience), hf_compat.TrainerControl()
    callback.on_evaluate(args, SimpleNamespace(best_metric=2.0), control, metrics=metrics)
    assert callback.early_stopping_patience_counter == count
    assert control.should_training_stop is (count >= patience)
    assert len(caplog.messages) == bool(said) and all(said in one for one in caplog.messages)


@pytest.mark.parametrize(
    ("loads", "metric", "strategy", "said", "missing"),
    [
        (True, "score", "steps", False, []),
        (False, "score", "steps", True, []),
        (True, None, "steps", False, ["metric_for_best_model to be defined"]),
        (True, "score", "no", False, ["an eval_strategy of steps or epoch"]),
        (False, None, "no", True, ["metric_for_best_model to be defined", "an eval_strategy of steps or epoch"]),
    ],
)
def test_early_stopping_says_what_it_needs(loads, metric, strategy, said, missing, caplog):
    args = SimpleNamespace(load_best_model_at_end=loads, metric_for_best_model=metric, eval_strategy=strategy)
    callback = hf_compat.EarlyStoppingCallback()
    if missing:
        with pytest.raises(UnmetRequirement, match=f"requires {' and '.join(missing)}"):
            callback.on_train_begin(args, None, None)
    else:
        callback.on_train_begin(args, None, None)
    assert ("keeps the last model, not the best" in caplog.text) is said
