"""Models of every form go through a checkpoint: tied, bf16, compiled, in parts or whole, adapters, shards."""

from __future__ import annotations

import functools
import json

import lightning.pytorch as pl
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from helpers import toy
from helpers.parity.compare import same
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments, set_seed

# torch.compile, peft and Lightning warn about their own insides
pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}
HF = (transformers.Trainer, transformers.TrainingArguments)
OURS = (Trainer, TrainingArguments)


class Tied(nn.Module):
    """A plain module: its input and output share a weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, labels):
        logits = self.head(self.embed(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def compiled_part():
    model = toy.tiny_gpt2()
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    return model


def adapter():
    import peft

    config = peft.LoraConfig(target_modules=["c_attn"], r=2, lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(toy.tiny_gpt2(), config)


MAKE = {
    "tied plain module": Tied,
    "tied GPT-2": toy.tiny_gpt2,
    "bf16": lambda: toy.tiny_gpt2().to(torch.bfloat16),
    "compiled": lambda: torch.compile(toy.tiny_gpt2(), backend="eager"),
    "compiled plain module": lambda: torch.compile(Tied(), backend="eager"),
    "compiled part": compiled_part,
    "adapter": adapter,
}


def build(name):
    set_seed(2)
    return MAKE[name]()


def rows(name):
    if "plain" in name:
        return [{"x": torch.tensor(i % 10), "labels": i * 3 % 10} for i in range(32)]
    return [{"input_ids": torch.arange(8) + i % 5, "labels": torch.arange(8) + i % 5} for i in range(32)]


def train(name, folder, kind=OURS, resume=None, **options):
    model = build(name)
    set_seed(1)
    trainer = kind[0](model, kind[1](str(folder), **{**OPTIONS, **options}), train_dataset=rows(name))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer.model.state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Make a function that trains a form once, and gives its folder and weights."""

    @functools.cache
    def once(name, async_save=False):
        folder = tmp_path_factory.mktemp("trained")
        return folder, train(name, folder, async_save=async_save)

    return once


BESIDE = ("tied plain module", "compiled plain module", "adapter")  # also saved beside the training in every run
FORMS = [(name, False) for name in MAKE] + [
    pytest.param(name, True, marks=[pytest.mark.matrix] * (name not in BESIDE)) for name in MAKE
]


@pytest.mark.parametrize(("name", "async_save"), FORMS)
def test_resumed_run_is_the_uninterrupted_one(tmp_path, trained, name, async_save):
    folder, whole = trained(name, async_save)
    assert same(train(name, tmp_path / "b", resume=folder / "checkpoint-2"), whole)
    file = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
    with safe_open(folder / "checkpoint-2" / file, "pt") as weights:
        names = list(weights.keys())
    assert names and not [key for key in names if "_orig_mod" in key]
    assert all("lora" in key for key in names) == (name == "adapter")


@pytest.mark.parametrize("name", ["tied GPT-2", "bf16", "adapter"])
def test_both_ways_between_trainers(tmp_path, trained, name):
    folder, whole = trained(name)
    assert same(train(name, tmp_path / "hf", HF), whole)
    assert same(train(name, tmp_path / "c", resume=tmp_path / "hf" / "checkpoint-2"), whole)
    assert same(train(name, tmp_path / "d", HF, resume=folder / "checkpoint-2"), whole)


def test_a_compiled_model_of_transformers_is_read(tmp_path):
    """transformers leaves `_orig_mod.` in the names."""
    whole = train("compiled", tmp_path / "hf", HF, remove_unused_columns=False)
    assert same(train("compiled", tmp_path / "b", resume=tmp_path / "hf" / "checkpoint-2"), whole)
    plain = train("tied GPT-2", tmp_path / "c", resume=tmp_path / "hf" / "checkpoint-2")
    assert same(plain, {name.removeprefix("_orig_mod."): tensor for name, tensor in whole.items()})


@pytest.mark.parametrize("name", ["bf16", "compiled", "compiled part", "tied GPT-2"])
def test_from_pretrained_reads_it(trained, name):
    folder, whole = trained(name)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "checkpoint-4")
    assert same(model.state_dict(), {key.replace("_orig_mod.", ""): tensor for key, tensor in whole.items()})


def test_shared_names_are_recorded(trained):
    folder, _ = trained("tied plain module")
    with safe_open(folder / "checkpoint-4" / "model.safetensors", "pt") as weights:
        assert list(weights.keys()) == ["embed.weight"]
        assert weights.metadata()["head.weight"] == "embed.weight"


def test_shards_of_an_index_are_read(tmp_path):
    whole = train("tied GPT-2", tmp_path / "b", HF)
    checkpoint = tmp_path / "b" / "checkpoint-2"
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="10KB")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert same(train("tied GPT-2", tmp_path / "c", resume=checkpoint), whole)


@pytest.mark.parametrize("name", ["tied plain module", "tied GPT-2", "compiled", "compiled part"])
def test_lightning_reads_it(tmp_path, trained, name):
    folder, whole = trained(name)
    args = TrainingArguments(str(tmp_path / "n"), **OPTIONS)
    module = HFModule(build(name), args)
    pl.seed_everything(args.seed, verbose=False)
    lightning = pl.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    lightning.fit(module, HFDataModule(args, rows(name)), ckpt_path=str(folder / "checkpoint-2"))
    assert same(module.model.state_dict(), whole)
