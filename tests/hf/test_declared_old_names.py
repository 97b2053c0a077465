"""Old names that a subclass of the arguments declares as fields again: obeyed, as a release that had them did."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, field

import pytest
import transformers

from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning
from hf_compat.interop.arguments import as_our_arguments


@dataclass
class Declares(TrainingArguments):
    warmup_ratio: float = field(default=0.5)
    evaluation_strategy: str = field(default="steps")
    group_by_length: bool = True
    dispatch_batches: bool = False
    include_inputs_for_metrics: bool = True
    push_to_hub_organization: str | None = None
    place_model_on_device: bool = True


@dataclass
class OfTransformers(transformers.TrainingArguments):
    warmup_ratio: float = field(default=0.5)
    evaluation_strategy: str = field(default="steps")
    group_by_length: bool = False


def declares(**more):
    return Declares("out", use_cpu=True, **more)


def test_the_defaults_that_a_subclass_declares_are_obeyed():
    args = declares()
    assert (args.warmup_steps, args.get_warmup_steps(10), args.warmup_ratio) == (0.5, 5, 0.5)
    assert (args.eval_strategy, args.do_eval, args.eval_steps) == ("steps", True, 500)
    assert (args.train_sampling_strategy, args.include_for_metrics) == ("group_by_length", ["inputs"])
    assert args.accelerator_config.dispatch_batches is False
    assert declares(push_to_hub_organization="us").hub_model_id == "us/out"
    assert declares(place_model_on_device=False).place_model_on_device is False


def test_a_value_that_is_given_counts_by_either_name():
    args = declares(warmup_ratio=0.25, evaluation_strategy="epoch", group_by_length=False)
    assert (args.warmup_steps, args.eval_strategy, args.train_sampling_strategy) == (0.25, "epoch", "random")
    # the default of an old name gives way to today's name, and a count of updates to none but its own
    args = declares(warmup_steps=7, eval_strategy="epoch", accelerator_config={"split_batches": True})
    assert (args.warmup_steps, args.eval_strategy) == (7, "epoch")
    assert (args.accelerator_config.split_batches, args.accelerator_config.dispatch_batches) == (True, False)
    with pytest.raises(ArgumentError, match=r"evaluation_strategy='no'.*eval_strategy='epoch'"):
        declares(evaluation_strategy="no", eval_strategy="epoch")
    with pytest.raises(ArgumentError, match=r"warmup_ratio=1\.5"):
        declares(warmup_ratio=1.5)


@pytest.mark.parametrize("parser", [HfArgumentParser, transformers.HfArgumentParser])
def test_a_command_line_gives_them(parser):
    words = ["--output_dir", "out", "--use_cpu", "--warmup_ratio", "0.2", "--evaluation_strategy", "epoch"]
    (args,) = parser(Declares).parse_args_into_dataclasses(words)
    assert (args.warmup_steps, args.eval_strategy, args.train_sampling_strategy) == (0.2, "epoch", "group_by_length")


def test_setting_one_later_sets_its_successor():
    @dataclass
    class Own(Declares):
        def __post_init__(self):
            self.warmup_ratio = 0.1
            super().__post_init__()
            self.evaluation_strategy = "epoch"

    args = Own("out", use_cpu=True)
    assert (args.warmup_steps, args.eval_strategy, args.evaluation_strategy) == (0.1, "epoch", "epoch")
    args.group_by_length = False
    assert (args.group_by_length, args.train_sampling_strategy) == (False, "random")
    args.evaluation_strategy = "no"
    assert (args.evaluation_strategy, args.eval_strategy) == ("no", "no")


def test_copies_keep_what_was_chosen():
    args = declares(warmup_steps=7, group_by_length=False)
    for copied in (dataclasses.replace(args, learning_rate=1e-3), pickle.loads(pickle.dumps(args))):
        assert (copied.warmup_steps, copied.train_sampling_strategy, copied.eval_strategy) == (7, "random", "steps")
    changed = dataclasses.replace(args, evaluation_strategy="epoch", group_by_length=True)
    assert (changed.eval_strategy, changed.train_sampling_strategy) == ("epoch", "group_by_length")
    assert dataclasses.replace(changed, group_by_length=False).train_sampling_strategy == "random"
    by_old_name = TrainingArguments("out", use_cpu=True, group_by_length=True)
    assert dataclasses.replace(by_old_name, group_by_length=False).train_sampling_strategy == "random"


def test_a_field_of_another_meaning_and_one_without_effect_are_told():
    @dataclass
    class OfAnotherMeaning(TrainingArguments):
        group_by_length: str = "own"
        past_index: int = 3
        fp16_backend: str = "auto"

    with pytest.warns(HfCompatWarning) as told:
        args = OfAnotherMeaning("out", use_cpu=True)
    assert (args.group_by_length, args.train_sampling_strategy) == ("own", "random")
    texts = [str(one.message) for one in told]
    assert len(texts) == 2 and "OfAnotherMeaning" in texts[0] and "group_by_length" in texts[0]
    assert "past_index=3" in texts[1] and told[1].category is InertArgumentWarning


def test_a_run_warms_up_evaluates_and_groups(tmp_path):
    def logs(kind, **more):
        args = kind(
            str(tmp_path), use_cpu=True, max_steps=4, logging_steps=1, eval_steps=2, report_to="none",
            disable_tqdm=True, save_strategy="no", **more,
        )  # fmt: skip
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), eval_dataset=toy.rows(8))
        trainer.train()
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        return rates, [log["step"] for log in trainer.state.log_history if "eval_loss" in log]

    @dataclass
    class Own(TrainingArguments):
        warmup_ratio: float = 0.5
        evaluation_strategy: str = "steps"

    said_today = logs(TrainingArguments, warmup_steps=0.5, eval_strategy="steps")
    assert said_today[1] == [2, 4] and said_today[0][0] == 0.0
    # transformers' own arguments are adopted by the Trainer
    assert logs(Own) == logs(OfTransformers) == said_today


def test_arguments_of_transformers_give_way_to_todays_names(tmp_path):
    args = OfTransformers(str(tmp_path), use_cpu=True, eval_strategy="epoch", warmup_steps=3, report_to="none")
    # 4.46 and 5.0 let a declared default win themselves, when the arguments are made
    made = (args.eval_strategy, args.warmup_steps)
    assert made == ("epoch", 3) or transformers.__version__.startswith(("4.46", "5.0"))
    assert Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), eval_dataset=toy.rows(8)).args is args
    assert (args.eval_strategy, args.warmup_steps, args.warmup_ratio) == (*made, 0.5)
    args.warmup_steps, args.warmup_ratio = 0, 0.25
    assert (args.warmup_steps, args.warmup_ratio) == (0.25, 0.25)


def test_a_release_that_lacks_todays_name_is_followed(tmp_path, monkeypatch):
    @dataclass
    class Groups(transformers.TrainingArguments):
        group_by_length: bool = True

    args = Groups(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.delattr(transformers.TrainingArguments, "train_sampling_strategy", raising=False)  # as 4.57
    vars(args).pop("train_sampling_strategy", None)
    assert as_our_arguments(args).train_sampling_strategy == "group_by_length"
