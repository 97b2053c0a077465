"""`HFModule.load_from_checkpoint` and `ckpt_path`: Lightning's ways to a trained module, for HF's folders too."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import shutil
import subprocess
import sys
import types
import unittest.mock
import warnings
from pathlib import Path

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import transformers
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context
from torch import nn

from helpers.toy import Classifier, blocks, rows, tiny_gpt2
from hf_compat import HFDataModule, HFModule, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from hf_compat.checkpoint.files import Named
from hf_compat.cli.main import main
from hf_compat.errors import CheckpointError, HfCompatWarning
from hf_compat.native import loading
from hf_compat.native.loading import _plain, arguments_among

TESTS = Path(__file__).resolve().parent.parent


class OfWidth(HFModule):
    """A module with arguments of its own, which it keeps as Lightning's users do."""

    def __init__(self, classes: int, rate: float = 1e-3):
        super().__init__(Classifier(classes=classes), TrainingArguments(learning_rate=rate, use_cpu=True))
        self.save_hyperparameters()


def arguments(folder, **further):
    return TrainingArguments(
        str(folder), max_steps=4, save_steps=2, learning_rate=1e-2, label_smoothing_factor=0.1, use_cpu=True,
        report_to="none", disable_tqdm=True, **further,
    )  # fmt: skip


def lightning_trainer(**options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{**defaults, "enable_checkpointing": False, **options})


def same(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    trainer = Trainer(tiny_gpt2(), arguments(folder, logging_steps=1), train_dataset=blocks(16))
    trainer.train()
    return trainer, folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    trainer = Trainer(Classifier(), arguments(folder), train_dataset=rows(16), eval_dataset=rows(8, 1))
    trainer.train()
    return trainer, folder


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    """A `.ckpt` of an HFModule that was trained natively."""
    module = HFModule(Classifier(), TrainingArguments(use_cpu=True))
    trainer = lightning_trainer(max_steps=3)
    trainer.fit(module, HFDataModule(None, rows(24)))
    path = tmp_path_factory.mktemp("ckpt") / "it.ckpt"
    trainer.save_checkpoint(path)
    return module, path


def test_a_folder_of_transformers_needs_nothing_else(pretrained):
    trainer, folder = pretrained
    module = HFModule.load_from_checkpoint(folder / "checkpoint-4")
    assert same(module.model, trainer.model) and type(module.model) is type(trainer.model)
    assert module.steps.args.learning_rate == 1e-2 and module.steps.args.label_smoothing_factor == 0.1
    lightning_trainer(max_epochs=1).fit(module, HFDataModule(None, blocks(8)))  # what the trainer decides was left out
    assert not same(module.model, trainer.model)


def test_a_folder_of_any_model_takes_the_model(plain):
    trainer, folder = plain
    path = str(folder / "checkpoint-4")
    with pytest.raises(CheckpointError, match=r"no config.json of transformers.\s+Hint: HFModule.load_from_checkpoint"):
        HFModule.load_from_checkpoint(path)
    for location in (None, "cpu", torch.device("cpu")):
        module = HFModule.load_from_checkpoint(path, map_location=location, model=Classifier())
        assert same(module.model, trainer.model)
    given = HFModule.load_from_checkpoint(path, model=Classifier(), args=TrainingArguments(learning_rate=3.0))
    assert given.steps.args.learning_rate == 3.0


def test_a_subclass_with_arguments_of_its_own(plain, tmp_path):
    trainer, folder = plain
    assert same(OfWidth.load_from_checkpoint(folder / "checkpoint-4", classes=3).model, trainer.model)
    module = OfWidth(3, rate=0.5)
    fitting = lightning_trainer(max_steps=2)
    fitting.fit(module, HFDataModule(None, rows(16)))
    fitting.save_checkpoint(tmp_path / "it.ckpt")
    loaded = OfWidth.load_from_checkpoint(tmp_path / "it.ckpt")
    assert same(loaded, module) and loaded.steps.args.learning_rate == 0.5
    assert OfWidth.load_from_checkpoint(tmp_path / "it.ckpt", rate=0.25).steps.args.learning_rate == 0.25
    for name, text in {"h.yaml": "classes: 3\nrate: 0.125\n", "h.csv": "key,value\nclasses,3\nrate,0.125\n"}.items():
        (tmp_path / name).write_text(text)
        by_file = OfWidth.load_from_checkpoint(folder / "checkpoint-4", hparams_file=tmp_path / name)
        assert by_file.steps.args.learning_rate == 0.125 and same(by_file.model, trainer.model)


def test_a_file_of_hyperparameters_may_lie_anywhere_and_a_missing_one_is_lightnings_warning(plain):
    folder = plain[1] / "checkpoint-4"
    with fsspec.open("memory://h.yaml", "w") as file:
        file.write("classes: 3\nrate: 0.125\n")
    by_file = OfWidth.load_from_checkpoint(folder, hparams_file="memory://h.yaml")
    assert by_file.steps.args.learning_rate == 0.125
    with pytest.warns(RuntimeWarning, match="Missing Tags: none.yaml"):
        OfWidth.load_from_checkpoint(folder, hparams_file="none.yaml", classes=3)


class Way(enum.Enum):
    FAST = 1


class Kind(enum.StrEnum):
    SMALL = "small"


class OfChoices(HFModule):
    """Members of enumerations are among its hyperparameters."""

    def __init__(self, way=None, kind=Kind.SMALL):
        super().__init__(Classifier(), TrainingArguments(use_cpu=True))
        self.save_hyperparameters()


def test_a_member_of_an_enumeration_is_read_as_what_it_is(tmp_path, caplog):
    fitting = lightning_trainer(max_steps=1)
    fitting.fit(OfChoices(Way.FAST), HFDataModule(None, rows(8)))
    with pytest.warns(HfCompatWarning, match="The hyperparameter way is a Way, which cannot be read back"):
        fitting.save_checkpoint(tmp_path / "it.ckpt")
    hparams = OfChoices.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=False).hparams
    assert hparams.way is Way.FAST and hparams.kind == Kind.SMALL
    hparams = OfChoices.load_from_checkpoint(tmp_path / "it.ckpt").hparams
    assert hparams.way is None and "are left out: way" in caplog.text and hparams.kind == Kind.SMALL


class Configured(HFModule):
    """Its arguments have another name."""

    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.save_hyperparameters(ignore=["model"])


@pytest.mark.parametrize(
    "given",
    [
        TrainingArguments(learning_rate=0.5, use_cpu=True),
        Seq2SeqTrainingArguments(learning_rate=0.5, use_cpu=True, generation_max_length=7),
    ],
)
def test_arguments_are_kept_under_any_name_and_with_those_of_generation(tmp_path, given):
    module, fitting = Configured(Classifier(), given), lightning_trainer(max_steps=2, limit_val_batches=0)
    fitting.fit(module, HFDataModule(None, rows(16)))
    fitting.save_checkpoint(tmp_path / "it.ckpt")
    args = Configured.load_from_checkpoint(tmp_path / "it.ckpt", model=Classifier()).steps.args
    assert type(args) is type(given) and args.learning_rate == 0.5
    assert getattr(args, "generation_max_length", None) == getattr(given, "generation_max_length", None)


def test_a_ckpt_takes_the_model_and_begins_anew(ckpt):
    module, path = ckpt
    with pytest.raises(CheckpointError, match=r"no hyperparameters that describe it"):
        HFModule.load_from_checkpoint(path)
    loaded = HFModule.load_from_checkpoint(path, model=Classifier())
    assert same(loaded, module)
    with open(path, "rb") as file:
        assert same(HFModule.load_from_checkpoint(file, model=Classifier()), module)
    again = lightning_trainer(max_epochs=1)
    again.fit(loaded, HFDataModule(None, rows(24)))
    assert again.global_step == 3, "the data does not go on where the checkpoint stood"


@pytest.mark.parametrize(
    ("path", "keywords", "message"),
    [
        ("nowhere", {}, "Checkpoint file not found: nowhere: there is no such folder"),
        ("checkpoint-4", {"model": nn.Linear(2, 2)}, 'Missing key(s) in state_dict: "model.weight", "model.bias".'),
        (
            "checkpoint-4",
            {"model": nn.Sequential()},
            'Unexpected key(s) in state_dict: "model.inner.bias", "model.inner.weight"',
        ),
        ("checkpoint-4", {"model": Classifier(), "hparams_file": "h.txt"}, "is not a .yaml, .yml or .csv file"),
        ("cut", {"model": Classifier()}, "cut: model.safetensors"),
        ("cut.ckpt", {"model": Classifier()}, "cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_told(path, keywords, message, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for target in ("checkpoint-4", "cut"):
        (tmp_path / target).mkdir()
        for file in (plain[1] / "checkpoint-4").iterdir():
            (tmp_path / target / file.name).write_bytes(file.read_bytes())
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "cut.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        HFModule.load_from_checkpoint(path, **keywords)


def test_strict_is_a_choice(plain):
    class Further(Classifier):
        def __init__(self):
            super().__init__()
            self.further = nn.Linear(2, 2)

    path = plain[1] / "checkpoint-4"
    with pytest.raises(CheckpointError, match=r"Missing key\(s\) in state_dict: .model\.further"):
        HFModule.load_from_checkpoint(path, strict=True, model=Further())
    with pytest.warns(UserWarning, match="in the model state dict but not in the checkpoint"):
        module = HFModule.load_from_checkpoint(path, strict=False, model=Further())
    assert torch.equal(module.model.inner.weight, plain[0].model.inner.weight)


def test_a_module_loads_nothing_into_itself(plain):
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        HFModule(Classifier()).load_from_checkpoint(plain[1] / "checkpoint-4")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_an_adapter(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted():
        return get_peft_model(tiny_gpt2(), LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True))

    trainer = Trainer(adapted(), arguments(tmp_path), train_dataset=blocks(16))
    trainer.train()
    with pytest.raises(CheckpointError, match="holds an adapter, and the model has none"):
        HFModule.load_from_checkpoint(tmp_path / "checkpoint-4", model=tiny_gpt2())
    assert same(HFModule.load_from_checkpoint(tmp_path / "checkpoint-4", model=adapted()).model, trainer.model)


def test_folders_are_ckpt_paths_of_every_command(plain):
    trainer, folder = plain
    path = str(folder / "checkpoint-4")
    data = HFDataModule(None, rows(16), rows(8, 1), rows(8, 1))
    args = TrainingArguments(label_smoothing_factor=0.1, learning_rate=1e-2, use_cpu=True)
    expected = trainer.evaluate()["eval_loss"]
    for command in ("validate", "test"):
        (metrics,) = getattr(lightning_trainer(), command)(HFModule(Classifier(), args), data, ckpt_path=path)
        assert next(value for name, value in metrics.items() if name.endswith("_loss")) == pytest.approx(expected, 1e-6)
    module = HFModule(Classifier(), args)
    lightning_trainer().predict(module, data, ckpt_path=path)
    assert same(module.model, trainer.model)
    fitting = lightning_trainer(max_steps=6)
    fitting.fit(module, data, ckpt_path=path)
    assert fitting.global_step == 6


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_model_that_was_saved_alone_is_a_ckpt_path(plain, tmp_path, caplog, command):
    trainer, _ = plain
    trainer.save_model(str(tmp_path / "saved"))
    module = HFModule(Classifier(), TrainingArguments(learning_rate=0.0, use_cpu=True))
    assert not same(module.model, trainer.model)
    found = lightning_trainer(max_epochs=1)
    data = HFDataModule(None, rows(16), rows(8, 1), rows(8, 1))
    with caplog.at_level("WARNING", "hf_compat"):
        getattr(found, command)(module, data, ckpt_path=str(tmp_path / "saved"))
    assert same(module.model, trainer.model)
    assert found.global_step == (2 if command == "fit" else 0)
    told = f"{tmp_path / 'saved'} holds a model and no state of a training: training begins with its weights."
    assert (told in caplog.text) == (command == "fit")


def test_a_saved_model_of_another_shape_is_refused_by_name(plain, tmp_path):
    trainer, _ = plain
    trainer.save_model(str(tmp_path / "saved"))
    data = HFDataModule(None, rows(16), rows(8, 1))
    with pytest.raises(CheckpointError, match="outer"):
        lightning_trainer().validate(HFModule(Classifier(classes=4)), data, ckpt_path=str(tmp_path / "saved"))
    larger = Classifier()
    larger.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"more\.weight"):
        lightning_trainer().validate(HFModule(larger), data, ckpt_path=str(tmp_path / "saved"))


def test_a_checkpoint_without_its_optimizer_is_a_ckpt_path(tmp_path, caplog):
    trainer = Trainer(Classifier(), arguments(tmp_path, save_only_model=True), train_dataset=rows(16))
    trainer.train()
    module, fitting = HFModule(Classifier(), TrainingArguments(use_cpu=True)), lightning_trainer(max_steps=6)
    fitting.fit(module, HFDataModule(None, rows(16)), ckpt_path=str(tmp_path / "checkpoint-4"))
    assert fitting.global_step == 6 and "has no optimizer and schedule, so both start anew" in caplog.text


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("folder", ["saved", "checkpoint-4"])
def test_adapters_are_a_ckpt_path(tmp_path, folder):
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(0)
        return get_peft_model(tiny_gpt2(), LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True))

    trainer = Trainer(adapted(), arguments(tmp_path), train_dataset=blocks(16), eval_dataset=blocks(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    path, data = str(tmp_path / folder), HFDataModule(None, blocks(16), blocks(8), blocks(8))
    args = TrainingArguments(learning_rate=1e-2, label_smoothing_factor=0.1, use_cpu=True)
    for command in ("validate", "test", "predict"):
        module = HFModule(adapted(), args)
        getattr(lightning_trainer(), command)(module, data, ckpt_path=path)
        assert same(module.model, trainer.model)
    with pytest.raises(CheckpointError, match="holds an adapter, and the model has none"):
        lightning_trainer().validate(HFModule(tiny_gpt2(), args), data, ckpt_path=path)
    fitting = lightning_trainer(max_steps=6)
    fitting.fit(module, data, ckpt_path=path)
    assert fitting.global_step == 6 and not same(module.model, trainer.model)


def test_best_and_last_of_a_model_checkpoint(tmp_path):
    module, data = HFModule(Classifier(), TrainingArguments(use_cpu=True)), HFDataModule(None, rows(16), rows(8, 1))
    saving = ModelCheckpoint(tmp_path, monitor="eval_loss", save_last=True)
    trainer = lightning_trainer(max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, data)
    last = saving.last_model_path
    (best,) = trainer.validate(module, data, ckpt_path="best")
    assert best["eval_loss"] == pytest.approx(float(saving.best_model_score))
    loaded = HFModule.load_from_checkpoint(last, model=Classifier())
    assert torch.isfinite(loaded.model.inner.weight).all()


CLI = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from lightning.pytorch.cli import LightningCLI
from hf_compat import HFDataModule, HFModule
from helpers.toy import rows

class Rows(HFDataModule):
    def __init__(self, count: int = 16):
        super().__init__(None, rows(count), rows(8, 1))

if __name__ == "__main__":
    LightningCLI(HFModule, Rows)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's own call of jsonargparse
def test_a_checkpoint_of_lightning_cli_says_how_to_make_its_module(tmp_path):
    (tmp_path / "cli.py").write_text(CLI)
    module = {
        "model": {"class_path": "helpers.toy.Classifier", "init_args": {"classes": 3, "dropout": 0.0}},
        "args": {"learning_rate": 0.02, "hub_token": "hf_aSecret", "use_cpu": True},
        "compute_metrics": {
            "class_path": "torchmetrics.classification.MulticlassAccuracy",
            "init_args": {"num_classes": 3},
        },
    }
    options = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": "root", "logger": False,
               "enable_progress_bar": False}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": module, "trainer": options}))

    def run(*words):
        command = [sys.executable, "cli.py", *words]
        environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("fit", "-c", "run.yaml")
    (path,) = (tmp_path / "root").rglob("*.ckpt")
    assert b"hf_aSecret" not in path.read_bytes()
    for loaded in (HFModule.load_from_checkpoint(path), HFModule.load_from_checkpoint(path, model=Classifier())):
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert torch.equal(weights["model.inner.weight"], loaded.model.inner.weight)
        assert loaded.steps.args.learning_rate == 0.02 and loaded.steps.args.hub_token is None
    assert HFModule.load_from_checkpoint(path).model.dropout.p == 0.0
    assert type(HFModule.load_from_checkpoint(path).compute_metrics).__name__ == "MulticlassAccuracy"
    words = ["-c", "run.yaml", "--ckpt_path", str(path), "--trainer.default_root_dir", "again"]
    assert "eval_loss" in run("validate", *words)


def test_what_the_command_trained_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taught.py").write_text("from helpers.toy import rows\ndef data(): return rows(16)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "--model",
        "helpers.toy.Classifier",
        "--data.train_dataset",
        "taught.data",
        "--output_dir",
        "out",
        "--max_steps",
        "2",
    ]
    assert main(["fit", *words, "--use_cpu", "--save_steps", "1", "--learning_rate", "0.5", "--report_to", "none"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = HFModule.load_from_checkpoint("out/checkpoint-2", model=Classifier())
        assert same(module.model, HFModule.load_from_checkpoint("out", model=Classifier()).model)
    assert module.steps.args.learning_rate == 0.5


# What `tests/sweeps/releases/pickles` holds and today's transformers is told: in the words of today.
OF_TRANSFORMERS = {
    "learning_rate": 3e-3, "weight_decay": 0.05, "label_smoothing_factor": 0.1, "warmup_steps": 0.1, "adam_beta2": 0.98,
    "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "optim": "sgd",
    "optim_args": "momentum=0.9", "neftune_noise_alpha": 2.0, "train_sampling_strategy": "group_by_length",
}  # fmt: skip
LEFT_TO_LIGHTNING = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "use_cpu": True}
PICKLES = sorted((TESTS / "sweeps" / "releases" / "pickles").glob("*.bin"))


def a_folder_of_transformers(folder, arguments=None):
    """A folder as transformers saves it; it pickles its own class of arguments."""
    tiny_gpt2().save_pretrained(folder)
    if arguments is not None:
        torch.save(arguments, folder / "training_args.bin")
    return folder


def arguments_of(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", HfCompatWarning)
        return HFModule.load_from_checkpoint(folder).steps.args


@pytest.mark.parametrize("pickled", PICKLES, ids=lambda path: path.stem)
def test_arguments_that_an_older_transformers_has_pickled(pickled, tmp_path):
    folder = a_folder_of_transformers(tmp_path)
    shutil.copy(pickled, folder / "training_args.bin")
    args = arguments_of(folder)
    assert {name: getattr(args, name) for name in OF_TRANSFORMERS} == OF_TRANSFORMERS
    assert args.accelerator_config.split_batches is True


def test_arguments_that_todays_transformers_has_pickled(tmp_path):
    theirs = transformers.TrainingArguments(str(tmp_path), **OF_TRANSFORMERS, **LEFT_TO_LIGHTNING, hub_token="not mine")
    args = arguments_of(a_folder_of_transformers(tmp_path / "it", theirs))
    assert {name: getattr(args, name) for name in OF_TRANSFORMERS} == OF_TRANSFORMERS
    assert args.hub_token is None


@dataclasses.dataclass
class OfAScript(transformers.Seq2SeqTrainingArguments):
    """Arguments of a script of the user's, of which nothing is imported."""

    temperature: float = 0.5


def test_arguments_of_a_class_that_is_not_there(tmp_path):
    theirs = OfAScript(str(tmp_path), predict_with_generate=True, temperature=0.1, learning_rate=0.25, use_cpu=True)
    folder = a_folder_of_transformers(tmp_path / "it")
    OfAScript.__module__ = "long.gone"
    with unittest.mock.patch.dict(sys.modules, {"long": types.ModuleType("long"), "long.gone": sys.modules[__name__]}):
        torch.save(theirs, folder / "training_args.bin")
    assert arguments_of(folder).learning_rate == 0.25


class Hostile:
    """Runs something when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch was_run",)


@pytest.mark.parametrize("form", ["zip", "before zip", "within arguments", "another object", "no pickle", "cut"])
def test_a_pickle_runs_nothing_and_says_what_it_is(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = a_folder_of_transformers(tmp_path / "it")
    place = folder / "training_args.bin"
    theirs = transformers.TrainingArguments(str(tmp_path), learning_rate=0.25, use_cpu=True)
    theirs.label_names = Hostile()
    held = {"within arguments": theirs, "another object": nn.Linear(2, 2)}.get(form, Hostile())
    torch.save(held, place, _use_new_zipfile_serialization=form != "before zip")
    if form in ("no pickle", "cut"):
        place.write_bytes(b"no pickle" if form == "no pickle" else PICKLES[0].read_bytes()[:900])
    if form == "within arguments":
        with pytest.warns(HfCompatWarning, match="holds objects for label_names, which cannot be read without running"):
            args = HFModule.load_from_checkpoint(folder).steps.args
        assert args.learning_rate == 0.25 and args.label_names is None
    else:
        with pytest.warns(HfCompatWarning, match=r"training_args.bin cannot be read .*\s+Hint: give `args=…`"):
            assert HFModule.load_from_checkpoint(folder).steps.args.learning_rate == TrainingArguments().learning_rate
    assert not Path("was_run").exists()


def test_arguments_of_a_torch_before_its_zip_files(tmp_path):
    folder = a_folder_of_transformers(tmp_path)
    theirs = transformers.TrainingArguments(str(tmp_path), learning_rate=0.25, use_cpu=True)
    torch.save(theirs, folder / "training_args.bin", _use_new_zipfile_serialization=False)
    assert arguments_of(folder).learning_rate == 0.25


# Data modules --------------------------------------------------------------------------------------------------------
class OfCount(HFDataModule):
    """Data with an argument of its own, which it keeps."""

    def __init__(self, count: int):
        super().__init__(None, rows(count))
        self.save_hyperparameters()


def test_a_data_module_that_a_checkpoint_does_not_describe_is_refused(tmp_path):
    trainer = lightning_trainer(max_epochs=1)
    for data in (HFDataModule(None, rows(8)), OfCount(8)):
        trainer.fit(HFModule(Classifier(), TrainingArguments(use_cpu=True)), data)
        trainer.save_checkpoint(tmp_path / f"{type(data).__name__}.ckpt")
    with pytest.raises(CheckpointError, match=r"holds no data, so this HFDataModule would be empty(.|\n)*ckpt_path="):
        HFDataModule.load_from_checkpoint(tmp_path / "HFDataModule.ckpt")
    given = HFDataModule.load_from_checkpoint(tmp_path / "HFDataModule.ckpt", train_dataset=rows(4))
    assert len(given.train_dataset) == 4
    assert len(OfCount.load_from_checkpoint(tmp_path / "OfCount.ckpt").train_dataset) == 8


class OfArguments(HFDataModule):
    """Data with HF's arguments and an object among its hyperparameters."""

    def __init__(self, args: TrainingArguments, odd: object = None):
        super().__init__(args, rows(args.per_device_train_batch_size))
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:The hyperparameter odd is")
def test_a_data_module_has_its_arguments_again(tmp_path):
    args, odd = TrainingArguments(use_cpu=True, per_device_train_batch_size=2), types.SimpleNamespace(a=1)
    trainer = lightning_trainer(max_epochs=1)
    trainer.fit(HFModule(Classifier(), args), OfArguments(args, odd))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    found = OfArguments.load_from_checkpoint(tmp_path / "it.ckpt")
    assert isinstance(found.steps.args, TrainingArguments) and len(found.train_dataset) == 2
    assert found.hparams["odd"] is None
    with open(tmp_path / "it.ckpt", "rb") as file:
        assert OfArguments.load_from_checkpoint(file, weights_only=False).hparams["odd"].a == 1
    with pytest.raises(FileNotFoundError):
        OfArguments.load_from_checkpoint(tmp_path / "none.ckpt")


def test_secrets_in_lists_of_hyperparameters_are_not_kept():
    given = {"sources": [{"name": "rows", "api_key": "aSecret"}], "width": 7}
    with _given_hyperparameters_context(given, "lightning.pytorch.cli.instantiate_module"):
        module = HFModule(Classifier(), TrainingArguments(use_cpu=True))
    assert module.hparams["sources"] == [{"name": "rows", "api_key": None}] and module.hparams["width"] == 7
    assert given["sources"][0]["api_key"] == "aSecret"


def test_what_stands_for_enums_and_options_becomes_their_values():
    def named(name, *given, state=None):
        made = type("Named", (Named,), {"name": name})(*given)
        if state is not None:
            made.__setstate__(state)
        return made

    scheduler, other = (type("Class", (Named,), {"name": name}) for name in ("SchedulerType", "Unknown"))
    assert _plain(named("SchedulerType", "cosine")) == "cosine"
    assert _plain(named("getattr", scheduler, "COSINE_WITH_RESTARTS")) == "cosine_with_restarts"
    assert _plain(named("getattr", scheduler, "GONE_SINCE")) == "gone_since"
    assert _plain({"a": [named("AcceleratorConfig", state={"even_batches": False})]}) == {
        "a": [{"even_batches": False}]
    }
    assert _plain((1, named("IntervalStrategy", "steps"))) == [1, "steps"]
    for stays in (named("getattr", other, "COSINE"), named("Unknown", "text"), named("SchedulerType", 1)):
        assert _plain(stays) is stays


WHOLE = {"output_dir": "o", "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({"args": {"learning_rate": 0.5}}, ["args"]),
        ({"options": WHOLE}, ["options"]),
        ({"options": {**WHOLE, "learning_rate": 0.5}}, ["options"]),
        ({"options": {"output_dir": "o", "learning_rate": 0.5}}, []),
        ({"args": 3, "options": [*WHOLE], "classes": 2}, []),
        ({"args": WHOLE, "options": WHOLE, "classes": 2}, ["args", "options"]),
        ({"args": WHOLE, "_instantiator": "cli"}, []),
        ({}, []),
    ],
)
def test_hyperparameters_that_were_arguments_become_arguments(held, found):
    made = arguments_among("here", held)
    assert list(made) == found and all(isinstance(one, TrainingArguments) for one in made.values())
    assert all(made[name].learning_rate == held[name].get("learning_rate", 5e-5) for name in found)


@pytest.mark.parametrize(
    ("held", "kind", "values"),
    [
        (
            {"learning_rate": 0.5, "seed": None, "logging_steps": 3},
            TrainingArguments,
            {"learning_rate": 0.5, "seed": 42},
        ),
        ({"predict_with_generate": True}, Seq2SeqTrainingArguments, {"predict_with_generate": True}),
        ({"hub_token": "secret", "unknown": 1}, TrainingArguments, {"hub_token": None}),
        ({"num_train_epochs": 7}, TrainingArguments, {"num_train_epochs": 3}),  # Lightning's trainer sets it
    ],
)
def test_arguments_of_a_checkpoint_are_taken_over(held, kind, values):
    made = arguments_among("here", {"args": held})["args"]
    assert type(made) is kind and {name: getattr(made, name) for name in values} == values
    with pytest.raises(CheckpointError, match="arguments in here"):
        arguments_among("here", {"args": {"learning_rate": "fast"}})


class TakesBoth:
    def __init__(self, model, args):
        pass


class TakesNone:
    def __init__(self, width):
        pass


CONFIG = {"architectures": ["Kind", "Other"]}


@pytest.mark.parametrize(
    ("cls", "config", "held", "keywords", "expected"),
    [
        (TakesBoth, CONFIG, {}, {}, {"model": "Kind of it", "args": "its"}),
        (TakesBoth, CONFIG, {}, {"model": 1}, {"model": 1, "args": "its"}),
        (TakesBoth, CONFIG, {}, {"args": 1}, {"model": "Kind of it", "args": 1}),
        (TakesBoth, None, {"model": 1}, {}, {"args": "its"}),
        (TakesBoth, CONFIG, {"args": 1}, {}, {"model": "Kind of it"}),
        (TakesBoth, None, {"_instantiator": 1}, {"other": 2}, {"other": 2}),
        (TakesNone, CONFIG, {}, {"width": 2}, {"width": 2}),
        (TakesBoth, None, {}, {}, "no config.json of transformers"),
        *(
            (TakesBoth, wrong, {}, {}, "no config.json of transformers")
            for wrong in ([1], {}, {"architectures": []}, {"architectures": "Kind"}, {"architectures": ["Unknown"]})
        ),
        (TakesBoth, "a file", {}, {}, "no hyperparameters that describe it"),
        (TakesBoth, "a file", {}, {"model": 1}, {"model": 1}),
    ],
)
def test_a_constructors_keywords_are_completed(tmp_path, monkeypatch, cls, config, held, keywords, expected):
    def read(path, name):
        return None if name == "Unknown" else f"{name} of {Path(path).name}"

    monkeypatch.setattr(loading, "read_pretrained", read)
    monkeypatch.setattr(loading, "_arguments_of", lambda path: "its" if os.path.isdir(path) else None)
    place = tmp_path / "it"
    if config == "a file":
        place.touch()
    else:
        place.mkdir()
        if config is not None:
            (place / "config.json").write_text(json.dumps(config))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            loading._completed(cls, str(place), held, keywords)
    else:
        assert loading._completed(cls, str(place), held, keywords) == expected
