"""Arguments of transformers, or of a script's subclass of them, stay the object that they are."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat import HFModule, Trainer, TrainerCallback
from hf_compat.errors import ArgumentError, HfCompatWarning
from hf_compat.hf.argument_values import checks_of
from hf_compat.interop.arguments import _adopted_class, as_our_arguments


def test_what_a_script_calls_compat_does_not_choose_a_profile(tmp_path):
    args = script_arguments(tmp_path)
    args.compat = args.margins = "4"
    ours = as_our_arguments(args)
    assert (ours.compat, ours.margins) == (hf_compat.TrainingArguments(str(tmp_path)).compat, "4")


@dataclasses.dataclass
class ScriptArguments(transformers.TrainingArguments):
    margin: float = 0.5
    learning_rate: float = 1e-2

    @property
    def doubled(self):
        return 2 * self.margin

    @property
    def place_model_on_device(self):
        return False

    def describe(self):
        return f"{type(self).__name__} {self.margin} {self.num_train_epochs}"


def script_arguments(tmp_path, **values):
    base = {"use_cpu": True, "max_steps": 2, "disable_tqdm": True, "logging_steps": 1, "report_to": "none"}
    return ScriptArguments(str(tmp_path / "out"), **{**base, **values})


def trainer_of(args, **more):
    return Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), **more)


def test_the_object_is_kept_with_what_its_class_has(tmp_path):
    args = script_arguments(tmp_path)
    seen = []

    class Sees(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(args)

    trainer = trainer_of(args, callbacks=[Sees()])
    assert trainer.args is args and isinstance(args, (ScriptArguments, hf_compat.TrainingArguments))
    assert isinstance(args, ScriptArguments) and isinstance(args, transformers.TrainingArguments)
    assert (args.doubled, args.describe(), args.place_model_on_device) == (1.0, "ScriptArguments 0.5 3.0", False)
    trainer.train()
    assert all(one is args for one in seen) and len(seen) == 2
    assert trainer.state.log_history[0]["learning_rate"] == 1e-2


def test_later_edits_count(tmp_path):
    args = script_arguments(tmp_path)
    trainer = trainer_of(args)
    args.max_steps, args.margin, args.learning_rate = 4, 2, "3e-3"
    assert trainer.train().global_step == 4
    assert (trainer.args.doubled, trainer.args.learning_rate) == (4, 3e-3)
    assert trainer.state.log_history[0]["learning_rate"] == 3e-3
    with pytest.raises(ArgumentError, match="save_total_limit='x'"):
        args.save_total_limit = "x"


def test_a_second_trainer_and_the_other_trainer_take_the_same_object(tmp_path):
    args = script_arguments(tmp_path, save_strategy="no")
    ours = trainer_of(args)
    assert trainer_of(args).args is args
    ours.train()
    theirs = transformers.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16))
    theirs.train()
    assert theirs.args is args and theirs.state.global_step == 2


def test_copies_stay_what_they_are(tmp_path):
    args = script_arguments(tmp_path)
    trainer_of(args)
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert isinstance(other, ScriptArguments) and isinstance(other, hf_compat.TrainingArguments)
        assert other.to_dict() == args.to_dict() and other.doubled == 1.0
    replaced = dataclasses.replace(args, margin=3.0, max_steps=1)
    assert type(replaced) is ScriptArguments and (replaced.doubled, replaced.max_steps) == (6.0, 1)
    assert trainer_of(replaced).train().global_step == 1


def test_a_value_that_cannot_work_leaves_the_object_as_it_was(tmp_path):
    args = script_arguments(tmp_path)
    vars(args)["eval_accumulation_steps"] = "x"
    with pytest.raises(ArgumentError, match="eval_accumulation_steps='x'"):
        trainer_of(args)
    assert type(args) is ScriptArguments and args.eval_accumulation_steps == "x"


def test_only_looking_changes_nothing(tmp_path):
    args = script_arguments(tmp_path)
    hf_compat.explain(args)
    assert type(args) is ScriptArguments


def test_the_dumps_have_the_fields_of_the_script(tmp_path):
    args = script_arguments(tmp_path)
    before = args.to_dict()
    after = trainer_of(args).args.to_dict()
    assert set(before) == set(after) and after["margin"] == 0.5
    assert {name for name in before if before[name] != after[name]} <= {"accelerator_config"}


def test_a_native_module_keeps_the_object_too(tmp_path):
    args = script_arguments(tmp_path)
    assert HFModule(toy.Classifier(), args).steps.args is args


def test_a_class_that_cannot_be_extended_is_copied_with_a_warning(tmp_path):
    class Own(type):
        pass

    class Closed(transformers.TrainingArguments, metaclass=Own):
        pass

    args = Closed(str(tmp_path), use_cpu=True)
    with pytest.warns(HfCompatWarning, match="later edits of them do not count"):
        trainer = trainer_of(args)
    assert trainer.args is not args and trainer.args.output_dir == str(tmp_path)


def test_an_old_name_that_is_all_a_release_has_counts_where_values_are_checked(tmp_path):
    fields = [
        ("output_dir", str),
        *((name, object, None) for name in ("evaluation_strategy", "load_best_model_at_end")),
    ]
    fields += [("save_strategy", str, "steps"), ("use_cpu", bool, True)]
    older = dataclasses.make_dataclass("TrainingArguments", fields)
    older.__module__ = "transformers.training_args"  # as that of 4.40
    args = as_our_arguments(older(str(tmp_path), evaluation_strategy="steps", load_best_model_at_end=True))
    assert (args.eval_strategy, args.evaluation_strategy, args.load_best_model_at_end) == ("steps", "steps", True)


def made_arguments(module="transformers.training_args", base=(), **content):
    """A class of arguments as a release of transformers has it, or a script's subclass."""
    made = type("Own" if base else "TrainingArguments", base, {"__module__": module, **content})
    return dataclasses.dataclass(made)


@pytest.mark.parametrize(
    ("of_script", "changed"),
    [
        ({}, set()),
        ({"to_dict": lambda self: {}, "__str__": lambda self: ""}, {"to_dict", "__str__"}),
        ({"device": property(lambda self: "mine")}, {"device"}),
        ({"evaluation_strategy": "no"}, {"evaluation_strategy"}),
        ({"__annotations__": {"seed": str}, "seed": "x"}, set()),
    ],
)
def test_a_class_of_a_script_gets_what_it_does_not_override(of_script, changed):
    release = made_arguments(
        __annotations__={"output_dir": str, "seed": int}, output_dir="o", seed=1, evaluation_strategy="no",
        place_model_on_device=False,
    )  # fmt: skip
    own = made_arguments("script", (release,), **of_script)
    content = vars(_adopted_class(made_arguments("script", (own,))))
    wanted = {"to_dict", "__str__", "__getattr__", "device", "get_warmup_steps", "evaluation_strategy"}
    assert wanted - content.keys() == changed
    assert not content.keys() & {"__init__", "__post_init__", "__eq__", "seed", "output_dir"}
    assert isinstance(content["place_model_on_device"], property)  # today's, though it is an old name as well
    assert content["place_model_on_device"].fget.__module__.startswith("hf_compat.")
    check = _adopted_class(own)._checks()["seed"]
    assert (check == checks_of(hf_compat.TrainingArguments, hf_compat.TrainingArguments)["seed"]) is (
        "seed" not in of_script
    )


def test_the_old_names_of_a_release_follow_their_successors():
    release = made_arguments(
        __annotations__={"output_dir": str, "evaluation_strategy": str}, output_dir="o", evaluation_strategy="no"
    )
    args = release()
    adopted = object.__new__(_adopted_class(release))
    vars(adopted).update(vars(hf_compat.TrainingArguments(output_dir="o", eval_strategy="epoch")))
    assert (args.evaluation_strategy, adopted.evaluation_strategy) == ("no", "epoch")
