"""The batch sizes that are tried when memory runs out, against transformers'."""

import pytest
import toy
from transformers.trainer_utils import find_executable_batch_size

from hf_compat import Trainer, TrainingArguments
from hf_compat.trainer_methods.training import run_with_fitting_batch_size


@pytest.mark.parametrize("fits", [7, 64])
def test_the_sizes_are_transformers(fits):
    tried = {"ours": [], "theirs": []}

    def run(who, batch_size):
        tried[who].append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return batch_size

    ours = run_with_fitting_batch_size(lambda batch_size: run("ours", batch_size), 16)
    search = find_executable_batch_size(starting_batch_size=16, auto_find_batch_size=True)
    theirs = search(lambda batch_size: run("theirs", batch_size))()
    assert ours == theirs and tried["ours"] == tried["theirs"]


def test_other_errors_and_an_end_without_success_are_raised():
    def broken(batch_size):
        raise RuntimeError("shapes" if batch_size == 3 else "MPS backend out of memory")

    with pytest.raises(RuntimeError, match="shapes"):
        run_with_fitting_batch_size(broken, 4)
    with pytest.raises(RuntimeError, match="reached zero"):
        run_with_fitting_batch_size(broken, 2)


def test_without_a_search_the_first_error_is_raised(tmp_path, monkeypatch):
    tried = []

    def broken(self, batch_size, **_):
        tried.append(batch_size)
        raise RuntimeError("MPS backend out of memory")

    monkeypatch.setattr(Trainer, "_inner_training_loop", broken)
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, use_cpu=True, report_to="none")
    with pytest.raises(RuntimeError, match="MPS"):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(4)).train()
    assert tried == [2]
