"""How the handler calls callbacks: what a method is given, what it may return, which ones are called."""

import pytest
import transformers

from hf_compat import TrainerCallback, TrainerControl, TrainerState
from hf_compat.errors import CallbackError
from hf_compat.hf.callbacks import EVENTS, REQUESTABLE_KWARGS, CallbackHandler


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
