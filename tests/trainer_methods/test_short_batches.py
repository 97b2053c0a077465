"""In a short last batch of an evaluation each sample counts once in `eval_loss`, under any data option."""

from __future__ import annotations

import pytest
import transformers
from torch.utils.data import DataLoader

import hf_compat
from helpers import toy

OPTIONS = (None, {"dispatch_batches": False}, {"dispatch_batches": False, "even_batches": False})


def loss(package, model, data, folder, options):
    args = package.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", per_device_eval_batch_size=7, disable_tqdm=True,
        accelerator_config=options,
    )  # fmt: skip
    return package.Trainer(model, args).evaluate(data)["eval_loss"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [toy.Stream, toy.SizedStream, toy.Table])
def test_a_short_last_batch_counts_by_its_samples(tmp_path, kind, options):
    """See docs/differences.md, 'Evaluation on a stream that no process hands round'."""
    model, rows = toy.Classifier(), toy.rows(10)
    ours = loss(hf_compat, model, kind(rows), tmp_path, options)
    first, last = (loss(hf_compat, model, toy.Table(part), tmp_path, None) for part in (rows[:7], rows[7:]))
    assert ours == pytest.approx((7 * first + 3 * last) / 10)
    theirs = loss(transformers, model, kind(rows), tmp_path, options)
    if kind is toy.Stream and options is not None:
        assert theirs == pytest.approx((first + last) / 2) and theirs != ours
    else:
        assert theirs == ours


@pytest.mark.parametrize("stated", [3, 7, 25])
def test_a_stream_is_read_to_its_end_whatever_its_length_says(tmp_path, stated):
    class Stream(toy.Stream):
        def __len__(self):
            return stated

    model, rows = toy.Classifier(), toy.rows(17)
    ours, theirs = (loss(package, model, Stream(rows), tmp_path, None) for package in (hf_compat, transformers))
    assert ours == theirs == loss(hf_compat, model, toy.Table(rows), tmp_path, None)


def test_a_loader_of_the_user_is_read_to_its_end_whatever_its_length_says(tmp_path):
    class Loader:
        def __init__(self, rows):
            self.batches, self.ends = [hf_compat.default_data_collator(rows[i : i + 4]) for i in (0, 4, 8)], 0

        def __len__(self):
            return 2

        def __iter__(self):
            yield from self.batches
            self.ends += 1

    model, rows, losses = toy.Classifier(), toy.rows(12), []
    for package in (hf_compat, transformers):
        args = package.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
        trainer, loader = package.Trainer(model, args), Loader(rows)
        trainer.get_eval_dataloader = lambda data=None, loader=loader: loader
        losses.append(trainer.evaluate()["eval_loss"])
        assert loader.ends == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stated", [None, 2, 9])
def test_the_last_batch_of_a_loader_of_the_user_computes_the_result(tmp_path, stated):
    class Loader(DataLoader):
        def __len__(self):
            if stated is None:
                raise TypeError("unknown")
            return stated

    class Own(hf_compat.Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return Loader(toy.Table(toy.rows(10)), batch_size=4)

    asked = []

    def count(prediction, compute_result):
        asked.append(compute_result)
        return {"batches": len(asked)} if compute_result else None

    args = hf_compat.TrainingArguments(str(tmp_path), use_cpu=True, batch_eval_metrics=True, disable_tqdm=True)
    metrics = Own(toy.Classifier(), args, compute_metrics=count).evaluate()
    assert asked == [False, False, True] and metrics["eval_batches"] == 3
