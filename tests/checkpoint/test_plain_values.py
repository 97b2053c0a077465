"""What callbacks and modules put into checkpoints is read back, converted, told of, or refused when it is saved.

A folder of the Trainer's refuses what cannot be read back without running code. Lightning's file keeps it, as natively.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import fractions
import os
import threading

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.checkpoint.run_state import readable_state
from hf_compat.errors import CallbackError, CheckpointError, warn_once

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Attribute .model. is an instance"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class Keeps(pl.Callback):
    """A callback with a state of any kind."""

    def __init__(self, value=None):
        self.value, self.found = value, None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.found = state_dict["value"]


class Odd:
    """A class that no reader of checkpoints knows."""


def arguments(folder):
    return TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True)


def fit_natively(folder, callbacks, resume=None, epochs=1, module=None, plugins=(), **options):
    keeps = ModelCheckpoint(folder / "kept", filename="last", enable_version_counter=False)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, callbacks=[*callbacks, keeps],
                         enable_progress_bar=False, enable_model_summary=False, plugins=[*plugins],
                         log_every_n_steps=1)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer.fit(module or HFModule(Classifier(), arguments(folder)), HFDataModule(None, rows(16)),
                    ckpt_path=resume, **options)  # fmt: skip
    return str(folder / "kept" / "last.ckpt")


def fit_trainer(folder, callbacks, resume=None, epochs=1):
    args = TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True, num_train_epochs=epochs,
                             save_strategy="epoch", report_to="none", disable_tqdm=True)  # fmt: skip
    Trainer(Classifier(), args, train_dataset=rows(16), callbacks=callbacks).train(resume_from_checkpoint=resume)
    return str(folder / "checkpoint-4")


DOORS = {"native": fit_natively, "trainer": fit_trainer}
KEPT = {
    "float64": (np.float64(1.5), 1.5),
    "float32": (np.float32(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "bool": (np.bool_(True), True),
    "nested": ({"a": [1, (np.float32(2), {3})], 4: None}, {"a": [1, (2.0, {3})], 4: None}),
    "ordered": (collections.OrderedDict(a=np.int8(1)), collections.OrderedDict(a=1)),
    "array": (np.arange(3.0), np.arange(3.0)),
    "texts": (np.array(["a", "bc"]), np.array(["a", "bc"])),
    "tensor": (torch.arange(3), torch.arange(3)),
    "dtype": (torch.float16, torch.float16),
}
REFUSED = {
    "object": Odd(),
    "fraction": fractions.Fraction(1, 2),
    "timedelta": datetime.timedelta(1),
    "deque": collections.deque([1]),
    "objects": np.array([Odd()]),
    "function": len,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", KEPT)
def test_plain_states_come_back(tmp_path, door, kind):
    value, expected = KEPT[kind]
    path = DOORS[door](tmp_path, [Keeps(value)])
    again = Keeps()
    DOORS[door](tmp_path, [again], resume=path, epochs=2)
    assert type(again.found) is type(expected)
    assert np.array_equal(again.found, expected) if kind in ("array", "texts", "tensor") else again.found == expected


@pytest.mark.parametrize("kind", REFUSED)
def test_a_state_that_cannot_be_read_back_is_refused_when_a_folder_is_saved(tmp_path, kind):
    with pytest.raises(CallbackError, match=r"(?s)state of the callback Keeps.* at \['inner'\]\['value'\]\[1\].*Hint:"):
        callback = Keeps()
        callback.state_dict = lambda: {"inner": {"value": [0, REFUSED[kind]]}}
        fit_trainer(tmp_path, [callback])


@pytest.fixture
def told_anew():
    """Warnings that this process has given before are given again."""
    warn_once.cache_clear()


@pytest.mark.parametrize("kind", REFUSED)
def test_lightnings_file_keeps_an_object_and_says_what_reads_it(tmp_path, kind, told_anew):
    with pytest.warns(UserWarning, match=r"(?s)state of the callback Keeps.* at \['value'\].*weights_only=False"):
        path = fit_natively(tmp_path, [Keeps(REFUSED[kind])])
    with pytest.raises(CheckpointError, match=r"(?s)last\.ckpt.*\n\nHint: .*`weights_only=False`"):
        fit_natively(tmp_path, [Keeps()], resume=path, epochs=2)
    again = Keeps()
    fit_natively(tmp_path, [again], resume=path, epochs=2, weights_only=False)
    assert type(again.found) is type(REFUSED[kind])


def test_an_entry_of_a_hook_is_kept(tmp_path, told_anew):
    class Adds(HFModule):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = Odd()

        def on_load_checkpoint(self, checkpoint):
            self.found = checkpoint["mine"]

    again = Adds(Classifier(), arguments(tmp_path))
    with pytest.warns(UserWarning, match="(?s)entry 'mine' of the checkpoint.*Odd"):
        path = fit_natively(tmp_path, [], module=Adds(Classifier(), arguments(tmp_path)))
        fit_natively(tmp_path, [], resume=path, epochs=2, module=again, weights_only=False)
    assert isinstance(again.found, Odd)


def test_a_state_that_cannot_be_pickled_is_refused(tmp_path):
    with pytest.raises(CallbackError, match=r"state of the callback Keeps.*function"):
        fit_natively(tmp_path, [Keeps(lambda: None)])


class Described(HFModule):
    """A module that saves all it was made with."""

    def __init__(self, model, args=None, width=3, odd=None):
        super().__init__(model, args)
        self.save_hyperparameters()


def test_hyperparameters_with_arguments_in_them_are_saved_resumed_and_make_a_module(tmp_path):
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.25)
    path = fit_natively(tmp_path, [], module=Described(Classifier(), args, width=np.int64(5)))
    held = torch.load(path, weights_only=False)["hyper_parameters"]
    assert type(held["width"]) is int and held["args"]["learning_rate"] == 0.25
    made = Described.load_from_checkpoint(path, model=Classifier())
    assert made.hparams["width"] == 5 and made.steps.args.learning_rate == 0.25
    fit_natively(tmp_path, [], resume=path, epochs=2, module=Described(Classifier(), args))


class Wide(Classifier):
    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(100_000))

    def forward(self, x, labels=None):
        out = super().forward(x, labels)
        return {**out, "loss": out["loss"] + 0 * self.large.sum()}


def test_a_model_among_the_hyperparameters_is_saved_once_and_makes_a_module(tmp_path):
    path = fit_natively(tmp_path, [], module=Described(Wide(), arguments(tmp_path)))
    read = Described.load_from_checkpoint(path, weights_only=False)
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in read.state_dict().items())
    assert os.path.getsize(path) < 4 * 4 * 100_000  # bytes of the weights, of Adam's two moments, and of what is small


@dataclasses.dataclass
class Options:
    depth: int = 2


class Node:
    """A part of a configuration, which knows the whole."""

    def __init__(self):
        self.parts = {"inner": [self], "width": 3}


@pytest.mark.parametrize(
    "value", [Odd(), Options(3), [Options(4)], Node()], ids=["object", "dataclass", "list", "circle"]
)
def test_an_object_among_the_hyperparameters_is_kept_and_left_out_when_read(tmp_path, value, told_anew, caplog):
    with pytest.warns(UserWarning, match=r"(?s)The hyperparameter odd.*weights_only=False"):
        path = fit_natively(tmp_path, [], module=Described(Classifier(), arguments(tmp_path), width=7, odd=value))
    with open(path, "rb") as file, open(path, "rb") as again:
        for opened in (path, file):
            read = Described.load_from_checkpoint(opened, weights_only=False, model=Classifier())
            assert type(read.hparams["odd"]) is type(value) and read.hparams["width"] == 7
        for opened in (path, again):
            caplog.clear()
            read = Described.load_from_checkpoint(opened, model=Classifier())
            assert read.hparams["odd"] is None and read.hparams["width"] == 7
            assert "odd (" in caplog.text and "`weights_only=False` reads them" in caplog.text
    fit_natively(tmp_path, [], resume=path, epochs=2, module=Described(Classifier(), arguments(tmp_path)))
    fit_trainer(tmp_path / "trainer", [], resume=path, epochs=2)


def test_weights_only_false_counts(tmp_path):
    path = fit_natively(tmp_path, [Keeps(1)])
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"]["Keeps"]["value"] = Odd()  # another program has written it
    torch.save(checkpoint, path)
    again = Keeps()
    fit_natively(tmp_path, [again], resume=path, epochs=2, weights_only=False)
    assert isinstance(again.found, Odd)


@pytest.mark.parametrize("fails", [False, True])
def test_a_plugin_that_writes_in_the_background_is_waited_for(tmp_path, fails):
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if fails and trainer.global_step == 3:
                raise OSError("a disk failed")

    before = threading.active_count()
    every = ModelCheckpoint(tmp_path / "all", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    try:
        fit_natively(tmp_path, [every, Fails()], plugins=[AsyncCheckpointIO()])
    except OSError as error:
        assert fails and "a disk failed" in str(error)
    assert threading.active_count() == before
    assert len(list((tmp_path / "all").iterdir())) == (3 if fails else 4)


def circular(kind):
    state = kind()
    state.append(state) if kind is list else state.update(inner=state)
    return state


def nested(times, copies):
    state = [1]
    for _ in range(times):
        state = [state] * copies
    return state


@pytest.mark.parametrize("state", [circular(list), circular(dict), nested(5000, 1), nested(40, 2)])
def test_a_state_that_no_reader_walks_through_is_refused_when_it_is_saved(state):
    with pytest.raises(CallbackError, match="The state of X cannot be read"):
        readable_state({"kept": state}, "The state of X")
