"""The batch sizes that are tried when memory runs out. Accelerate chooses them."""

import sys

import pytest

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import MissingPackage


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Train a Trainer whose loop calls `fails` with each batch size, and return the sizes."""

    def run(fails, searches, size=16):
        sizes = []

        def loop(self, batch_size, **_):
            sizes.append(batch_size)
            fails(batch_size)

        monkeypatch.setattr(Trainer, "_inner_training_loop", loop)
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=size, use_cpu=True, auto_find_batch_size=searches
        )
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(4)).train()
        return sizes

    return run


def out_of_memory_above(fits):
    def fails(batch_size):
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    return fails


def test_a_tenth_less_until_it_fits(tried):
    assert tried(out_of_memory_above(7), searches=True) == [16, 14, 12, 10, 9, 8, 7]
    assert tried(out_of_memory_above(64), searches=True) == [16]
    with pytest.raises(RuntimeError, match="reached zero"):
        tried(out_of_memory_above(0), searches=True, size=2)


def test_other_errors_are_raised(tried):
    def fails(batch_size):
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        tried(fails, searches=True)


def test_without_a_search_the_first_error_is_raised(tried):
    with pytest.raises(RuntimeError, match="CUDA"):
        tried(out_of_memory_above(1), searches=False)


def test_without_accelerate_the_error_names_it(tried, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.utils.memory", None)
    with pytest.raises(MissingPackage, match="auto_find_batch_size"):
        tried(out_of_memory_above(1), searches=True)
