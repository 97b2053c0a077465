"""Profiles: the defaults of transformers 4.57 where they are others; what somebody gives counts in each of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from hf_compat import HfArgumentParser, Trainer, TrainingArguments, explain
from hf_compat.cli.main import main as command
from hf_compat.cli.run import tell_defaults
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import NEWEST
from hf_compat.hf.arguments_rules import PROFILES, VARIABLE, follow
from hf_compat.hf.enums import available_trackers
from hf_compat.interop.releases import replaced_release

OF_4_57 = json.loads((Path(__file__).parent / "defaults_of_4_57.json").read_text())
# What both say in other words: no sharding, a rank that only the launcher knows, the CPU that `use_cpu` asks for.
IN_OTHER_WORDS = {"fsdp": None, "fsdp_config": None, "local_rank": -1, "no_cuda": True}
OF_THE_MACHINE = ("logging_dir", "report_to", "_n_gpu")


def plain(value):
    return value.to_dict() if hasattr(value, "to_dict") else value


@pytest.mark.parametrize("name", [name for name in OF_4_57["defaults"] if name not in OF_THE_MACHINE])
def test_the_defaults_are_those_of_the_real_4_57(name):
    args = TrainingArguments(compat="4", use_cpu=True)
    held = plain(getattr(args, name))
    if name == "accelerator_config":
        held.pop("use_configured_state")  # a question to Accelerate, which a dump leaves out
    assert held == IN_OTHER_WORDS.get(name, OF_4_57["defaults"][name])


def test_all_trackers_that_are_installed_and_a_folder_for_tensorboard():
    args = TrainingArguments(compat="4", use_cpu=True)
    assert args.report_to == available_trackers() != [] and "tensorboard" in args.report_to
    assert args.logging_dir.startswith("trainer_output/runs/")
    assert OF_4_57["transformers"].startswith("4.57") and len(OF_4_57["defaults"]) > 130


def test_the_newest_profile_is_upstreams_own_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {name: defaults[name] for name in PROFILES[NEWEST]} == PROFILES[NEWEST]
    assert PROFILES["4"].keys() == PROFILES[NEWEST].keys()
    assert (
        TrainingArguments("out", use_cpu=True).to_dict() == TrainingArguments("out", use_cpu=True, compat=5).to_dict()
    )


@pytest.mark.parametrize(
    "values", [{"report_to": "none"}, {"report_to": []}, {"use_cache": False}, {"trackio_space_id": None}]
)
def test_what_is_given_counts(values):
    args = TrainingArguments("out", use_cpu=True, compat="4", **values)
    for name, value in values.items():
        assert getattr(args, name) == ([] if value == "none" else value)
    assert args.compat == "4"


def test_none_was_the_default_of_report_to():
    assert TrainingArguments("out", use_cpu=True, compat="4", report_to=None).report_to == available_trackers()
    assert TrainingArguments("out", use_cpu=True, report_to=None).report_to == []


def test_a_subclass_keeps_its_own_default():
    @dataclasses.dataclass
    class Own(TrainingArguments):
        report_to: str = "tensorboard"

    args = Own("out", use_cpu=True, compat="4")
    assert (args.report_to, args.use_cache, args.trackio_space_id) == (["tensorboard"], None, "trackio")


def test_the_environment_chooses_where_nobody_else_does(monkeypatch):
    monkeypatch.setenv(VARIABLE, "4")
    assert TrainingArguments("out", use_cpu=True).trackio_space_id == "trackio"
    assert TrainingArguments("out", use_cpu=True, compat="5").trackio_space_id is None
    monkeypatch.setenv(VARIABLE, "3")
    with pytest.raises(ArgumentError, match=rf"{VARIABLE}='3'.*\n\nHint: choose one of '4', '5'"):
        TrainingArguments("out", use_cpu=True)


@pytest.mark.parametrize("value", ["6", "four", True, 4.5, [], "4.57"])
def test_there_are_two_of_them(value):
    with pytest.raises(ArgumentError, match="compat="):
        TrainingArguments("out", use_cpu=True, compat=value)


def test_it_is_no_setting_for_later():
    args = TrainingArguments("out", use_cpu=True)
    with pytest.raises(ArgumentError, match="compat='4'` comes too late"):
        args.compat = "4"


def test_a_command_line_has_it():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--compat", "4", "--report_to", "tensorboard"]
    )
    assert (args.compat, args.report_to, args.use_cache) == ("4", ["tensorboard"], None)


def test_a_scripts_own_option_of_that_name_stays_the_scripts():
    @dataclasses.dataclass
    class Own:
        compat: str = dataclasses.field(default="old", metadata={"help": "of the script"})
        past_index: int = dataclasses.field(default=3, metadata={"help": "of the script"})

    for kinds in ((TrainingArguments, Own), (Own, TrainingArguments)):
        made = HfArgumentParser(kinds).parse_args_into_dataclasses(
            ["--output_dir", "out", "--use_cpu", "--compat", "new", "--past_index", "7"]
        )
        own, args = made[kinds.index(Own)], made[kinds.index(TrainingArguments)]
        assert (own.compat, own.past_index, args.compat, args.past_index) == ("new", 7, "5", -1)


def test_a_subclasss_field_of_that_name_stays_its_own(tmp_path):
    @dataclasses.dataclass
    class Own(TrainingArguments):
        compat: str = "old"

    args = Own("out", use_cpu=True, compat="new")
    args.compat = "newer"
    assert args.compat == "newer" and args.trackio_space_id is None
    assert explain(args).profile == NEWEST

    @dataclasses.dataclass
    class Theirs(transformers.TrainingArguments):
        compat: str = "old"

    assert Trainer(toy.Classifier(), Theirs(str(tmp_path), use_cpu=True)).args.compat == "old"


def test_explain_marks_where_defaults_differ(capsys):
    assert command(["explain", "--compat", "4", "use_cpu=true", "max_steps=3"]) == 0
    told = capsys.readouterr().out
    assert (
        "defaults of transformers 4.57 (compat='4')" in told
        and "report_to=" in told
        and "(transformers 5.23: 'none')" in told
    )
    explanation = explain(TrainingArguments("out", use_cpu=True, compat="4", report_to="none"))
    assert [line.split("=")[0] for line in explanation.other_defaults] == ["trackio_space_id", "use_cache"]
    assert json.loads(explanation.to_json())["profile"] == "4"
    (line,) = [one.becomes for one in explanation.arguments if one.name == "trackio_space_id"]
    assert line.endswith("(the default of transformers 4.57)")
    assert "compat" not in str(explain(TrainingArguments("out", use_cpu=True)))


@pytest.mark.matrix
def test_a_script_is_run_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\n"
        "from transformers import TrainingArguments\n"
        "print('here', TrainingArguments('out', use_cpu=True).trackio_space_id)\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    words = [sys.executable, "-m", "hf_compat", "run", "--compat", "4", str(script)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("here trackio") >= 1


@pytest.mark.parametrize(("compat", "expected"), [("4", True), ("5", False)])
def test_a_models_own_cache_is_left_alone_in_4(tmp_path, compat, expected):
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16))
    values = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    Trainer(model, TrainingArguments(str(tmp_path), compat=compat, **values), train_dataset=rows).train()
    assert model.config.use_cache is expected
    if compat == "4":
        args = TrainingArguments(str(tmp_path), compat="4", gradient_checkpointing=True, **values)
        Trainer(model, args, train_dataset=rows).train()
        assert model.config.use_cache is False


@dataclasses.dataclass
class OfAnOlderRelease:
    """Fields of transformers 4.46 that have other defaults than today's, and one that has the same."""

    output_dir: str
    optim: str = "adamw_torch"
    average_tokens_across_devices: bool | None = False
    report_to: str | list[str] | None = None
    fsdp: list[str] | str | None = ""
    learning_rate: float = 5e-5
    gone: int = 3


@pytest.fixture
def beside_4_46(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.46.3")
    follow(replaced_release(OfAnOlderRelease))
    yield
    follow(None)


def test_the_release_that_ours_stands_in_for_gives_the_defaults(beside_4_46):
    args = TrainingArguments("out", use_cpu=True)
    assert (args.optim, args.average_tokens_across_devices, args.use_cache) == ("adamw_torch", False, None)
    assert args.report_to == available_trackers() and len(args.fsdp) == 0 and args.learning_rate == 5e-5
    assert TrainingArguments("out", use_cpu=True).fsdp is not args.fsdp
    assert (args.compat, TrainingArguments("out", use_cpu=True, optim="sgd").optim) == ("4", "sgd")
    today = TrainingArguments("out", use_cpu=True, compat="5")
    assert (today.optim, today.report_to, today.fsdp) == ("adamw_torch_fused", [], None)
    told = str(explain(args))
    assert "defaults of transformers 4.46.3 (compat='4')" in told and "optim='adamw_torch'" in told


def test_run_says_in_its_first_line_whose_defaults_count(beside_4_46, capsys, monkeypatch):
    tell_defaults()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-compat run: transformers 4.46.3 is installed, and its defaults count (")
    assert "optim='adamw_torch'" in line and line.endswith("`--compat 5` has today's.")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tell_defaults()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv(VARIABLE, "5")
    tell_defaults()
    assert capsys.readouterr().err == "" and TrainingArguments("out", use_cpu=True).optim == "adamw_torch_fused"


@pytest.mark.filterwarnings("ignore:These were imported from transformers")
def test_patch_takes_the_installed_releases_defaults_and_unpatch_gives_todays(monkeypatch):
    (optim,) = (one for one in dataclasses.fields(transformers.TrainingArguments) if one.name == "optim")
    monkeypatch.setattr(optim, "default", "adamw_torch")
    hf_compat.patch()
    try:
        assert transformers.TrainingArguments("out", use_cpu=True).optim == "adamw_torch"
    finally:
        hf_compat.unpatch()
    assert TrainingArguments("out", use_cpu=True).optim == "adamw_torch_fused"


def test_toy_runs_train_alike_in_both(tmp_path):
    """No default of 4.57 changes what is trained."""
    losses = []
    for compat in PROFILES:
        args = TrainingArguments(
            str(tmp_path / compat), compat=compat, use_cpu=True, report_to="none", max_steps=3, logging_steps=1,
            disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(16))
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1] and len(losses[0]) == 3
