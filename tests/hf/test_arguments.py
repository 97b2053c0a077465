"""TrainingArguments against transformers 5.23: names, defaults, properties, old names."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path

import pytest
import transformers
import transformers.debug_utils
import transformers.training_args

from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainingArguments
from hf_compat.hf import arguments_views, enums, fields
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ROWS, ROWS, Row

OURS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
THEIRS = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}


def default(field):
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def test_the_fields_are_upstreams_in_name_and_order():
    assert list(OURS) == list(THEIRS)
    assert len(OURS) == 114


@pytest.mark.parametrize("name", list(THEIRS))
def test_defaults_are_upstreams(name):
    assert default(OURS[name]) == default(THEIRS[name])


def test_every_field_has_help_and_a_row():
    assert all(field.metadata["help"] for field in OURS.values())
    assert list(ROWS)[: len(OURS)] == list(OURS)


def test_a_field_fails_at_once_without_its_row_and_a_row_without_its_parts():
    with pytest.raises(TypeError, match="'ejected'"):
        Row("optimizer")
    with pytest.raises(TypeError, match="'row'"):
        fields.arg(1, "A number.")

    @dataclasses.dataclass
    class Newer(TrainingArguments):
        new_in_5_24: int = dataclasses.field(default=1, metadata={"help": "A number."})

    with pytest.raises(ValueError, match="shorter"):
        fields.declare(Newer)
    assert "new_in_5_24" not in ROWS


def test_each_row_has_what_the_places_that_read_it_ask_for():
    subjects = {"run", "optimizer and schedule", "precision and memory", "logs", "evaluation and best model"}
    subjects |= {"checkpoints", "data", "several devices"}
    assert {row.subject for row in (ROWS | OWN_ROWS).values()} == subjects | {None}
    for name, row in ROWS.items():
        if row.ejected in ("refused", "sharded"):
            assert row.says != Row("", "nothing").says, name


def test_every_name_of_every_release_is_known():
    table = (Path(__file__).parent / "names_of_all_releases.txt").read_text().split()
    assert len(table) > 150
    assert [name for name in table if name not in OURS and name not in OLD_NAMES] == []


def test_no_old_name_is_a_name_of_today():
    assert not set(OLD_NAMES) & set(OURS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch", "do_eval": True}),
        ({"evaluate_during_training": True}, {"eval_strategy": "steps"}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"group_by_length": False}, {"train_sampling_strategy": "random"}),
        ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
        (
            {"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]},
            {"include_for_metrics": ["loss", "inputs"]},
        ),
        ({"per_gpu_train_batch_size": 3}, {"per_device_train_batch_size": 3}),
        ({"per_gpu_eval_batch_size": 3}, {"per_device_eval_batch_size": 3}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"push_to_hub_token": "secret"}, {"hub_token": "secret"}),
        ({"push_to_hub_model_id": "me/it"}, {"hub_model_id": "me/it"}),
        ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
        ({"logging_dir": "logs"}, {"logging_dir": "logs"}),
        ({"overwrite_output_dir": True}, {"overwrite_output_dir": True}),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, {"warmup_steps": 7}),
        ({"xpu_backend": "gloo"}, {"ddp_backend": "gloo"}),
        ({"gradient_checkpointing": True}, {"activation_checkpointing": True, "gradient_checkpointing": True}),
        ({"include_num_input_tokens_seen": True}, {"include_num_input_tokens_seen": "all"}),
        ({"report_to": None}, {"report_to": []}),
    ],
)
def test_old_names_and_values(old, new):
    args = TrainingArguments("out", use_cpu=True, **old)
    for name, value in new.items():
        assert getattr(args, name) == value


def test_old_names_without_a_meaning_change_nothing():
    args = TrainingArguments("out", use_cpu=True, fp16_opt_level="O1", sharded_ddp="", use_ipex=False)
    assert args.to_dict() == TrainingArguments("out", use_cpu=True).to_dict()


def test_a_ratio_of_one_warms_up_all_the_way():
    args = TrainingArguments("out", warmup_ratio=1.0, use_cpu=True)
    for steps in (1, 7, 1000, 123_457):
        assert args.get_warmup_steps(steps) == steps
    assert TrainingArguments("out", warmup_steps=1.0, use_cpu=True).get_warmup_steps(1000) == 1
    assert TrainingArguments("out", warmup_ratio=0.1, use_cpu=True).get_warmup_steps(101) == math.ceil(10.1)


def test_a_replacement_keeps_what_stands_beside_the_fields():
    """`dataclasses.replace` hands over the fields alone."""
    given = {"async_save": True, "logging_dir": "logs", "overwrite_output_dir": True, "place_model_on_device": False}
    args = TrainingArguments("out", use_cpu=True, compat="4", warmup_ratio=0.1, per_gpu_train_batch_size=3, **given)
    copied = dataclasses.replace(args, learning_rate=1e-3)
    assert {name: getattr(copied, name) for name in given} == given and copied.compat == "4"
    assert copied.per_gpu_train_batch_size == 3 and copied.warmup_ratio == 0.1 and copied.learning_rate == 1e-3
    assert copied.report_to == args.report_to and copied == dataclasses.replace(args, learning_rate=1e-3)
    changed = dataclasses.replace(copied, async_save=False, compat="5", logging_dir="other")
    assert (changed.async_save, changed.compat, changed.logging_dir) == (False, "5", "other")
    by_old = dataclasses.replace(args, evaluation_strategy="epoch", warmup_ratio=0.3, split_batches=True)
    assert by_old.eval_strategy == "epoch" and by_old.warmup_steps == by_old.warmup_ratio == 0.3
    assert by_old.accelerator_config.split_batches is True and args.accelerator_config.split_batches is False


def test_old_names_work_in_subclasses():
    @dataclasses.dataclass
    class Own(TrainingArguments):
        temperature: float = 0.9

    args = Own("out", temperature=0.5, evaluation_strategy="epoch", use_cpu=True)
    assert args.temperature == 0.5 and args.eval_strategy == "epoch"
    assert args.to_dict()["temperature"] == 0.5
    assert dataclasses.replace(args, learning_rate=1.0).learning_rate == 1.0


@pytest.mark.parametrize(
    "name",
    [
        "train_batch_size",
        "eval_batch_size",
        "world_size",
        "process_index",
        "local_process_index",
        "should_log",
        "should_save",
        "n_gpu",
        "device",
    ],
)
def test_properties_are_upstreams(name):
    values = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "use_cpu": True}
    assert getattr(TrainingArguments("out", **values), name) == getattr(
        transformers.TrainingArguments("out", **values), name
    )


def test_dumps_are_upstreams():
    values = {
        "use_cpu": True,
        "hub_token": "secret",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "eval_strategy": "steps",
    }
    ours, theirs = TrainingArguments("out", **values), transformers.TrainingArguments("out", **values)
    same = {name: value for name, value in theirs.to_dict().items() if name != "accelerator_config"}
    assert {name: ours.to_dict()[name] for name in same} == same
    assert json.loads(ours.to_json_string()) == ours.to_dict()
    assert set(ours.to_sanitized_dict()) == set(theirs.to_sanitized_dict())
    assert "secret" not in ours.to_json_string() + str(ours) + repr(ours)


def test_a_secret_of_a_subclass_stays_one():
    @dataclasses.dataclass
    class Keys(TrainingArguments):
        api_key: str | None = None

    assert Keys("out").to_dict()["api_key"] is None
    dump = Keys("out", api_key="sk-1").to_dict()
    assert dump["api_key"] == "<API_KEY>" and "sk-1" not in Keys("out", api_key="sk-1").to_json_string()


@pytest.mark.parametrize(("generation", "unset"), [("4", True), ("5", None)])
def test_where_a_model_is_placed_is_left_open_as_in_its_generation(monkeypatch, generation, unset):
    monkeypatch.setattr(arguments_views, "generation_beside", lambda: generation)
    assert TrainingArguments("out", use_cpu=True).place_model_on_device is unset
    for chosen in (True, False):
        assert TrainingArguments("out", use_cpu=True, place_model_on_device=chosen).place_model_on_device is chosen


def test_log_levels_are_upstreams():
    for name, level in transformers.logging.log_levels.items():
        theirs = transformers.TrainingArguments("out", use_cpu=True, log_level=name).get_process_log_level()
        assert TrainingArguments("out", use_cpu=True, log_level=name).get_process_log_level() == theirs == level


def test_arguments_rebuild_from_their_dump_and_pickle():
    args = TrainingArguments("out", use_cpu=True, optim="sgd", warmup_ratio=1.0, eval_strategy="epoch", fsdp_config={})
    again = TrainingArguments(**args.to_dict())
    assert again.to_dict() == args.to_dict()
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()


@pytest.mark.parametrize("name", [name for name in dir(transformers.TrainingArguments) if name.startswith("set_")])
def test_setters_do_what_upstreams_do(name):
    given = {
        "set_push_to_hub": {"model_id": "me/it"},
        "set_evaluate": {"strategy": "steps", "steps": 7, "delay": 2},
        "set_logging": {"steps": 9},
        "set_save": {"strategy": "epoch"},
    }.get(name, {})
    ours, theirs = TrainingArguments("out", use_cpu=True), transformers.TrainingArguments("out", use_cpu=True)
    assert getattr(ours, name)(**given) is ours
    getattr(theirs, name)(**given)
    changed = {field for field in THEIRS if field not in ("accelerator_config", "report_to")}
    assert {n: getattr(ours, n) for n in changed} == {n: getattr(theirs, n) for n in changed}


def test_upstreams_parser_reads_our_fields():
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [
            "--output_dir",
            "out",
            "--use_cpu",
            "--learning_rate",
            "0.1",
            "--lr_scheduler_kwargs",
            '{"num_cycles": "3"}',
            "--optim",
            "sgd",
        ]
    )
    assert (args.learning_rate, args.lr_scheduler_kwargs, args.optim.value) == (0.1, {"num_cycles": 3}, "sgd")


def test_a_class_in_place_of_its_options_is_refused_as_upstream_does(tmp_path):
    @dataclasses.dataclass
    class Own(TrainingArguments):
        accelerator_config: type = dataclasses.field(default=AcceleratorConfig)

    for make in (lambda: TrainingArguments(str(tmp_path), accelerator_config=AcceleratorConfig), Own):
        with pytest.raises(NotImplementedError, match="Tried passing in a callable to `accelerator_config`"):
            make()


def test_two_numbers_of_micro_batches_are_refused_by_the_trainer_and_not_before(tmp_path):
    def config(steps):
        return {"gradient_accumulation_kwargs": {"num_steps": steps}}

    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, accelerator_config=config(10))
    with pytest.raises(ValueError, match=r"The `AcceleratorConfig`'s `num_steps` is set but"):
        Trainer(Classifier(), args, train_dataset=rows(8))
    args = TrainingArguments(str(tmp_path), accelerator_config=config(10))
    for _ in range(2):  # a second Trainer finds what the first one has set
        assert Trainer(Classifier(), args, train_dataset=rows(8)).args.gradient_accumulation_steps == 10
    assert dataclasses.replace(args).gradient_accumulation_steps == 10


def test_a_job_on_kubeflow_reports_there_besides(monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://nowhere")
    for given, expected in (("none", ["kubeflow"]), (["kubeflow", "tensorboard"], ["kubeflow", "tensorboard"])):
        theirs = transformers.TrainingArguments("out", report_to=given).report_to
        assert TrainingArguments("out", report_to=given).report_to == theirs == expected
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    assert TrainingArguments("out").report_to == transformers.TrainingArguments("out").report_to == []


def test_only_the_options_of_accelerate_leave_out_how_they_were_set_up():
    mine = {"use_configured_state": 1, "use_reentrant": False}
    args = TrainingArguments("out", use_cpu=True, gradient_checkpointing_kwargs=mine)
    assert args.to_dict()["gradient_checkpointing_kwargs"] == mine
    assert "use_configured_state" not in args.to_dict()["accelerator_config"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (transformers.trainer_utils, "IntervalStrategy"),
        (transformers.trainer_utils, "SaveStrategy"),
        (transformers.trainer_utils, "HubStrategy"),
        (transformers.trainer_utils, "SchedulerType"),
        (transformers.training_args, "ParallelMode"),
        (transformers.training_args, "OptimizerNames"),
        (transformers.debug_utils, "DebugOption"),
    ],
)
def test_enums_have_upstreams_members_in_its_order(module, name):
    """The choices of a command line are listed in this order."""
    mine, theirs = ([(one.name, one.value) for one in getattr(place, name)] for place in (enums, module))
    assert mine == theirs


def test_arguments_are_printed_as_upstream_prints_them():
    values = {
        "use_cpu": True,
        "hub_token": "secret",
        "debug": "underflow_overflow",
        "eval_strategy": "epoch",
        "report_to": ["tensorboard"],
        "accelerator_config": {"split_batches": True},
        "lr_scheduler_kwargs": {"num_cycles": 2},
    }
    for given in ({"use_cpu": True}, values):
        mine, theirs = TrainingArguments("out", **given), transformers.TrainingArguments("out", **given)
        assert str(mine) == repr(mine) == str(theirs)
