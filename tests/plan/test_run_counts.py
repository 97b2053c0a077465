"""Counts of a run: transformers' own, for lengths, windows and ends that divide and that do not."""

from __future__ import annotations

import itertools

import pytest
import transformers
from torch.utils.data import DataLoader

from helpers import toy
from hf_compat import TrainingArguments
from hf_compat.errors import ArgumentError, DataError
from hf_compat.plan.translate import ENDLESS_EPOCHS, RunCounts, make_run_counts

NAMES = (
    "num_train_epochs",
    "updates_per_epoch",
    "num_examples",
    "num_train_samples",
    "total_train_batch_size",
    "micro_batches_per_epoch",
    "max_updates",
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("out"))
    args = transformers.TrainingArguments(folder, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(toy.Classifier(), args, train_dataset=toy.rows(4))

    def counts(loader, **values):
        for name, value in {"max_steps": -1, "num_train_epochs": 3.0, **values}.items():
            setattr(args, name, value)
        trainer._train_batch_size = args.train_batch_size
        return dict(zip(NAMES, trainer.set_initial_training_values(args, loader), strict=True))

    return counts


def as_dict(counts: RunCounts) -> dict:
    return {name: getattr(counts, name) for name in NAMES}


@pytest.mark.parametrize(
    "end",
    [{}, {"num_train_epochs": 1.5}, {"num_train_epochs": 0.1}, {"max_steps": 0}, {"max_steps": 1}, {"max_steps": 7}],
)
def test_data_with_a_length(theirs, end):
    for samples, size, window in itertools.product((1, 7, 8, 30), (1, 4), (1, 3, 50)):
        loader = DataLoader(toy.rows(samples), batch_size=size)
        values = {"per_device_train_batch_size": size, "gradient_accumulation_steps": window, **end}
        args = TrainingArguments("out", use_cpu=True, **values)
        ours = make_run_counts(
            args,
            micro_batches=len(loader),
            num_examples=samples,
            total_train_batch_size=size * args.gradient_accumulation_steps,
        )
        assert as_dict(ours) == theirs(loader, **values), values


def test_data_without_a_length(theirs):
    values = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 5}
    args = TrainingArguments("out", use_cpu=True, **values)
    ours = make_run_counts(
        args, micro_batches=None, num_examples=None, total_train_batch_size=4 * args.gradient_accumulation_steps
    )
    assert as_dict(ours) == theirs(DataLoader(toy.Stream(toy.rows(9)), batch_size=4), **values)
    assert ours.num_train_epochs == ENDLESS_EPOCHS


def test_processes_multiply_the_samples_of_an_update():
    args = TrainingArguments("out", use_cpu=True, gradient_accumulation_steps=3, max_steps=10)
    counts = make_run_counts(
        args, micro_batches=12, num_examples=96, total_train_batch_size=8 * args.gradient_accumulation_steps
    )
    assert (counts.total_train_batch_size, counts.num_train_samples, counts.num_train_epochs) == (24, 240, 3)


def test_runs_that_have_no_counts():
    args = TrainingArguments("out", use_cpu=True)
    with pytest.raises(ArgumentError, match="max_steps has to be specified"):
        make_run_counts(
            args, micro_batches=None, num_examples=None, total_train_batch_size=4 * args.gradient_accumulation_steps
        )
    with pytest.raises(DataError, match="gives no batch"):
        make_run_counts(
            args, micro_batches=0, num_examples=0, total_train_batch_size=4 * args.gradient_accumulation_steps
        )
