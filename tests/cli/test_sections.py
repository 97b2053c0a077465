"""What a configuration says is kept: `config.yaml` makes the same run again; settings of `trainer` that are objects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from hf_compat.cli.fit import Run, as_sections
from hf_compat.cli.main import main

PROJECT = """
from pathlib import Path

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from helpers.toy import Classifier, rows

def train(): return rows(32)
def held_out(): return rows(8, 1)

class Optional(Classifier):
    def __init__(self, dropout: float | None = 0.3, name: str = "x"):
        super().__init__(dropout=0.0 if dropout is None else dropout)
        self.given = dropout

class Stamp(Callback):
    def __init__(self, word: str = "plain"):
        self.word = word
    def on_train_end(self, trainer, module):
        Path(module.steps.args.output_dir, "stamp").write_text(self.word)

class IO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        Path(f"{path}.seen").write_text("seen")
"""
DATA = {"train_dataset": "sections.train", "eval_dataset": "sections.held_out"}
QUIET = {"disable_tqdm": True, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
CONFIGURATIONS = {
    "trainer": {"trainer": {"max_epochs": 2, "precision": "32-true", "log_every_n_steps": 1, "accelerator": "cpu"}},
    "old names": {"args": {"evaluation_strategy": "epoch", "warmup_ratio": 0.5, "no_cuda": True, "max_steps": 4}},
    "none": {"model": {"class_path": "sections.Optional", "init_args": {"dropout": None}}, "args": {"max_steps": 3}},
    "numbers as text": {"args": {"run_name": 2024, "max_steps": 2, "logging_steps": 1}},
    "objects": {
        "trainer": {
            "max_steps": 3,
            "profiler": {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "init_args": {"filename": "p"}},
            "callbacks": [{"class_path": "sections.Stamp", "init_args": {"word": "again"}}],
        }
    },
    "optimizer": {
        "optimizer_cls_and_kwargs": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "args": {"max_steps": 3, "lr_scheduler_kwargs": {}, "logging_steps": 0.5, "eval_strategy": "steps"},
    },
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("sections", None)
    (tmp_path / "sections.py").write_text(PROJECT)
    return tmp_path


def write(config):
    whole = {"model": {"class_path": "sections.Optional"}, "data": DATA, **config}
    whole["args"] = {**QUIET, "output_dir": "first", **config.get("args", {})}
    if "accelerator" in config.get("trainer", {}):
        del whole["args"]["use_cpu"]
    Path("run.yaml").write_text(yaml.safe_dump(whole))


def history(folder):
    logs = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in log.items() if not k.endswith(("_runtime", "_per_second"))} for log in logs]


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_the_configuration_that_fit_writes_makes_the_same_run(kind, capsys):
    write(CONFIGURATIONS[kind])
    assert main(["fit", "-c", "run.yaml"]) == 0
    assert main(["fit", "-c", "first/config.yaml", "--output_dir", "second"]) == 0
    assert main(["fit", "-c", "second/config.yaml", "--output_dir", "third"]) == 0
    assert history("second") == history("first") == history("third")
    second, third = (yaml.safe_load((Path(f) / "config.yaml").read_text()) for f in ("second", "third"))
    assert {**third, "args": {**third["args"], "output_dir": "second"}} == second
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["fit", "-c", "run.yaml", "--output_dir", "fourth", "--print_config"])
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "-c", "printed.yaml"]) == 0 and history("fourth") == history("first")


def test_a_configuration_that_fit_wrote_may_be_changed():
    write({"trainer": {"max_epochs": 2}, "args": {"learning_rate": 0.5}})
    assert main(["fit", "-c", "run.yaml"]) == 0
    words = ["--output_dir", "more", "--trainer.max_epochs", "3", "--trainer.precision", "bf16-mixed"]
    assert main(["fit", "-c", "first/config.yaml", *words]) == 0
    kept = yaml.safe_load(Path("more/config.yaml").read_text())
    assert history("more")[-1]["epoch"] == 3.0 and kept["args"]["learning_rate"] == 0.5
    assert kept["trainer"] == {"max_epochs": 3, "precision": "bf16-mixed"}


def test_a_profiler_is_a_class_path(project, capfd, caplog):
    write({"args": {"max_steps": 1}})
    words = ["fit", "-c", "run.yaml", "--trainer.profiler"]
    assert main([*words, "lightning.pytorch.profilers.SimpleProfiler"]) == 0
    assert "run_training_batch" in "".join(capfd.readouterr()) + caplog.text
    further = ["--trainer.profiler.dirpath", str(project), "--trainer.profiler.filename", "mine"]
    assert main([*words, "lightning.pytorch.profilers.AdvancedProfiler", *further]) == 0
    assert any(path.name.startswith("fit-mine") for path in project.iterdir())
    assert main([*words, "simple"]) == 0
    for wrong, message in (("lightning.pytorch.profilers.Simpel", "did you mean"), ("quick", "simple, advanced")):
        assert main([*words, wrong]) == 2 and message in capfd.readouterr().err


def test_callbacks_loggers_and_plugins_of_the_trainer_section(project, capsys):
    write({"args": {"max_steps": 2, "logging_steps": 1}})
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs", "version": "one"}}
    saving = (
        "{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {dirpath: kept, every_n_train_steps: 1}}"
    )
    words = ["--trainer.callbacks", f"[sections.Stamp, {saving}]", "--trainer.plugins", "sections.IO"]
    assert main(["fit", "-c", "run.yaml", *words, "--trainer.logger", json.dumps(logger)]) == 0
    assert Path("first/stamp").read_text() == "plain" and list(Path("kept").glob("*.seen"))
    assert "train/loss" in next(Path("logs").rglob("metrics.csv")).read_text()
    words = ["--trainer.logger", "null", "--trainer.callbacks", "sections.Stamp"]
    assert main(["fit", "-c", "first/config.yaml", "--output_dir", "again", *words]) == 0
    assert Path("again/stamp").read_text() == "plain"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.logger", "false"], "`args.report_to` names trackers, or 'none'"),
        (["--trainer.logger", "lightning.pytorch.loggers.CSVLoger"], "did you mean lightning.pytorch.loggers.CSV"),
        (["--trainer.plugins", "lightning.pytorch.plugins.MixedPrecision"], "CheckpointIO"),
        (["--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"], "counterpart is the arguments (`fsdp`"),
        (["--trainer.callbacks", "[lightning.pytorch.callbacks.EarlyStoping]"], "did you mean"),
    ],
)  # fmt: skip
def test_what_the_trainer_section_does_not_take_is_told(words, message, capsys):
    write({"args": {"max_steps": 1}})
    assert main(["fit", "-c", "run.yaml", *words]) == 2
    assert message in capsys.readouterr().err and not Path("first").exists()


@pytest.mark.parametrize("words", [
    ["--evaluation_strategy", "steps", "--eval_strategy", "no"], ["--eval_strategy=no", "--evaluation_strategy=steps"],
])  # fmt: skip
def test_an_old_name_and_its_successor_may_not_contradict_each_other_in_one_command(words, capsys):
    """Either order; the value of a configuration file gives way to both."""
    write({"args": {"eval_strategy": "epoch"}})
    assert main(["fit", "-c", "run.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert "`evaluation_strategy='steps'`" in told and "`eval_strategy='no'`" in told and "keep `eval_strategy`" in told
    words = [words[0].partition("=")[0].replace("eval_", "evaluation_"), "no", "--model.init_args.name", "adafactor"]
    run = Run("fit", ["-c", "run.yaml", *words])
    assert run.args.eval_strategy == "no" and yaml.safe_load(run.text)["args"]["evaluation_strategy"] is False


@pytest.mark.filterwarnings("ignore:.*`fsdp` is off")
def test_old_names_on_a_command_line():
    # two old names of one argument, and an option of it. An old name without a successor stays
    write({"args": {"max_steps": 1, "logging_dir": "logs"}})
    words = ["--fsdp_min_num_params", "7", "--fsdp_transformer_layer_cls_to_wrap=A", "--fsdp_config", '{"xla": false}']
    assert main(["fit", "-c", "run.yaml", *words, "--evaluation_strategy=epoch"]) == 0
    args = yaml.safe_load(Path("first/config.yaml").read_text())["args"]
    assert (args["evaluation_strategy"], args["logging_dir"]) == ("epoch", "logs") and "eval_strategy" not in args
    run = Run("fit", ["-c", "first/config.yaml"])
    assert run.args.eval_strategy == "epoch" and run.args.logging_dir == "logs"
    assert run.args.fsdp_config == {"min_num_params": 7, "transformer_layer_cls_to_wrap": "A", "xla": False}


def test_words_of_an_hf_command_line_are_options_of_the_section():
    words = ["--label_names", "a", "b", "--bf16", "--no-fp16", "--evaluation-strategy", "steps", "--data.x", "1"]
    assert as_sections(words) == [
        '--args.label_names=["a", "b"]', "--args.bf16=true", "--args.fp16=false", "--args.evaluation_strategy=steps",
        "--data.x", "1",
    ]  # fmt: skip
    assert as_sections(["--run_name=", "--no_bf16=1"]) == ["--args.run_name=", "--args.bf16=false"]
    assert "--args.no_cuda=true" in as_sections(["--no_cuda", "--learning_rate", "5e-5"])
