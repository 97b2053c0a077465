"""An error of the first updates or of an evaluation carries what a preflight would have said."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from helpers import toy
from hf_compat import Trainer, TrainerCallback
from hf_compat.tools.preflight.report import way_out_of


class Classes(nn.Module):
    """A classifier without a configuration."""

    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.outer(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(labels, **more):
    return [{"x": torch.ones(4), "labels": label, **more} for label in labels]


def blocks(tokens=(1, 2, 3), label=1):
    return [{"input_ids": list(tokens), "labels": label} for _ in range(4)]


class HalfMade(Trainer):
    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.train_dataset = model, args, train_dataset


def listed(features):
    return {"x": [one["x"].tolist() for one in features], "labels": torch.tensor([one["labels"] for one in features])}


def two_arguments(predictions, labels):
    return {}


CRASHES = {
    "labels beyond the classes": (toy.tiny_bert, blocks(label=7), {}, "labels=7, and the model has 3 classes: 0 to 2"),
    "ids beyond the vocabulary": (toy.tiny_bert, blocks(tokens=(1, 99)), {}, "the token 99 in 'input_ids'"),
    "labels beyond the logits": (Classes, rows([0, 5, 1, 2]), {}, "as many classes"),
    "labels that are fractions": (Classes, rows([0.0, 1.0, 2.0, 1.0]), {}, "'labels' holds fractions.*long"),
    "labels that are texts": (Classes, rows(["a", "b", "c", "d"]), {}, r"Of 'labels' \(str\) no tensor can be made"),
    "fractions in a classifier": (toy.tiny_bert, blocks(label=1.5), {}, "'labels' holds fractions"),
    "a batch of lists": (Classes, rows([0, 1, 2, 1]), {"data_collator": listed}, "lists or texts in 'x'"),
}


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("name", CRASHES)
def test_an_error_of_the_first_update_carries_the_findings(make_args, name):
    model, data, parts, words = CRASHES[name]
    trainer = Trainer(model(), make_args(max_steps=1), train_dataset=data, **parts)
    with pytest.raises(Exception) as caught:
        trainer.train()
    assert re.search(f"hf_compat: .*{words}", notes_of(caught.value)), (caught.value, notes_of(caught.value))


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_of_an_evaluation_carries_the_findings(make_args, method):
    trainer = Trainer(toy.tiny_bert(), make_args(), eval_dataset=blocks(label=7))
    with pytest.raises(IndexError) as caught:
        trainer.evaluate() if method == "evaluate" else trainer.predict(blocks(label=7))
    assert "labels=7, and the model has 3 classes" in notes_of(caught.value)


# The failing programs again, each as its hint says, and words of the hint.
MENDED = {
    "labels beyond the classes": (toy.tiny_bert, blocks(label=2), {}, "0 to 2"),
    "ids beyond the vocabulary": (toy.tiny_bert, blocks(tokens=(1, 2)), {}, "vocabulary"),
    "labels beyond the logits": (Classes, rows([0, 2, 1, 2]), {}, "classes"),
    "labels that are fractions": (Classes, rows([0, 1, 2, 1]), {}, r"\.long\(\)"),
    "labels that are texts": (Classes, rows([0, 1, 2, 1]), {}, "convert"),
    "fractions in a classifier": (toy.tiny_bert, blocks(label=1), {}, r"\.long\(\)"),
    "a batch of lists": (Classes, rows([0, 1, 2, 1]), {}, "`data_collator` make tensors"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_hint_that_is_followed_gives_a_run(make_args, name):
    (model, data, parts, _), (mended, right, others, words) = CRASHES[name], MENDED[name]
    with pytest.raises(Exception) as caught:
        Trainer(model(), make_args(max_steps=1), train_dataset=data, **parts).train()
    assert re.search(words, notes_of(caught.value)), notes_of(caught.value)
    trainer = Trainer(mended(), make_args(max_steps=1), train_dataset=right, **others)
    assert trainer.train().training_loss > 0 and trainer.state.global_step == 1


def test_metrics_of_two_arguments_are_explained(make_args):
    trainer = Trainer(Classes(), make_args(), eval_dataset=rows([0, 1]), compute_metrics=two_arguments)
    with pytest.raises(TypeError) as caught:
        trainer.evaluate()
    assert "one `EvalPrediction`, and takes (predictions, labels)" in notes_of(caught.value)
    assert len(caught.value.__notes__) == 1
    trainer.compute_metrics = lambda p: {"rows": len(p.predictions)}
    assert trainer.evaluate()["eval_rows"] == 2


def test_a_table_in_place_of_samples_is_explained(make_args):
    import pandas

    table = pandas.DataFrame({"x": [1.0, 2.0], "labels": [0, 1]})
    with pytest.raises(Exception) as caught:
        Trainer(Classes(), make_args(max_steps=1), train_dataset=table).train()
    assert "`train_dataset` is a table" in notes_of(caught.value)
    assert "table.to_dict('records')" in notes_of(caught.value)
    columns = {"labels": table["labels"], "x": [[1.0] * 4] * 2}
    Trainer(Classes(), make_args(max_steps=1), train_dataset=pandas.DataFrame(columns).to_dict("records")).train()


def test_a_forgotten_constructor_of_a_model_is_refused(make_args):
    class HalfModel(nn.Module):
        def __init__(self):
            self.size = 3

    with pytest.raises(ValueError, match=r"HalfModel has not called that of `torch.nn.Module`"):
        Trainer(HalfModel(), make_args())


def test_a_forgotten_constructor_is_explained(make_args):
    trainer = HalfMade(Classes(), make_args(max_steps=1), rows([0, 1]))
    with pytest.raises(AttributeError) as caught:
        trainer.train()
    assert "call `super().__init__(…)`" in notes_of(caught.value)


def test_later_errors_and_our_own_carry_none(make_args):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("Target 7 is out of bounds")

    args = make_args(per_device_train_batch_size=1, max_steps=4)
    with pytest.raises(RuntimeError) as caught:
        Trainer(Classes(), args, train_dataset=rows([0, 1, 2, 1]), callbacks=[Failing()]).train()
    assert not notes_of(caught.value)
    with pytest.raises(ValueError, match="requires a train_dataset") as caught:
        Trainer(Classes(), args).train()
    assert "hf_compat:" not in notes_of(caught.value)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (
            lambda: torch.zeros(2, 1).scatter(-1, torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1)),
            "compare both shapes",
        ),
        (lambda: torch.zeros(2, 1)[torch.tensor([0, 5])], "compare both shapes"),
        (lambda: nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([2])), "labels count from 0"),
    ],
)
def test_an_index_out_of_bounds_is_a_label_only_in_a_loss(fails, says):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        fails()
    assert says in (way_out_of(caught.value) or "")
