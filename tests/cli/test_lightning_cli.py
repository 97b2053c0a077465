"""A plain LightningCLI script with HFModule and HFDataModule: every option of its documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from helpers.toy import Classifier, rows, tiny_gpt2
from hf_compat import HFCallbackAdapter, HFDataModule, HFModule, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning

TESTS = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings(
    # of Lightning's CLI and trainer, not of what they are given
    "ignore::DeprecationWarning",
    "ignore:LightningCLI's args parameter:UserWarning",
    "ignore:No seed found:UserWarning",
    "ignore:.*does not have many workers:UserWarning",
    "ignore:Checkpoint directory .* exists:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
    "ignore:.*will be overridden by `LightningCLI:UserWarning",
    "ignore:The number of training batches:UserWarning",
)


class Rows(HFDataModule):
    """Data with arguments of its own."""

    def __init__(self, count: int = 16, batch_size: int = 4):
        super().__init__(TrainingArguments(per_device_train_batch_size=batch_size), rows(count), rows(8, 1), rows(8, 1))


class Sized(HFModule):
    """A module with arguments of its own."""

    def __init__(self, classes: int = 3, args: TrainingArguments | None = None, batch_size: int = 0):
        super().__init__(Classifier(classes=classes), args)
        self.batch_size, self.classes = batch_size, classes


def spec_of(path, **init_args):
    return {"class_path": path, "init_args": init_args}


MODEL = {"model": spec_of("helpers.toy.Classifier", features=8), "args": {"learning_rate": 0.01, "use_cpu": True}}
QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip
CONFIG = {"seed_everything": 3, "model": MODEL, "data": {"count": 16}, "trainer": QUIET}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    Path("run.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def command_line(args: ArgsType, model=HFModule, data=Rows, **options):
    return LightningCLI(model, data, args=args, **{"save_config_callback": None, **options})


def test_subcommands(folder):
    saving = ["--trainer.enable_checkpointing", "true", "--trainer.default_root_dir", str(folder)]
    cli = command_line(["fit", "-c", "run.yaml", *saving])
    assert cli.trainer.global_step == 4 and {"loss", "eval_loss"} <= cli.trainer.callback_metrics.keys()
    (path,) = folder.rglob("*.ckpt")
    trained = cli.model.state_dict()
    for command in ("validate", "test", "predict"):
        scored = command_line([command, "-c", "run.yaml", "--ckpt_path", str(path)])
        assert all(torch.equal(value, trained[name]) for name, value in scored.model.state_dict().items())
        assert command == "predict" or scored.trainer.callback_metrics
    again = command_line(["fit", "-c", "run.yaml", "--ckpt_path", str(path), "--trainer.max_epochs", "2"])
    assert again.trainer.global_step == 8


def test_a_folder_of_hf_is_a_ckpt_path(folder):
    from hf_compat import Trainer as HFTrainer

    args = TrainingArguments("out", max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = HFTrainer(Classifier(), args, train_dataset=rows(16))
    trainer.train()
    cli = command_line(["validate", "-c", "run.yaml", "--ckpt_path", "out/checkpoint-2"])
    assert torch.equal(cli.model.model.inner.weight, trainer.model.inner.weight)
    on = command_line(["fit", "-c", "run.yaml", "--ckpt_path", "out/checkpoint-2", "--trainer.max_epochs", "3"])
    assert on.trainer.global_step > 2


def test_without_running():
    cli = command_line(["-c", "run.yaml"], run=False)
    assert cli.trainer.global_step == 0 and cli.subcommand is None
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.global_step == 4
    as_dict = command_line(CONFIG, run=False)
    assert as_dict.model.steps.args.learning_rate == 0.01
    assert as_dict.config["seed_everything"] == 3


@pytest.mark.filterwarnings("ignore:These arguments have no effect")  # the next test reads it
def test_the_optimizer_and_its_schedule():
    words = ["fit", "-c", "run.yaml", "--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.5"]
    cli = command_line([*words, "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"])
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    (own,) = command_line(["fit", "-c", "run.yaml"]).trainer.optimizers
    assert type(own).__name__ == "AdamW"
    plateau = ["--lr_scheduler", "ReduceLROnPlateau", "--lr_scheduler.monitor", "eval_loss"]
    plateau += ["--lr_scheduler.patience", "0", "--lr_scheduler.threshold", "1e9", "--trainer.max_epochs", "3"]
    cli = command_line([*words, *plateau])
    (optimizer,) = cli.trainer.optimizers  # no evaluation is better by so much
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)


def test_what_the_optimizer_of_the_command_line_replaces_is_named():
    words = ["fit", "-c", "run.yaml", "--model.args.lr_scheduler_type", "cosine"]
    message = (
        "`--optimizer` and `--lr_scheduler` of LightningCLI replace HF's: `learning_rate=0.01`, `lr_scheduler_type="
    )
    with pytest.warns(InertArgumentWarning, match=message):
        command_line([*words, "--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.5"])
    with pytest.warns(HfCompatWarning, match="ignores `--lr_scheduler` without `--optimizer`"):
        command_line([*words, "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"], run=True)


def test_a_wrong_value_is_told_without_all_others():
    with pytest.raises(ArgumentError) as refused:
        command_line(["fit", "-c", "run.yaml", "--model.args.lr_scheduler_type", "cosin"])
    assert "did you mean 'cosine'?" in str(refused.value) and "Namespace" not in str(refused.value)


def test_a_callback_of_hf_needs_an_adapter(capsys):
    stop = spec_of("hf_compat.EarlyStoppingCallback", early_stopping_patience=1)
    with pytest.raises(SystemExit):
        command_line({"fit": {**CONFIG, "trainer": {**QUIET, "callbacks": [stop]}}, "subcommand": "fit"})
    assert "EarlyStoppingCallback is not a callback of Lightning" in (told := capsys.readouterr().err)
    assert "hf_compat.HFCallbackAdapter, init_args: {callbacks: [{class_path: hf_compat.EarlyStopping" in told
    adapter = spec_of("hf_compat.HFCallbackAdapter", callbacks=[spec_of("hf_compat.PrinterCallback")])
    cli = command_line({**CONFIG, "trainer": {**QUIET, "callbacks": [adapter]}}, run=False)
    assert any(isinstance(one, HFCallbackAdapter) for one in cli.trainer.callbacks)


def test_a_loss_function_needs_no_annotations(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    Path("own_losses.py").write_text("def own(outputs, labels, num_items_in_batch=None):\n    return outputs[0]\n")
    cli = command_line(["-c", "run.yaml", "--model.compute_loss_func", "own_losses.own"], run=False)
    assert cli.model.steps.compute_loss_func.__name__ == "own"


def test_no_automatic_optimizer(capsys):
    cli = command_line(["fit", "-c", "run.yaml"], auto_configure_optimizers=False)
    assert cli.trainer.global_step == 4 and cli.model.steps.optimizer.optimizer is cli.trainer.optimizers[0]
    with pytest.raises(SystemExit):
        command_line(["fit", "-c", "run.yaml", "--optimizer", "SGD"], auto_configure_optimizers=False)
    assert "optimizer" in capsys.readouterr().err


class Linked(LightningCLI):
    """Links, further arguments, and a callback whose options stand at the top."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("data.count", "model.classes", compute_fn=lambda count: count // 4)
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "eval_loss", "stopping.patience": 7})
        parser.add_argument("--note", default="none")


def test_linked_arguments_and_configurable_callbacks():
    words = ["fit", *(f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items())]
    cli = Linked(Sized, Rows, args=[*words, "--data.batch_size", "8", "--note", "mine"], save_config_callback=None)
    assert cli.model.batch_size == 8 and cli.model.classes == 4 and cli.config.fit.note == "mine"
    (stopping,) = [c for c in cli.trainer.callbacks if isinstance(c, EarlyStopping)]
    assert stopping.patience == 7 and stopping.monitor == "eval_loss"
    assert cli.trainer.global_step == 2


class LinkedWhenMade(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.test_dataset", "model.classes", compute_fn=len, apply_on="instantiate")


def test_arguments_linked_when_the_data_is_made():
    cli = LinkedWhenMade(Sized, Rows, run=False, args=[], save_config_callback=None)
    assert cli.model.classes == 8


def test_subclass_mode():
    words = ["--model", "Sized", "--model.classes", "4", "--model.args.learning_rate", "0.3", "--data", "Rows"]
    words += ["--data.count", "8"]
    options = {"subclass_mode_model": True, "subclass_mode_data": True, "run": False}
    cli = command_line(words, HFModule, HFDataModule, **options)
    assert isinstance(cli.model, Sized) and cli.model.classes == 4 and cli.model.steps.args.learning_rate == 0.3
    assert isinstance(cli.datamodule, Rows) and len(cli.datamodule.train_dataset) == 8
    anything = command_line(
        ["--model", "hf_compat.HFModule", "--model.model", "helpers.toy.Classifier"], None, None, run=False
    )
    assert type(anything.model) is HFModule and type(anything.model.model) is Classifier


def test_the_configuration_that_is_saved_is_read_again(folder):
    first = ["--trainer.default_root_dir", "first"]
    cli = command_line(["fit", "-c", "run.yaml", *first], save_config_callback=SaveConfigCallback)
    saved = yaml.safe_load(Path("first/config.yaml").read_text())
    assert saved["model"]["args"] and saved["model"]["model"]["class_path"] == "helpers.toy.Classifier"
    again = ["--trainer.default_root_dir", "second"]
    other = command_line(
        ["fit", "-c", "first/config.yaml", *again], save_config_callback=SaveConfigCallback,
        save_config_kwargs={"config_filename": "name.yaml", "overwrite": True},
    )  # fmt: skip
    assert Path("second/name.yaml").exists()
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in cli.model.state_dict().items())


def test_a_configuration_is_printed_and_read_again(capsys):
    with pytest.raises(SystemExit):
        command_line(["fit", "-c", "run.yaml", "--print_config"])
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert command_line(["fit", "-c", "printed.yaml"]).trainer.global_step == 4


def test_several_files_and_one_a_section():
    Path("more.yaml").write_text(yaml.safe_dump({"model": {"args": {"learning_rate": 0.5}}}))
    Path("data.yaml").write_text("count: 8\n")
    Path("trainer.yaml").write_text(yaml.safe_dump({**QUIET, "max_epochs": 3}))
    words = ["-c", "run.yaml", "-c", "more.yaml", "--data", "data.yaml", "--trainer", "trainer.yaml"]
    cli = command_line(["fit", *words])
    assert cli.model.steps.args.learning_rate == 0.5 and cli.model.steps.args.use_cpu
    assert cli.trainer.global_step == 6
    Path("args.yaml").write_text("learning_rate: 0.25\n")
    cli = command_line(["-c", "run.yaml", "--model.args", "args.yaml"], run=False)
    assert cli.model.steps.args.learning_rate == 0.25


def test_defaults_of_the_trainer_and_of_the_parser():
    stopping = EarlyStopping("eval_loss", patience=2)
    cli = command_line(
        ["fit", "--model.model", "helpers.toy.Classifier"], trainer_defaults={**QUIET, "callbacks": [stopping]},
        seed_everything_default=5, parser_kwargs={"fit": {"default_config_files": ["defaults.yaml"]}},
    )  # fmt: skip
    assert stopping in cli.trainer.callbacks and cli.config.fit.seed_everything == 5
    Path("defaults.yaml").write_text("data: {count: 8}\n")
    cli = command_line(
        ["fit", "--model.model", "helpers.toy.Classifier"], trainer_defaults=QUIET,
        parser_kwargs={"fit": {"default_config_files": ["defaults.yaml"]}},
    )  # fmt: skip
    assert cli.trainer.global_step == 2


def test_a_trainer_of_ones_own():
    class Mine(Trainer):
        def __init__(self, *args, mine: int = 1, **kwargs):
            super().__init__(*args, **kwargs)
            self.mine = mine

    cli = command_line(["-c", "run.yaml", "--trainer.mine", "4"], trainer_class=Mine, run=False)
    assert cli.trainer.mine == 4


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("PL_FIT__CONFIG", "run.yaml")
    monkeypatch.setenv("PL_FIT__DATA__COUNT", "8")
    monkeypatch.setenv("PL_FIT__MODEL__ARGS", "{learning_rate: 0.125, use_cpu: true}")
    cli = command_line(["fit"], parser_kwargs={"default_env": True})
    assert len(cli.datamodule.train_dataset) == 8 and cli.model.steps.args.learning_rate == 0.125
    monkeypatch.setenv("PL_FIT__MODEL__ARGS__LEARNING_RATE", "0.5")
    with pytest.warns(
        HfCompatWarning, match=r"LEARNING_RATE is not read(.|\n)*PL_FIT__MODEL__ARGS='\{learning_rate: …\}'"
    ):
        command_line(["fit"], parser_kwargs={"default_env": True})


@pytest.mark.parametrize(
    "settings",
    [
        {
            "profiler": "lightning.pytorch.profilers.SimpleProfiler",
            "logger": "lightning.pytorch.loggers.CSVLogger",
            "logger.save_dir": "logs",
            "callbacks": "lightning.pytorch.callbacks.LearningRateMonitor",
            "plugins": "lightning.pytorch.plugins.TorchCheckpointIO",
            "strategy": "lightning.pytorch.strategies.SingleDeviceStrategy",
            "strategy.device": "cpu",
        },
        {"profiler": "simple", "strategy": "auto"},
    ],
)
def test_settings_of_the_trainer_that_are_class_paths(settings):
    words = [f"--trainer.{name}={value}" for name, value in settings.items()]
    cli = command_line(["fit", "-c", "run.yaml", *words])
    assert cli.trainer.global_step == 4
    trainer = cli.trainer
    held = [*trainer.callbacks, trainer.strategy.checkpoint_io, trainer.profiler, trainer.logger, trainer.strategy]
    held += [getattr(one, "behind", None) for one in held]
    chosen = {value.rpartition(".")[2] for value in settings.values() if value.startswith("lightning.")}
    assert chosen <= {type(one).__name__ for one in held}


def test_models_and_data_of_functions_and_from_pretrained():
    tiny_gpt2().save_pretrained("model")
    pretrained = spec_of("transformers.AutoModelForCausalLM.from_pretrained", pretrained_model_name_or_path="model")
    data = {
        "train_dataset": spec_of("helpers.toy.blocks", count=8),
        "eval_dataset": {"a": spec_of("helpers.toy.blocks", count=4)},
    }
    Path("run.yaml").write_text(yaml.safe_dump({"model": {"model": pretrained}, "data": data, "trainer": QUIET}))
    cli = command_line(["fit", "-c", "run.yaml"], HFModule, HFDataModule)
    assert type(cli.model.model).__name__ == "GPT2LMHeadModel" and cli.trainer.global_step == 1
    assert "eval_a_loss" in cli.trainer.callback_metrics
    words = ["--model.model.class_path", pretrained["class_path"]]
    words += ["--model.model.init_args.pretrained_model_name_or_path", "model"]
    assert command_line(words, HFModule, HFDataModule, run=False).model.model.config.n_layer == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (spec_of("helpers.toy.Classifier", feature=3), "did you mean 'features'"),
        (spec_of("helpers.toy.Clasifier"), "did you mean helpers.toy.Classifier"),
        (spec_of("transformers.AutoModelForCausalLM.from_pretraned"), "did you mean"),
        (spec_of("nowhere.Model"), "no module named 'nowhere'"),
    ],
)
def test_a_model_that_is_not_there_is_told(model, message):
    with pytest.raises(ValueError, match=message):
        command_line({"model": {"model": model}}, HFModule, HFDataModule, run=False)


SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from lightning.pytorch.cli import LightningCLI
from hf_compat import HFDataModule, HFModule

if __name__ == "__main__":
    LightningCLI(HFModule, HFDataModule)
"""


def test_help_of_a_script(folder):
    Path("cli.py").write_text(SCRIPT)

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "COLUMNS": "100"}
        command = [sys.executable, "cli.py", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    shown = run("fit", "--help")
    assert "--model.model" in shown and "--data.train_dataset" in shown and "--ckpt_path" in shown
    assert "{fit,validate,test,predict}" in run("--help")
