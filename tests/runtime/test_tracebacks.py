"""An error that leaves `train`, `evaluate` or `predict` shows the user's frames, not those of the package between."""

from __future__ import annotations

import traceback

import pytest
import torch

from helpers.toy import Classifier, rows
from hf_compat import Trainer
from hf_compat.errors import HfCompatError
from hf_compat.runtime.tracebacks import _shortened


class Failing(Classifier):
    kind: type[BaseException] = ValueError

    def forward(self, x, labels=None):
        raise self.kind("in forward")


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


def names(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def failed(call, kind=BaseException):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("method", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_the_users_frames_stay(make_args, method, raised):
    model = Failing()
    model.kind = raised
    trainer = OwnLoss(model, make_args(max_steps=2), train_dataset=rows(8), eval_dataset=rows(8))
    call = {"train": trainer.train, "evaluate": trainer.evaluate, "predict": lambda: trainer.predict(rows(8))}[method]
    found = names(failed(call))
    assert [name for name in found if name != "<lambda>"] == [
        "failed",
        "without_inner_frames",
        "compute_loss",
        "forward",
    ]


@pytest.mark.parametrize(
    "call",
    [lambda args: Trainer(Classifier(), args).train(), lambda args: Trainer(Classifier, args),
     lambda args: OwnLoss(Classifier(), args, callbacks=[1])],
)  # fmt: skip
def test_an_error_of_ours_says_it_all_without_frames_of_ours(make_args, call):
    error = failed(lambda: call(make_args(max_steps=2)), HfCompatError)
    assert names(error) == ["failed", "<lambda>", "<lambda>"]


def test_where_it_was_raised_stays(make_args):
    def shapes(x, labels=None):
        return {"loss": torch.nn.functional.linear(x, torch.zeros(1, 99)).sum()}

    trainer = Trainer(Classifier(), make_args(max_steps=2), train_dataset=rows(8))
    trainer.model.forward = shapes
    assert names(failed(trainer.train)) == ["failed", "without_inner_frames", "shapes"]


def test_of_torch_only_the_frame_that_raised_it_stays(make_args):
    trainer = Trainer(Classifier(), make_args(max_steps=2), train_dataset=rows(8))
    trainer.model.forward = lambda x, labels=None: {"loss": torch.nn.Sequential(torch.nn.Linear(99, 1))(x).sum()}
    error = failed(trainer.train)
    assert names(error) == ["failed", "without_inner_frames", "<lambda>", "forward"]
    assert [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)][-1] == "linear.py"


def test_what_an_error_followed_from_is_short_too(make_args):
    class Chained(Trainer):
        def training_step(self, *args, **kwargs):
            try:
                return super().training_step(*args, **kwargs)
            except ValueError as error:
                raise RuntimeError("in training_step") from error

    error = failed(Chained(Failing(), make_args(max_steps=2), train_dataset=rows(8)).train)
    assert names(error) == ["failed", "without_inner_frames", "training_step"]
    assert names(error.__cause__) == ["training_step", "forward"]


def test_a_variable_of_the_environment_shows_all(make_args, monkeypatch):
    trainer = Trainer(Failing(), make_args(max_steps=2), train_dataset=rows(8))
    short = names(failed(trainer.train))
    monkeypatch.setenv("HF_COMPAT_TRACEBACKS", "full")
    full = names(failed(trainer.train))
    assert len(short) == 3 and len(full) > 20 and {"_fit_impl", *short} <= set(full)


def test_the_hint_stands_in_the_traceback(make_args):
    error = failed(Trainer(Failing(), make_args(max_steps=2), train_dataset=rows(8)).train)
    assert "HF_COMPAT_TRACEBACKS=full" in "".join(traceback.format_exception(error))


def raised_in(frames, error):
    """Raise an error in frames of these modules, the innermost last."""

    call = None
    for name, file in [(*frame.split("@"), "it.py")[:2] for frame in reversed(frames)]:
        space = {"__name__": name, "call": call, "error": error}
        exec(compile(f"def run():\n    {'raise error' if call is None else 'call()'}\n", file, "exec"), space)
        call = space["run"]
    try:
        call()
    except Exception:
        error.__traceback__ = error.__traceback__.tb_next  # without this frame
    return error


@pytest.mark.parametrize(
    ("frames", "kind", "keeps_first", "shown"),
    [
        ("me hf_compat.a you", ValueError, False, "me you"),
        ("me lightning.a lightning_fabric pytorch_lightning you", ValueError, False, "me you"),
        ("hf_compat.a you", ValueError, True, "hf_compat.a you"),
        ("hf_compat.a you", ValueError, False, "you"),
        ("me hf_compat.a contextlib hf_compat.b you", ValueError, False, "me you"),
        ("me hf_compat.a functools you", ValueError, False, "me you"),
        ("me contextlib you", ValueError, False, "me contextlib you"),
        ("me hf_compat.a me@<string> you", ValueError, False, "me you"),
        ("me us@<string> you", ValueError, False, "me us you"),
        ("me hf_compat.a you contextlib us", ValueError, False, "me you contextlib us"),
        ("me torch.nn you", ValueError, False, "me you"),
        ("me torch.nn contextlib you", ValueError, False, "me contextlib you"),
        ("me torch.nn", ValueError, False, "me torch.nn"),
        ("me hf_compat.a", ValueError, False, "me hf_compat.a"),
        ("me hf_compat.a", HfCompatError, False, "me"),
        ("hf_compat.a you", HfCompatError, False, "you"),
        ("hf_compat.a", HfCompatError, False, ""),
        ("hf_compat.a", HfCompatError, True, "hf_compat.a"),
        ("me lightning.a", HfCompatError, False, "me lightning.a"),
    ],
)
def test_which_frames_are_shown(frames, kind, keeps_first, shown):
    trace = _shortened(raised_in(frames.split(), kind("it")), keeps_first)
    assert [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(trace)] == shown.split()
