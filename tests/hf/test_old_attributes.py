"""Every name that was ever a field or property of TrainingArguments, as an attribute: read, and set later."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.hf import legacy
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.runtime.launch import Launch, assuming

NAMES = (Path(__file__).parent / "names_of_all_releases.txt").read_text().split()
PROPERTIES = (
    "train_batch_size", "eval_batch_size", "ddp_timeout_delta", "_setup_devices", "device", "n_gpu", "parallel_mode",
    "world_size", "process_index", "local_process_index", "should_log", "should_save", "place_model_on_device",
    "_no_sync_in_gradient_accumulation",
)  # fmt: skip
# What 4.57.6 gives on a CPU: `vars(transformers.TrainingArguments("out", use_cpu=True))`
OF_4_57 = {
    "overwrite_output_dir": False, "per_gpu_train_batch_size": None, "per_gpu_eval_batch_size": None,
    "warmup_ratio": 0.0, "save_safetensors": True, "use_mps_device": False, "jit_mode_eval": False,
    "fp16_opt_level": "O1", "half_precision_backend": "auto", "tpu_num_cores": None, "tpu_metrics_debug": False,
    "past_index": -1, "fsdp_min_num_params": 0, "fsdp_transformer_layer_cls_to_wrap": None, "adafactor": False,
    "group_by_length": False, "use_legacy_prediction_loop": False, "include_inputs_for_metrics": False,
    "fp16_backend": "auto", "push_to_hub_model_id": None, "push_to_hub_organization": None, "push_to_hub_token": None,
    "mp_parameters": "", "torchdynamo": None, "ray_scope": "last", "include_tokens_per_second": False, "_n_gpu": 0,
}  # fmt: skip


def arguments(**values):
    return TrainingArguments("out", use_cpu=True, **values)


def test_every_name_of_every_release_can_be_read():
    args = arguments()
    assert len(NAMES) == 153
    assert [name for name in (*NAMES, *PROPERTIES) if not hasattr(args, name)] == []
    with pytest.raises(AttributeError, match="evaluation_strateg'"):
        args.evaluation_strateg  # noqa: B018


@pytest.mark.parametrize("name", OF_4_57)
def test_what_nobody_has_set_gives_what_it_gave(name):
    assert getattr(arguments(), name) == OF_4_57[name]


GIVEN = {
    "evaluation_strategy": "epoch", "evaluate_during_training": True, "no_cuda": True, "warmup_ratio": 1.0,
    "logging_dir": "logs", "group_by_length": True, "include_inputs_for_metrics": True,
    "include_tokens_per_second": True, "per_gpu_train_batch_size": 3, "per_gpu_eval_batch_size": 5, "adafactor": True,
    "push_to_hub_token": "secret", "push_to_hub_model_id": "it", "push_to_hub_organization": "us",
    "overwrite_output_dir": True, "save_safetensors": False, "torchdynamo": "eager", "xpu_backend": "gloo",
    "tpu_metrics_debug": True, "dispatch_batches": False, "split_batches": True, "fsdp_min_num_params": 7,
    "fsdp_transformer_layer_cls_to_wrap": "Block", "place_model_on_device": False, "_n_gpu": 0, "fp16_backend": "amp",
    "fp16_opt_level": "O2", "half_precision_backend": "cuda_amp", "jit_mode_eval": True, "model_parallel": True,
    "mp_parameters": "{}", "past_index": 2, "ray_scope": "all", "sharded_ddp": ["simple"], "tp_size": 2,
    "tpu_num_cores": 8, "use_ipex": True, "use_legacy_prediction_loop": True, "use_mps_device": True,
}  # fmt: skip


def test_there_is_a_value_for_every_old_name():
    assert GIVEN.keys() == OLD_NAMES.keys()


@pytest.mark.filterwarnings("ignore::hf_compat.errors.InertArgumentWarning")
@pytest.mark.parametrize("name", GIVEN)
def test_what_was_given_is_given_back_however_it_came(name):
    made = arguments(**{name: GIVEN[name]})
    set_later = arguments()
    setattr(set_later, name, GIVEN[name])
    for args in (made, set_later, copy.deepcopy(made), pickle.loads(pickle.dumps(set_later))):
        assert getattr(args, name) == GIVEN[name]
    derived = {
        "do_eval",
        "eval_steps",
        "torch_compile",
        "torch_compile_backend",
    }  # by the constructor alone, as of today's names
    assert {n for n, v in made.to_dict().items() if v != set_later.to_dict()[n]} <= derived


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("evaluation_strategy", "steps", "eval_strategy", transformers.IntervalStrategy.STEPS),
        ("evaluate_during_training", False, "eval_strategy", "no"),
        ("no_cuda", False, "use_cpu", False),
        ("per_gpu_train_batch_size", "4", "per_device_train_batch_size", 4),
        ("group_by_length", False, "train_sampling_strategy", "random"),
        ("include_inputs_for_metrics", False, "include_for_metrics", ["loss"]),
        ("include_tokens_per_second", False, "include_num_input_tokens_seen", "no"),
        ("adafactor", False, "optim", "adamw_torch_fused"),
        ("warmup_ratio", 0, "warmup_steps", 0),
        ("split_batches", True, "accelerator_config", None),
    ],
)
def test_setting_an_old_name_sets_its_successor(old, value, new, expected):
    args = arguments(
        evaluate_during_training=True, group_by_length=True, adafactor=True, warmup_ratio=0.3,
        include_for_metrics=["inputs", "loss"], include_tokens_per_second=True, dispatch_batches=False,
    )  # fmt: skip
    setattr(args, old, value)
    if expected is None:
        assert (args.accelerator_config.split_batches, args.accelerator_config.dispatch_batches) == (True, False)
    else:
        assert getattr(args, new) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("evaluation_strategy", "often"), ("per_gpu_train_batch_size", -1), ("warmup_ratio", float("nan")),
     ("no_cuda", "maybe"), ("past_index", "x"), ("sharded_ddp", "triple"), ("fp16_opt_level", "O9")],
)  # fmt: skip
def test_an_old_name_is_checked_as_its_successor(name, value):
    args = arguments()
    with pytest.raises(ArgumentError, match=name):
        setattr(args, name, value)
    assert args.to_dict() == arguments().to_dict()
    with pytest.raises(ArgumentError, match=name):
        arguments(**{name: value})


def test_a_name_without_effect_says_so_when_it_is_set():
    args = arguments()
    with pytest.warns(InertArgumentWarning, match="use_legacy_prediction_loop=True"):
        args.use_legacy_prediction_loop = True


def test_a_copy_is_on_its_own():
    args = arguments(logging_dir="logs")
    other = copy.copy(args)
    other.logging_dir, other.overwrite_output_dir = "elsewhere", True
    assert (args.logging_dir, args.overwrite_output_dir, other.logging_dir) == ("logs", False, "elsewhere")


@pytest.mark.filterwarnings("ignore:.*another meaning:hf_compat.errors.HfCompatWarning")
def test_a_subclass_reads_them_while_it_is_made_and_its_own_go_first():
    @dataclasses.dataclass
    class Own(TrainingArguments):
        group_by_length: str = "own"
        seen: object = None

        def __post_init__(self):
            super().__post_init__()
            self.seen = (self.overwrite_output_dir, self.evaluation_strategy, self.logging_dir)

        @property
        def past_index(self):
            return 99

    args = Own("out", overwrite_output_dir=True, evaluation_strategy="epoch", logging_dir="logs", use_cpu=True)
    assert args.seen == (True, "epoch", "logs") and args.past_index == 99
    args.group_by_length = "still"
    assert (args.group_by_length, args.train_sampling_strategy) == ("still", "random")


def test_a_comma_behind_a_declared_old_name_leaves_the_name_what_it_is():
    """`field(…),` is a tuple. In 4.45 a value that the command line gives is obeyed, and the tuple is refused."""

    @dataclasses.dataclass
    class Own(TrainingArguments):
        evaluation_strategy: str = (dataclasses.field(default="steps"),)

    assert Own("out", evaluation_strategy="epoch", use_cpu=True).eval_strategy == "epoch"
    with pytest.raises(ArgumentError, match="evaluation_strategy="):
        Own("out", use_cpu=True)


def test_arguments_of_transformers_have_them_once_a_trainer_runs_on_them(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True)
    args.evaluation_strategy, args.per_gpu_train_batch_size = "steps", 2  # as a script of 4.19 sets them
    args.eval_steps, args.overwrite_output_dir = 1, True
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
    assert (args.evaluation_strategy, args.eval_strategy, args.train_batch_size) == ("steps", "steps", 2)
    assert [name for name in NAMES if not hasattr(args, name)] == [] and args.overwrite_output_dir is True
    args.evaluation_strategy = "no"
    assert args.eval_strategy == "no" and trainer.train().global_step == 2


@pytest.mark.parametrize(("release", "ranks"), [("4.57.6", (0, 1)), ("4.46.3", (0, 1)), ("5.0.0", (-1, -1))])
def test_the_local_rank_is_that_of_the_release_beside(release, ranks, monkeypatch):
    """4.x sets it to the process's own when the arguments are made, 5.x leaves what old launchers have passed."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", release)
    assert (arguments().local_rank, arguments(local_rank=0).local_rank) == (ranks[0], 0)
    with assuming(Launch(process_index=1, local_process_index=1, world_size=2, local_world_size=2), "cpu"):
        assert arguments().local_rank == ranks[1]


@pytest.mark.parametrize(
    ("ratio", "steps"), [(0, 0), (0.5, 0.5), (1, math.nextafter(1.0, 0.0)), (-0.5, None), (1.5, None)]
)
def test_a_ratio_of_warmup_is_a_share(ratio, steps):
    if steps is None:
        with pytest.raises(ValueError, match="warmup_ratio"):
            TrainingArguments("out", use_cpu=True, warmup_ratio=ratio)
    else:
        args = TrainingArguments("out", use_cpu=True, warmup_ratio=ratio)
        assert args.warmup_steps == steps and args.warmup_ratio == ratio


@pytest.mark.parametrize("name", OLD_NAMES)
def test_each_old_name_says_in_which_releases_it_was(name):
    first, _, last = OLD_NAMES[name].lifetime.partition("-")
    releases = [tuple(map(int, one.removesuffix(".0.dev0").split("."))) for one in (first, last or first)]
    assert all(len(one) == 2 for one in releases) and (3, 0) <= releases[0] <= releases[1] <= (5, 14)


@pytest.mark.parametrize(
    ("row", "value", "translated"),
    [
        ("flag", True, {"use_cpu": True}),
        ("flag", False, {}),
        ("item", True, {"include_for_metrics": ["inputs"]}),
        ("item", False, {}),
        ("renamed", 3, {"seed": 3}),
        ("renamed", 0, {"seed": 0}),
        ("renamed", None, {}),
    ],
)
def test_what_an_old_name_asks_for(row, value, translated):
    rows = {
        "flag": legacy._flag("4.0", "use_cpu", True),
        "item": legacy._item("4.0", "include_for_metrics", "inputs", ["inputs"]),
        "renamed": legacy._renamed("4.0", "seed"),
    }
    assert rows[row].translate(value) == translated


@pytest.mark.parametrize("is_on", [True, False])
def test_a_flag_is_read_and_switched_off(is_on):
    args = TrainingArguments("out", use_cpu=is_on, include_for_metrics=["inputs", "loss"] if is_on else ["loss"])
    flag, own = legacy._flag("4.0", "use_cpu", True), legacy._flag("4.0", "seed", 3, lambda args: "its own")
    item = legacy._item("4.0", "include_for_metrics", "inputs", ["inputs"])
    assert (flag.read(args), item.read(args), own.read(args)) == (is_on, is_on, "its own")
    assert flag.off(args) == {"use_cpu": False} and own.off(args) == {"seed": 42}
    assert item.off(args) == {"include_for_metrics": ["loss"]}


@pytest.mark.parametrize(
    ("ratio", "steps"), [(None, None), (0, None), (0.0, None), (0.25, 0.25), (1, math.nextafter(1, 0))]
)
def test_a_ratio_becomes_steps(ratio, steps):
    assert legacy._warmup_steps(ratio) == ({} if steps is None else {"warmup_steps": steps})


@pytest.mark.parametrize(
    ("given", "steps", "ratio"),
    [(0.25, 0.25, 0.25), (1, math.nextafter(1.0, 0.0), 1), (0.25, 3, 0.25), (0.25, 1, 0.25), (0.25, 0.5, 0.5),
     (None, 0.5, 0.5), (None, 3, 0.0), (0.0, 0, 0.0), (0.25, 0, 0)],
)  # fmt: skip
def test_a_ratio_is_read_from_steps(given, steps, ratio):
    args = SimpleNamespace(warmup_steps=steps)
    legacy.remember(args, {} if given is None else {"warmup_ratio": given})
    assert legacy._warmup_ratio(args) == ratio


@pytest.mark.parametrize(
    ("default", "keeps"),
    [
        (0.5, True), (None, True), (legacy.NO_DEFAULT, True), ("half", False), ((0.5,), False), ([0.5], False),
        ((dataclasses.field(default=0.5),), True), ((dataclasses.field(default="half"),), False),
        ((dataclasses.field(default=0.5), 1), False), ((dataclasses.field(),), True),
    ],
)  # fmt: skip
def test_a_declared_default_keeps_the_meaning_of_the_old_name(default, keeps):
    checks = checks_of(TrainingArguments, TrainingArguments)
    assert legacy.keeps_its_meaning("warmup_ratio", default, checks) is keeps


@pytest.mark.parametrize(
    ("value", "options"),
    [({"split_batches": True}, {"split_batches": True}), (None, {}), ("file.json", {}), (True, {})],
)
def test_options_that_an_old_name_is_read_from(value, options):
    args = SimpleNamespace(accelerator_config=value)
    assert legacy.held_options(args, "accelerator_config") == options
    row = legacy._in_config("4.0", "accelerator_config", "split_batches")
    assert row.read(args) is options.get("split_batches")
    assert legacy.held_options(TrainingArguments("out"), "accelerator_config")["even_batches"] is True


@pytest.mark.parametrize(
    ("value", "asks"), [(None, {}), (False, {"config": {"key": False}}), (3, {"config": {"key": 3}})]
)
def test_an_old_name_goes_into_a_configuration(value, asks):
    assert legacy._in_config("4.0", "config", "key").translate(value) == asks


@pytest.mark.parametrize(
    ("of_class", "own", "remembered", "chosen"),
    [({}, {}, None, None), ({}, {}, "old", "old"), ({"logging_dir": "of-class"}, {}, "old", "of-class"),
     ({}, {"logging_dir": "own"}, "old", "own"), ({}, {"logging_dir": None}, "old", None)],
)  # fmt: skip
def test_the_folder_for_tensorboard_that_somebody_chose(of_class, own, remembered, chosen):
    args = type("Args", (SimpleNamespace,), of_class)(**own)
    legacy.remember(args, {} if remembered is None else {"logging_dir": remembered})
    assert legacy.chosen_logging_dir(args) == chosen


@pytest.mark.parametrize("profile", [(), ("report_to", "seed")])
@pytest.mark.parametrize("compat", ["4", "5"])
def test_a_copy_has_old_values_and_defaults_of_the_profile_that_were_not_given(profile, compat):
    source = SimpleNamespace(compat="4", _defaults_of_profile=profile, report_to="all", seed=1)
    copied = SimpleNamespace(compat=compat, _defaults_of_profile=("before",))
    legacy.remember(source, {"no_cuda": True, "warmup_ratio": 0.5})
    legacy.hand_over_old(source, copied, {"no_cuda": False, "report_to": "all", "seed": 2})
    assert legacy.remembered(copied) == {"warmup_ratio": 0.5}
    assert copied._defaults_of_profile == (("report_to",) if profile and compat == "4" else ("before",))


@pytest.mark.parametrize(
    ("steps", "ratio", "found"),
    [(0, 0, 0), (3, 0, 3), (0, 0.5, 0.5), (3, 0.5, 3), (0, 1, 1), (0.5, 3, 3), (0.5, 2, 2), (0.5, 1, 0.5)],
)
def test_the_setter_of_the_schedule_takes_a_ratio_in_either_place(steps, ratio, found):
    args = TrainingArguments("out").set_lr_scheduler(warmup_steps=steps, warmup_ratio=ratio)
    assert args.warmup_steps == found
    args = TrainingArguments("out").set_lr_scheduler("cosine", 2, 7, ratio, steps)  # the order of 4.x
    assert (args.lr_scheduler_type, args.num_train_epochs, args.max_steps) == ("cosine", 2, 7)
