"""What a run's state holds is read by its version, and a wrong value is named."""

from __future__ import annotations

import enum
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from hf_compat import TrainingArguments
from hf_compat.checkpoint import run_state
from hf_compat.checkpoint.files import Named
from hf_compat.checkpoint.run_state import DataPosition, RunState, SavedAt, plain_checkpoint, resume_point
from hf_compat.errors import CheckpointError
from hf_compat.plan.translate import ENDLESS_EPOCHS, RunCounts


def test_the_values_come_back():
    position = DataPosition(epoch=2, micro_batches_done=5)
    plain = position.to_plain()
    assert plain["version"] == 2, "another one needs a way to read checkpoints of this one"
    assert DataPosition.read(plain) == position


@pytest.mark.parametrize("version", [None, 0, 1, 3, "2"])
def test_another_version_is_refused(version):
    with pytest.raises(CheckpointError, match="another version of hf_compat"):
        DataPosition.read({**DataPosition(epoch=2).to_plain(), "version": version})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (None, "is None, not fields"),
        ({"epoch": None}, "`epoch`"),
        ({"epoch": -1}, "`epoch`"),
        ({"micro_batches_done": 1.5}, "`micro_batches_done`"),
        ({"window_size": "4"}, "`window_size`"),
        ({"is_over": 2}, "`is_over`"),
        ({"shared": "no list"}, "`shared`"),
    ],
)
def test_a_wrong_value_is_named(change, what):
    plain = None if change is None else {**DataPosition(epoch=2).to_plain(), **change}
    with pytest.raises(CheckpointError, match=what):
        DataPosition.read(plain)


def counts(epochs=3, updates=4, micro_batches=8, most=12):
    return RunCounts(epochs, updates, 32, 96.0, 8, micro_batches, most)


def arguments(window=2, world_size=1, skips=False):
    return SimpleNamespace(world_size=world_size, gradient_accumulation_steps=window, ignore_data_skip=skips)


def state(moment=SavedAt.UPDATE, samples=4, window=2, length=8, world_size=1, **data):
    usual = {"epoch": 1, "micro_batches_done": 4, "updates_done": 2, "is_open": True, "shuffle_seed": 7}
    position = DataPosition(**{**usual, "window_size": window, "micro_batches_per_epoch": length, **data})
    return RunState(data=position, moment=moment, samples_per_micro_batch=samples, world_size=world_size)


@pytest.mark.parametrize(
    ("updates", "args", "epoch", "skip", "is_finished"),
    [
        (0, arguments(), 0, 0, False),
        (5, arguments(), 1, 2, False),
        (8, arguments(), 2, 0, False),
        (11, arguments(window=3), 2, 9, False),
        (12, arguments(), 3, 0, True),
        (13, arguments(), 3, 2, True),
        (5, arguments(skips=True), 1, 0, False),
    ],
)
def test_a_checkpoint_of_transformers_goes_on_after_as_many_updates(updates, args, epoch, skip, is_finished):
    point = resume_point(None, updates, counts(), args, samples=4)
    assert (point.epoch, point.skip_micro_batches, point.is_finished) == (epoch, skip, is_finished)
    assert point.position is None and not point.has_same_cut and point.shuffle_seed is None


def test_the_last_update_or_epoch_finishes_whichever_comes_first():
    assert resume_point(None, 6, counts(most=6), arguments(), samples=4).is_finished
    assert resume_point(None, 4, counts(epochs=1, most=9), arguments(), samples=4).is_finished
    assert not resume_point(None, 3, counts(epochs=1, most=9), arguments(), samples=4).is_finished


@pytest.mark.parametrize(
    ("held", "updates", "most", "is_over", "is_finished"),
    [
        (state(), 6, 12, False, False),
        (state(micro_batches_done=7), 7, 12, False, False),
        (state(micro_batches_done=8), 8, 12, True, False),  # the end of the epoch is left
        (state(micro_batches_done=9), 8, 12, True, False),
        (state(micro_batches_done=8, is_open=False), 8, 12, False, False),  # it has been told
        (state(is_over=True), 6, 12, True, False),  # a script ended it
        (state(), 6, 6, True, False),  # the log and the evaluation of the last update come first
        (state(moment=SavedAt.EPOCH_END), 6, 6, False, True),
        (state(is_open=False), 6, 6, False, True),
        (state(), 7, 6, False, True),  # there are fewer updates than were made
        (state(epoch=3), 6, 12, False, True),
        (state(epoch=3), 12, 12, False, True),
        (state(epoch=2), 12, 12, True, False),
    ],
)
def test_an_exact_position_is_taken(held, updates, most, is_over, is_finished):
    point = resume_point(held, updates, counts(most=most), arguments(), samples=4)
    assert (point.epoch_is_over, point.is_finished) == (is_over, is_finished)
    assert point.position is held.data and point.has_same_cut and point.epoch == held.data.epoch
    assert point.skip_micro_batches == 0 and point.shuffle_seed == 7


@pytest.mark.parametrize(
    ("held", "args", "samples", "told", "epoch", "skip"),
    [
        (state(samples=None), arguments(), 4, None, 1, 0),  # not known: as now
        (state(world_size=2), arguments(), 4, "is of 2 process(es) with 4 samples", 1, 4),
        (state(samples=8), arguments(), 4, "with 8 samples to a micro-batch, now there are 1", 1, 8),
        (state(samples=2), arguments(), 4, "with 2 samples", 1, 2),
        (state(), arguments(window=1), 4, "in windows of 2, now they have 8 in windows of 1", 1, 4),
        (state(length=10), arguments(), 4, "had 10 micro-batches", 1, 2),  # five updates each
        (state(window=None), arguments(), 4, "in windows of None", 1, 4),  # updates are counted
        (state(length=None), arguments(), 4, "had None micro-batches", 1, 4),
        (state(world_size=2), arguments(skips=True), 4, "is of 2 process(es)", 1, 0),
        (state(), arguments(skips=True), 4, None, 1, 0),
    ],
)
def test_data_that_were_cut_in_another_way_go_on_after_as_many_samples(caplog, held, args, samples, told, epoch, skip):
    point = resume_point(held, 6, counts(), args, samples=samples)
    assert (point.epoch, point.skip_micro_batches) == (epoch, skip) and point.shuffle_seed == 7
    assert (told or "") in caplog.text and (told is not None) == bool(caplog.text)


@pytest.mark.parametrize(("sharing", "sequence"), [(2, 1), (1, 2)])
def test_other_groups_of_processes_are_told(caplog, sharing, sequence):
    point = resume_point(state(), 6, counts(), arguments(), 4, sharing=sharing, sequence=sequence)
    group = "2 to a model" if sharing == 2 else "2 to a sequence"
    assert group in caplog.text and not point.has_same_cut
    assert "1 process(es) with 4 samples" in caplog.text


def test_endless_data_is_one_epoch():
    endless = counts(epochs=ENDLESS_EPOCHS, updates=12, micro_batches=24)
    point = resume_point(state(epoch=0, length=None), 6, endless, arguments(), samples=4)
    assert point.has_same_cut and point.epoch == 0  # however long it is now
    point = resume_point(state(epoch=0, samples=8), 6, endless, arguments(), samples=4)
    assert (point.epoch, point.skip_micro_batches) == (0, 24)


def stands_for(name):
    return type(name, (Named,), {"module": "user", "name": name})()


KIND = type("Kind", (Named,), {"module": "user", "name": "Kind"})


@pytest.mark.parametrize(
    ("content", "left", "told"),
    [
        ({"epoch": 1, "hyper_parameters": {"a": 1}}, {"epoch": 1, "hyper_parameters": {"a": 1}}, ""),
        ({"hyper_parameters": {"a": 1, "b": stands_for("Own")}}, {"hyper_parameters": {"a": 1}}, "b (user.Own)"),
        ({"hyper_parameters": {"a": [{"x": (KIND,)}]}}, {"hyper_parameters": {}}, "a (user.Kind)"),
        ({"hyper_parameters": {"a": {stands_for("Key"): 1}}}, {"hyper_parameters": {}}, "a (user.Key)"),
        ({"datamodule_hyper_parameters": stands_for("Own")}, {}, "datamodule_hyper_parameters (user.Own)"),
        ({"hyper_parameters": [1]}, {"hyper_parameters": [1]}, ""),
        ({"hparams_type": KIND, "epoch": 1}, {"epoch": 1}, ""),
        ({"hparams_type": dict}, {"hparams_type": dict}, ""),
        ({"callbacks": {"a": stands_for("Own")}}, "holds a user.Own under 'callbacks'", ""),
        ({"epoch": stands_for("Own")}, "holds a user.Own under 'epoch'", ""),
    ],
)
def test_objects_are_left_out_of_hyperparameters_alone(caplog, content, left, told):
    if isinstance(left, str):
        with pytest.raises(CheckpointError, match=left):
            plain_checkpoint("it", content)
    else:
        assert plain_checkpoint("it", content) == left
    assert told in caplog.text and bool(caplog.records) is bool(told)


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = 1


class Odd:
    pass


def test_hyperparameters_are_made_plain_where_they_can_be():
    args = TrainingArguments("out", use_cpu=True)
    odd, module = Odd(), nn.Linear(1, 1)
    held = {
        "args": args, "space": Namespace(a=1, b=[2]), "level": Level.LOW, "colour": Colour.RED, "path": Path("a/b"),
        "number": np.float32(0.5), "module": module, "odd": {"x": [odd]},
    }  # fmt: skip
    kept = []
    found = run_state._readable_hyperparameters(held, kept)
    assert found["args"] == args.to_dict() and found["space"] == {"a": 1, "b": [2]}
    assert type(found["level"]) is int and found["colour"] is Colour.RED and found["path"] == "a/b"
    assert type(found["number"]) is float and found["module"] is module and found["odd"] == {"x": [odd]}
    assert kept == [
        "The hyperparameter colour is a Colour, which cannot be read back from a checkpoint",
        "The hyperparameter odd['x'][0] is a Odd, which cannot be read back from a checkpoint",
    ]
