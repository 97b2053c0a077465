"""In a short last batch of an evaluation each sample counts once in `eval_loss`, under any data option."""

from __future__ import annotations

import pytest
import toy
import transformers

import hf_compat

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
