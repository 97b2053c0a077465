"""Arguments of a transformers that is newer than what we know: what is set and has no effect is told."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import transformers

from helpers.toy import Classifier, rows
from hf_compat import Trainer, explain
from hf_compat.errors import HfCompatWarning


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """What a next release may have."""

    new_clipping: str = "norm"
    new_names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    hub_next_token: str | None = None


TrainingArguments.__module__ = "transformers.training_args"


def arguments(folder, **values):
    return TrainingArguments(str(folder), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", **values)


def test_what_is_set_is_told_by_the_trainer_and_by_explain(tmp_path):
    args = arguments(tmp_path, new_clipping="value", new_names=["b"], hub_next_token="hf_abc")
    with pytest.warns(HfCompatWarning, match="has no effect.*does not know them") as told:
        trainer = Trainer(Classifier(), args, train_dataset=rows(8))
    assert "new_clipping='value'" in str(told[0].message) and "hf_abc" not in str(told[0].message)
    assert trainer.train().global_step == 1 and trainer.args is args
    for given in (args, arguments(tmp_path, new_clipping="value")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = {one.name: one.becomes for one in explain(given).arguments}
        assert told["new_clipping"].startswith("nothing: an argument of a newer transformers")
    assert "hf_abc" not in str(explain(args))


def test_defaults_say_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", HfCompatWarning)
        Trainer(Classifier(), arguments(tmp_path), train_dataset=rows(8))
    assert not any("new_" in one.name for one in explain(arguments(tmp_path)).arguments)


def test_a_field_of_a_subclass_stays_one(tmp_path):
    @dataclasses.dataclass
    class Own(transformers.TrainingArguments):
        temperature: float = 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error", HfCompatWarning)
        trainer = Trainer(Classifier(), Own(str(tmp_path), temperature=2.0, use_cpu=True), train_dataset=rows(8))
    told = {one.name: one.becomes for one in explain(trainer.args).arguments}
    assert told["temperature"] == "a field of your subclass"
