"""Methods and events of a transformers that is newer than what we know: what a script overrides is told."""

from __future__ import annotations

import warnings

import pytest
import transformers
import transformers.trainer_seq2seq

import hf_compat
from helpers.toy import Classifier, rows
from hf_compat.errors import HfCompatWarning, warn_once

OURS, THEIRS = (hf_compat.Trainer, hf_compat.TrainerCallback), (transformers.Trainer, transformers.TrainerCallback)


@pytest.fixture(params=[False, True], ids=["imported", "patched"])
def classes(request, monkeypatch):
    """Give a next release's method and event to transformers; return the classes that a script finds."""
    if request.param:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes of other tests in this process are made from the originals
            hf_compat.patch()
    for kind, name in zip(THEIRS, ("_next_batch", "on_next_batch"), strict=True):
        monkeypatch.setattr(kind, name, lambda self, *args, **kwargs: None, raising=False)
    warn_once.cache_clear()
    yield (transformers.Trainer, transformers.TrainerCallback) if request.param else OURS
    hf_compat.unpatch()


def make(folder, kind, callback):
    args = hf_compat.TrainingArguments(str(folder), use_cpu=True, report_to="none", save_strategy="no", max_steps=1)
    return kind(Classifier(), args, train_dataset=rows(8), callbacks=[callback])


def test_a_method_and_an_event_that_would_not_be_called_are_told(tmp_path, classes):
    trainer, callback = classes
    with pytest.warns(HfCompatWarning, match=r"Its has `_next_batch`, which transformers .* never calls it"):

        class Its(trainer):
            def _next_batch(self):
                raise AssertionError

    class Watching(callback):
        def on_next_batch(self, args, state, control, **kwargs):
            raise AssertionError

    with pytest.warns(HfCompatWarning, match=r"Watching has `on_next_batch`"):
        assert make(tmp_path, Its, Watching()).train().global_step == 1


@pytest.mark.parametrize("given", ["class", "object"])
def test_an_adapter_tells_too(classes, given):
    class InAdapter(THEIRS[1]):
        def on_next_batch(self, args, state, control, **kwargs):
            raise AssertionError

    with pytest.warns(HfCompatWarning, match=r"InAdapter has `on_next_batch`"):
        hf_compat.HFCallbackAdapter(InAdapter if given == "class" else InAdapter())


def test_names_of_ones_own_say_nothing(tmp_path, classes):
    trainer, callback = classes

    class Mine(trainer):
        def my_batch(self): ...

    class Quiet(callback):
        def on_my_batch(self): ...

        def on_step_end(self, args, state, control, **kwargs): ...

    with warnings.catch_warnings():
        warnings.simplefilter("error", HfCompatWarning)
        assert make(tmp_path, Mine, Quiet()).train().global_step == 1


@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer", "TrainerCallback"])
def test_every_name_of_the_installed_release_is_known(name):
    class All(getattr(hf_compat, name)):
        pass

    theirs = getattr(transformers, name)
    ours = [kind for kind in All.__mro__ if kind.__module__.startswith("hf_compat.")]
    known = {one for kind in ours for one in vars(kind)}
    assert [one for one in dir(theirs) if not one.startswith("__") and one not in known] == []


@pytest.mark.parametrize("kind", [hf_compat.HFModule, hf_compat.HFDataModule])
def test_a_native_class_is_told_too_and_its_own_methods_are_its_own(classes, kind):
    with pytest.warns(HfCompatWarning, match=r"Its has `_next_batch`, which transformers .* never calls it"):
        type("Its", (kind,), {"_next_batch": lambda self: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Own", (kind,), {"push_to_hub": lambda self: None, "on_train_start": lambda self: None, "_next": None})
