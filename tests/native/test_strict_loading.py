"""`ckpt_path` and `load_from_checkpoint` are as strict as Lightning's. An `except` for its errors catches ours."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import CheckpointError, CheckpointMismatch
from hf_compat.native import loading

COMMANDS = ("fit", "validate", "test", "predict")


class Headed(HFModule):
    """It has a part beside the model."""

    def __init__(self, strict=None):
        super().__init__(Classifier(), TrainingArguments(use_cpu=True))
        self.head = nn.Linear(1, 1)
        if strict is not None:
            self.strict_loading = strict

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = self.head(outputs["loss"][None]).square().mean()
        return (loss, outputs) if return_outputs else loss


def plain():
    return HFModule(Classifier(), TrainingArguments(use_cpu=True))


def data():
    return HFDataModule(None, rows(8), rows(8, 1), rows(8, 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A `.ckpt` of each kind of module, and a folder of the Trainer."""
    import lightning.pytorch as pl

    folder = tmp_path_factory.mktemp("saved")
    for name, module in (("plain", plain()), ("headed", Headed())):
        trainer = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, data())
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    args = TrainingArguments(str(folder), max_steps=1, save_steps=1, use_cpu=True, disable_tqdm=True)
    Trainer(Classifier(), args, train_dataset=rows(8)).train()
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "name", "told"),
    [
        (Headed, "plain.ckpt", 'Missing key(s) in state_dict: "head.weight", "head.bias".'),
        (Headed, "checkpoint-1", 'Missing key(s) in state_dict: "head.weight", "head.bias".'),
        (plain, "headed.ckpt", 'Unexpected key(s) in state_dict: "head.weight", "head.bias".'),
    ],
)
def test_weights_that_are_missing_or_unknown_are_lightnings_error(saved, lightning, command, make, name, told):
    with pytest.raises(RuntimeError) as raised:
        getattr(lightning(), command)(make(), data(), ckpt_path=saved / name)
    assert isinstance(raised.value, CheckpointMismatch) and told in str(raised.value)


def test_a_module_that_says_so_loads_what_is_in_both(saved, lightning, caplog):
    for name in ("plain.ckpt", "checkpoint-1"):
        module = Headed(strict=False)
        lightning().validate(module, data(), ckpt_path=saved / name, verbose=False)
        assert 'Missing key(s) in state_dict: "head.weight"' in caplog.text
        caplog.clear()
    with pytest.warns(UserWarning, match=r"not in the model state dict but in the checkpoint: \['head.weight'"):
        loaded = HFModule.load_from_checkpoint(saved / "headed.ckpt", strict=False, model=Classifier())
    assert torch.equal(loaded.model.inner.weight, torch.load(saved / "headed.ckpt")["state_dict"]["model.inner.weight"])


def test_a_module_loads_its_own_weights_as_torch_does(saved):
    weights = torch.load(saved / "headed.ckpt")["state_dict"]
    assert not any(Headed().load_state_dict(weights))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain().load_state_dict(weights)
    assert plain().load_state_dict(weights, strict=False).unexpected_keys == ["head.weight", "head.bias"]


def test_one_name_of_a_tied_weight_is_enough(saved, lightning, tmp_path):
    class Tied(HFModule):
        def __init__(self):
            super().__init__(Classifier(), TrainingArguments(use_cpu=True))
            self.other = self.model.outer

    stored = torch.load(saved / "plain.ckpt")["state_dict"]["model.outer.weight"]
    for name in ("plain.ckpt", "checkpoint-1"):
        module = Tied()
        lightning().validate(module, data(), ckpt_path=saved / name, verbose=False)
        assert torch.equal(module.other.weight, stored) == (name == "plain.ckpt")


def test_weights_of_another_shape_are_a_runtime_error(saved, lightning):
    module = HFModule(Classifier(classes=5), TrainingArguments(use_cpu=True))
    with pytest.raises(RuntimeError, match="has the shape"):
        lightning().validate(module, data(), ckpt_path=saved / "plain.ckpt")


@pytest.mark.parametrize("path", ["none.ckpt", "checkpoint-7", "memory://none.ckpt"])
def test_a_missing_file_is_a_file_not_found_error(lightning, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        with pytest.raises(FileNotFoundError) as raised:
            getattr(lightning(), command)(plain(), data(), ckpt_path=path)
        assert isinstance(raised.value, CheckpointError) and path in str(raised.value)
    with pytest.raises(FileNotFoundError):
        HFModule.load_from_checkpoint(path, model=Classifier())


def test_a_file_that_is_cut_off_is_a_runtime_error(saved, lightning, tmp_path):
    whole = (saved / "plain.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    for command in COMMANDS:
        with pytest.raises(RuntimeError) as raised:
            getattr(lightning(), command)(plain(), data(), ckpt_path=tmp_path / "cut.ckpt")
        assert isinstance(raised.value, CheckpointError) and "cut.ckpt cannot be read" in str(raised.value)


def test_a_file_that_a_folder_lacks_is_a_file_not_found_error(saved, lightning, tmp_path):
    shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        lightning().validate(plain(), data(), ckpt_path=tmp_path / "checkpoint-1")


class Loads:
    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"


@pytest.mark.parametrize(
    ("source", "file", "expected"),
    [
        ("it", None, {"hyper_parameters": {"held": 1}}),
        ("it", "h.yaml", {"hyper_parameters": {"width": 2}}),
        ("it", "h.YML", {"hyper_parameters": {"width": 2}}),
        ("it", "h.csv", {"hyper_parameters": {"width": 3}}),
        ("it", "h.json", "hparams_file='h.json'` is not a .yaml, .yml or .csv file"),
        ("open", None, {"hyper_parameters": {"held": 1}}),
        ("s3://bucket/it", None, {"hyper_parameters": {"held": 1}}),
        ("bare", None, {"hyper_parameters": {}}),
        ("none", None, "none"),
        ("broken", None, "it is broken"),
        ("folder", None, "Can't find a valid checkpoint at folder"),
    ],
)
def test_a_checkpoint_is_read_with_its_hyperparameters(tmp_path, monkeypatch, source, file, expected):
    def read(path, map_location, weights_only):
        if path in ("broken", "folder"):
            raise CheckpointError("it is broken")
        return {} if path == "bare" else {"hyper_parameters": {"held": 1}}

    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("it", "bare", "broken"):
        Path(name).touch()
    Path("h.YML").write_text("width: 2")
    Path("h.yaml").write_text("width: 2")
    Path("h.csv").write_text("key,value\nwidth,3\n")
    monkeypatch.setattr(loading, "_read", read)
    given = io.BytesIO() if source == "open" else Path(source) if source == "it" else source
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            loading.read_described(Loads, given, None, file, None)
    else:
        told = "the open BytesIO" if source == "open" else source
        assert loading.read_described(Loads, given, None, file, None) == (told, expected)
