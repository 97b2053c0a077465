"""How many names a message of a native module shows."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import lightning.pytorch as pl
import pytest

from hf_compat import HFDataModule, HFModule
from hf_compat.errors import OverrideError
from hf_compat.native.overrides import _KEPT, KEPT, _shown, keep_hooks


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "`a`"),
        (["a", "b", "c", "d"], "`a`, `b`, `c`, `d`"),
        (["a", "b", "c", "d", "e"], "`a`, `b`, `c`, `d` and 1 more"),
        (list("abcdefg"), "`a`, `b`, `c`, `d` and 3 more"),
    ],
)
def test_four_names_are_shown_and_the_others_counted(names, text):
    assert _shown(names) == text


def with_signature(text):
    return eval(f"lambda {text}: None")


@pytest.mark.parametrize(
    ("base", "methods", "told"),
    [
        (HFModule, {}, None),
        (HFModule, {"evaluate": with_signature("self")}, "`evaluate` of Mine is a method of HF's Trainer"),
        (HFDataModule, {"evaluate": with_signature("self")}, "`evaluate` of Mine is a method of HF's Trainer"),
        (HFDataModule, {"compute_loss": with_signature("self")}, "Hint: override it in the HFModule"),
        (HFModule, {"compute_loss": with_signature("self, model, inputs, **more")}, None),
        (HFModule, {"compute_loss": with_signature("self, model")}, "cannot be called as HF calls it"),
        (HFModule, {"compute_loss": None}, None),
        (HFModule, {"compute_loss": functools.partial(print)}, None),
        (HFModule, {"training_step": with_signature("self, model, inputs")}, r"`training_step\(model, inputs\)` of"),
        (HFModule, {"training_step": with_signature("self, batch, model")}, None),
        (HFModule, {"training_step": with_signature("self")}, None),
        (HFModule, {"training_step": None}, None),
        (HFModule, {"log": with_signature("self, logs, start_time=None")}, r"`log\(logs, start_time\)` of"),
        (HFModule, {"log": with_signature("self, name, value")}, None),
        (HFDataModule, {"training_step": with_signature("self, model")}, None),
    ],
)
def test_a_method_of_the_trainer_that_nobody_would_call_is_refused(base, methods, told):
    with pytest.raises(OverrideError, match=told) if told else contextlib.nullcontext():
        made = type("Mine", (base,), methods)
        assert issubclass(made, base) and told is None


def test_hooks_are_kept_where_they_are_not_the_bases():
    class Base(pl.LightningModule):
        def on_fit_start(self):
            pass

        teardown = None

    class Mixin:
        def setup(self, stage):
            pass

    class Own(Mixin, Base):
        def on_fit_start(self):
            pass

        on_train_start = mock.Mock()

    class Behind(Base, Mixin):
        pass

    def kept(kind):
        return {name: vars(kind)[name] for name in KEPT if vars(kind).get(name) in _KEPT}

    keep_hooks(Base)
    assert kept(Base).keys() == {*KEPT} - {"teardown"}
    keep_hooks(Own, Base)
    first = kept(Own)
    assert first.keys() == {"on_fit_start", "on_train_start", "setup"}
    keep_hooks(Own, Base)
    assert kept(Own) == first
    keep_hooks(Behind, Base)
    assert kept(Behind) == {}
