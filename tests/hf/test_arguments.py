"""TrainingArguments against transformers 5.23: names, defaults, properties, old names."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import transformers.debug_utils
import transformers.training_args

from helpers.toy import Classifier, rows
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.hf import arguments_views, enums, fields
from hf_compat.hf.argument_values import AcceleratorConfig, ArgumentCheck
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.hf.rows import OWN_ROWS, ROWS, Row
from hf_compat.hf.value_types import truth_value, whole_number

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


@pytest.mark.parametrize(
    ("name", "value", "dumped"),
    [
        ("hub_token", None, "<HUB_TOKEN>"),
        ("my_token", None, "<MY_TOKEN>"),
        ("my_api_key", "x", "<MY_API_KEY>"),
        ("my_api_key", None, None),
        ("optim", enums.OptimizerNames.ADAMW_TORCH, "adamw_torch"),
        ("parallelism_config", None, None),
        ("parallelism_config", SimpleNamespace(to_json=lambda: {"a": 1}), {"a": 1}),
        ("report_to", ["wandb", SimpleNamespace()], ["wandb", "SimpleNamespace"]),
        ("debug", [enums.DebugOption.UNDERFLOW_OVERFLOW, 1], ["underflow_overflow", 1]),
        ("any", {"a": {"b": enums.SaveStrategy.NO}, "c_token": 1}, {"a": {"b": "no"}, "c_token": "<C_TOKEN>"}),
        ("any", torch.float16, "float16"),
        ("any", (1, 2), (1, 2)),
        ("any", "a", "a"),
    ],
)
def test_a_value_is_dumped_plainly(name, value, dumped):
    assert arguments_views._plain(name, value) == dumped


def test_a_dump_shares_nothing_that_changes():
    value = {1, 2}
    assert arguments_views._plain("any", value) == value and arguments_views._plain("any", value) is not value
    config = AcceleratorConfig(use_configured_state=False, even_batches=False)
    dumped = arguments_views._plain("accelerator_config", config)
    assert dumped["even_batches"] is False and "use_configured_state" not in dumped


@pytest.mark.parametrize(
    ("name", "told"), [("learning_rat", True), ("_learning_rat", False), ("zzz", False), ("learning_rate", False)]
)
def test_an_attribute_that_is_nearly_an_argument_is_told_once(recwarn, name, told):
    args = TrainingArguments("out", use_cpu=True)
    recwarn.clear()
    for value in (1.0, 2.0):
        setattr(args, name, value)
        assert getattr(args, name) == value
    assert ["did you mean `learning_rate`" in str(one.message) for one in recwarn] == [True] * told


def test_what_is_set_later_is_read_as_in_the_constructor():
    args = TrainingArguments("out", use_cpu=True, metric_for_best_model="f1")
    assert args._infers_direction and args.greater_is_better
    args.weight_decay = "0.5"
    assert args.weight_decay == 0.5 and args._infers_direction
    args.greater_is_better = False
    assert not args._infers_direction
    args.optim = "sgd"
    assert args.optim is enums.OptimizerNames.SGD
    with pytest.raises(ArgumentError, match="comes too late"):
        args.compat = "4"
    args.use_ipex = False
    assert args.use_ipex is False and "use_ipex" not in vars(args)


@pytest.mark.parametrize(
    ("setter", "strategy", "steps", "refused"),
    [
        *((setter, "steps", 0, True) for setter in ("set_logging", "set_evaluate", "set_save")),
        ("set_logging", "steps", 1, False),
        ("set_logging", "no", 0, False),
        ("set_save", "epoch", 0, False),
    ],
)
def test_a_setter_refuses_no_updates_between_two(setter, strategy, steps, refused):
    args = TrainingArguments("out", use_cpu=True)
    if refused:
        with pytest.raises(ArgumentError, match="needs `steps` above 0"):
            getattr(args, setter)(strategy=strategy, steps=steps)
    else:
        assert getattr(args, setter)(strategy=strategy, steps=steps) is args


@pytest.mark.filterwarnings("ignore:`jit_mode_eval")
@pytest.mark.parametrize(
    ("strategy", "evaluates", "jit"), [("no", False, True), ("steps", True, False), ("epoch", True, False)]
)
def test_an_evaluation_that_is_set_is_done(strategy, evaluates, jit):
    args = TrainingArguments("out", use_cpu=True).set_evaluate(strategy, jit_mode=jit)
    assert (args.do_eval, args.jit_mode_eval) == (evaluates, jit)


@pytest.mark.parametrize(
    ("check", "value", "found"),
    [
        (ArgumentCheck("seed", None, 1), "x", "x"),
        (ArgumentCheck("seed", whole_number(), "x"), "x", "x"),  # its default
        (ArgumentCheck("seed", whole_number(), 1), "3", 3),
        (ArgumentCheck("seed", whole_number(), 1), "x", None),
        (ArgumentCheck("mine", whole_number(), 1, is_lenient=True), 0.5, 0.5),
        (ArgumentCheck("mine", whole_number(), 1, is_lenient=True), "3", 3),
        (ArgumentCheck("mine", whole_number(), 1, is_lenient=True), "x", None),
        (ArgumentCheck("mine", truth_value, True), None, False),
        (ArgumentCheck("mine", whole_number(), 1), None, None),
        (ArgumentCheck("bf16", truth_value, True), None, False),
        (ArgumentCheck("seed", whole_number(), 1), None, None),
    ],
)
def test_a_check_reads_a_value(check, value, found):
    if found is None:
        with pytest.raises(ArgumentError, match=f"{check.name}="):
            check.read(value)
    else:
        assert check.read(value) == found


@pytest.mark.parametrize(
    ("name", "is_complete", "near"),
    [
        ("learning_ratee", True, "learning_rate"),
        ("warmup_stepz", True, "warmup_steps"),
        ("learning_ratee", False, None),
        ("_learning_ratee", True, None),
        ("learning_rate", True, None),
        ("known_learning_rate", True, None),
        ("my_own", True, None),
    ],
)
def test_an_attribute_that_is_almost_an_argument_is_told(name, is_complete, near):
    args = type("Own", (TrainingArguments,), {"known_learning_rate": 1.0})("out", use_cpu=True)
    if not is_complete:
        del args.__dict__["mixed_precision"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setattr(args, name, 0.5)
    assert getattr(args, name) == 0.5 and len(told) == (near is not None)
    assert near is None or f"did you mean `{near}`?" in str(told[0].message)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (True, ["simple"]),
        (False, []),
        ("", []),
        ("zero_dp_2 offload", ["zero_dp_2", "offload"]),
        (["zero_dp_3"], ["zero_dp_3"]),
        (("auto_wrap",), ["auto_wrap"]),
        ("zero_dp_4", None),
        (3, None),
    ],
)
def test_fairscales_sharding_is_read_as_4_x_read_it(value, found):
    if found is None:
        with pytest.raises(ValueError, match="sharded_ddp"):
            TrainingArguments("out", use_cpu=True, sharded_ddp=value)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        args = TrainingArguments("out", use_cpu=True, sharded_ddp=value)
    assert args.sharded_ddp == found and any("sharded_ddp" in str(one.message) for one in told) is bool(found)
