"""A model of PEFT with several adapters goes on as it stood, and `training_args.bin` is read as it was."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from hf_compat import HFModule, set_seed
from hf_compat.checkpoint import adapters
from hf_compat.checkpoint.adapters import holds_whole_model
from hf_compat.cli.main import main
from hf_compat.errors import CheckpointError

# peft warns about its own insides
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(*adapters, active=None):
    """A model with these adapters; the first one is trained where no other one is named."""
    set_seed(1)
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(toy.tiny_gpt2(), config, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # else an adapter does nothing, and no adapter could be told from another
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_adapter(active or adapters[0])
    return model


def blocks():
    return [{**block, "labels": block["input_ids"]} for block in toy.blocks(24)]


def make(folder, model, library=hf_compat, **values):
    base = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "report_to": "none", "use_cpu": True}
    args = library.TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-2, disable_tqdm=True, **(base | values)
    )
    set_seed(3)
    return library.Trainer(model, args, train_dataset=blocks())


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" in name}


SETS = [("first", "second"), ("default", "other"), ("only",), ("default",)]


@pytest.mark.parametrize("adapters", SETS, ids=", ".join)
@pytest.mark.parametrize("named", [True, False], ids=["named", "newest"])
def test_every_adapter_goes_on_as_it_stood(tmp_path, adapters, named):
    whole = adapted(*adapters)
    make(tmp_path / "whole", whole).train()
    shutil.rmtree(tmp_path / "whole" / "checkpoint-4")
    resumed = adapted(*adapters)
    for name, parameter in resumed.named_parameters():
        if "lora_" in name:
            torch.nn.init.ones_(parameter)  # what is not loaded is seen
    checkpoint = str(tmp_path / "whole" / "checkpoint-2") if named else True
    make(tmp_path / "whole", resumed).train(resume_from_checkpoint=checkpoint)
    assert same(weights(resumed), weights(whole))
    assert list(resumed.active_adapters) == [adapters[0]]
    trained = {name for name, parameter in resumed.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in whole.named_parameters() if parameter.requires_grad}


def test_a_checkpoint_of_transformers_goes_on_as_there(tmp_path):
    make(tmp_path / "theirs", adapted("first", "second"), transformers).train()
    ends = []
    for library in (transformers, hf_compat):
        model = adapted("first", "second", active="second")
        trainer = make(tmp_path / "theirs", model, library, save_strategy="no", max_steps=6)
        trainer.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
        ends.append(weights(model))
    assert same(*ends)


def test_names_that_the_model_has_not_are_said(tmp_path):
    make(tmp_path, adapted("first", "second")).train()
    with pytest.raises(CheckpointError, match=r"(?s)holds the adapters first, second; the model has third.*Hint"):
        make(tmp_path, adapted("third")).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_damage_of_one_of_them_is_found(tmp_path):
    make(tmp_path, adapted("first", "second")).train()
    path = tmp_path / "checkpoint-4" / "second" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is cut off or damaged"):
        make(tmp_path, adapted("first", "second")).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert main(["seal", str(tmp_path / "checkpoint-4")]) == 2


def test_a_module_of_lightning_loads_them_too(tmp_path):
    whole = adapted("first", "second")
    make(tmp_path, whole).train()
    module = HFModule.load_from_checkpoint(tmp_path / "checkpoint-4", model=adapted("first", "second"))
    assert same(weights(module.model), weights(whole))


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_arguments_are_read_by_name_and_run_nothing(tmp_path, make_args, weights_only):
    args = make_args(learning_rate=0.25, hub_token="hf_secret", fsdp_config={"min_num_params": 3})
    trainer = hf_compat.Trainer(toy.Classifier(), args, train_dataset=toy.rows())
    trainer.save_model(tmp_path / "model")
    saved = torch.load(tmp_path / "model" / "training_args.bin", weights_only=weights_only)
    assert saved.learning_rate == saved["learning_rate"] == vars(saved)["learning_rate"] == 0.25
    assert saved.lr_scheduler_type == "linear" and saved.fsdp_config["min_num_params"] == 3
    assert saved.hub_token == "<HUB_TOKEN>" and not hasattr(saved, "unknown")


BASE, ADAPTER = "base_model.model.a.base_layer.weight", "base_model.model.a.lora_A.default.weight"


@pytest.mark.parametrize(
    ("weights", "saved", "files", "is_whole"),
    [
        ([BASE, ADAPTER], [BASE, ADAPTER], [], True),
        ([BASE, ADAPTER], [BASE, ADAPTER, "more"], [], True),
        ([ADAPTER], [ADAPTER], [], True),
        ([BASE, ADAPTER], [BASE], [], False),
        ([BASE, ADAPTER, ADAPTER.replace("_A", "_B")], [BASE, ADAPTER], [], False),
        ([BASE], [BASE], [], False),  # nothing shows that the adapters were saved with it
        ([BASE, ADAPTER], [BASE, ADAPTER], ["adapter_config.json"], False),
    ],
)
def test_a_folder_with_base_and_adapters_in_one_piece_is_known(tmp_path, weights, saved, files, is_whole):
    save_file({name: torch.ones(1) for name in saved}, tmp_path / "model.safetensors")
    for name in files:
        (tmp_path / name).write_text("{}")
    model = SimpleNamespace(peft_config={"default": None}, state_dict=lambda: dict.fromkeys(weights))
    assert holds_whole_model(str(tmp_path), model) is is_whole


@pytest.mark.parametrize(
    ("places", "known", "loaded"),
    [
        ([""], ["default"], {"default": ""}),
        ([""], ["a", "b"], {"b": ""}),
        (["", "b"], ["default", "b"], {"default": "", "b": "b"}),
        (["", "b"], ["a", "b"], {"b": "b"}),
        (["b"], ["default", "b"], {"b": "b"}),
        (["", "c"], ["a"], {"a": ""}),
        (["c", "d"], ["a"], "holds the adapters c, d; the model has a"),
        ([], ["a"], "holds no 'adapter_config.json'"),
        (["weights"], ["a"], "holds no 'adapter_config.json'"),
        (["config"], ["a"], "holds no 'adapter_model.safetensors'"),
    ],
)
def test_where_the_adapters_of_a_model_are(tmp_path, monkeypatch, places, known, loaded):
    monkeypatch.setattr(
        adapters, "check_weights", lambda folder, weights, model, name, adapter: checked.append(adapter)
    )
    for place in places:
        folder = tmp_path if place in ("", "weights", "config") else tmp_path / place
        folder.mkdir(exist_ok=True)
        if place != "weights":
            (folder / "adapter_config.json").write_text("{}")
        if place != "config":
            save_file({"x.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    found, checked = {}, []
    model = SimpleNamespace(
        peft_config=dict.fromkeys(known),
        active_adapters=known[-1:],
        state_dict=lambda: dict.fromkeys(f"x.lora_A.{name}.weight" for name in known),
        load_adapter=lambda folder, name, is_trained: found.update({name: folder}),
    )
    if isinstance(loaded, str):
        with pytest.raises(CheckpointError, match=loaded):
            adapters.load_adapters(model, str(tmp_path))
    else:
        assert adapters.load_adapters(model, str(tmp_path), strict=True) == [] and checked == [*loaded]
        assert found == {name: str(tmp_path / place) for name, place in loaded.items()}


def test_weights_of_an_adapter_that_a_checkpoint_lacks_are_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(adapters, "check_weights", lambda *_: None)
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    names = ("x.lora_A.a.weight", "y.lora_A.a.weight", "z.lora_A.other.weight", "w.a.bias")
    model = SimpleNamespace(
        peft_config={"a": None},
        active_adapters=["a"],
        state_dict=lambda: dict.fromkeys(names),
        load_adapter=lambda *_: 0,
    )
    assert adapters.load_adapters(model, str(tmp_path)) == ["y.lora_A.weight"]
    assert "missing keys in the checkpoint model loaded: ['y.lora_A.weight']" in caplog.text
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of the adapter: y.lora_A.weight"):
        adapters.load_adapters(model, str(tmp_path), strict=True)
