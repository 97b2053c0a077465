"""Liger's kernels, with a package that stands in for it: what is called, when, and what is refused."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import lightning.pytorch as pl
import pytest
import transformers
from transformers.integrations import liger as upstream

import hf_compat
from helpers import toy
from helpers.parity.model_cases import lora
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatWarning, InertArgumentWarning, MissingPackage

LIGER = {"use_liger_kernel": True}


def apply_to_gpt2(rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, model=None):
    """The signature by which Liger tells which kernels an architecture has."""


@pytest.fixture
def liger(monkeypatch):
    """Put a stand-in for liger-kernel among the modules; returns the calls that it gets."""
    calls = []

    def apply(model, **kernels):
        calls.append((type(model).__name__, model.training, next(model.parameters()).dtype, kernels))

    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    modules[names[1]]._apply_liger_kernel_to_instance = apply
    modules[names[2]].MODEL_TYPE_TO_APPLY_LIGER_FN = {"gpt2": apply_to_gpt2}
    monkeypatch.setattr(upstream, "is_liger_kernel_available", lambda: True)
    return calls


MODELS = {"plain": toy.tiny_gpt2, "lora": lora}
CONFIGS = [None, {"rope": True, "cross_entropy": True, "fused_linear_cross_entropy": False}]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_called_as_transformers_calls_it(liger, tmp_path, kind, config):
    found = []
    for package in (transformers, hf_compat):
        package.set_seed(1)
        values = {"max_steps": 2, "use_cpu": True, "report_to": "none", "liger_kernel_config": config, **LIGER}
        args = package.TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, save_strategy="no", **values)
        trainer = package.Trainer(MODELS[kind]().eval(), args, train_dataset=toy.blocks(), eval_dataset=toy.blocks(4))
        moments = [len(liger)]
        for _ in range(2):
            trainer.train()
            moments.append(len(liger))
        found.append((moments, liger[:]))
        liger.clear()
    assert found[0] == found[1] and found[0][0] == [0, 1, 2]


def test_a_model_init_gets_it_at_each_train(liger, make_args):
    args = make_args(**LIGER, max_steps=1)
    trainer = Trainer(model_init=lambda: toy.tiny_gpt2(), args=args, train_dataset=toy.blocks())
    trainer.train()
    trainer.train()
    assert len(liger) == 2


def test_evaluations_that_keep_the_loss_alone_skip_the_logits_as_upstream(liger, tmp_path):
    found = []
    for package in (transformers, hf_compat):
        seen = []

        class Watching(toy.Classifier):
            def forward(self, x, labels=None, skip_logits=None, seen=seen):
                seen.append(skip_logits)
                return super().forward(x, labels)

        values = {"use_cpu": True, "report_to": "none", **LIGER}
        args = package.TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **values)
        trainer = package.Trainer(Watching(), args, eval_dataset=toy.rows(8))
        trainer.evaluate()
        trainer.predict(toy.rows(8))
        found.append(seen)
    assert found[0] == found[1] == [True, None]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_lightning_trainer_of_ones_own(liger, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, **LIGER)
    module = HFModule(toy.tiny_gpt2(), args)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
    assert liger == []
    trainer.fit(module, HFDataModule(args, train_dataset=toy.blocks(8)))
    assert [call[0] for call in liger] == ["GPT2LMHeadModel"]


def test_a_model_that_is_put_in_place_later_is_checked_too(liger, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, **LIGER)
    module, model = HFModule(toy.tiny_gpt2(), args), toy.tiny_gpt2()
    module.model = model
    assert module.steps.model is model
    sys.modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN.clear()
    with pytest.warns(HfCompatWarning, match="Liger has no kernels for models of the type 'gpt2'"):
        module.model = toy.tiny_gpt2()


def test_a_missing_package_is_named_when_the_trainer_is_made(make_args):
    for make in (Trainer, HFModule):
        with pytest.raises(MissingPackage, match=r"(?s)use_liger_kernel=True.*pip install liger-kernel"):
            make(toy.tiny_gpt2(), make_args(**LIGER))


def test_a_package_that_does_not_load_here(liger, make_args, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingPackage, match="does not load here"):
        Trainer(toy.tiny_gpt2(), make_args(**LIGER))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ropee": True}, "no kernel 'ropee'.*rope"),
        ({"rope": "yes"}, "rope is not a truth value"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "two kernels of the loss"),
    ],
)
def test_a_configuration_that_cannot_work(liger, make_args, config, words):
    for make in (Trainer, HFModule):
        with pytest.raises(ArgumentError, match=f"(?s)liger_kernel_config.*{words}"):
            make(toy.tiny_gpt2(), make_args(**LIGER, liger_kernel_config=config))


def test_what_has_no_effect_is_warned_about(liger, make_args):
    with pytest.warns(UserWarning, match="is not a `PreTrainedModel` of transformers"):
        Trainer(toy.Classifier(), make_args(**LIGER, max_steps=1), train_dataset=toy.rows()).train()
    with pytest.warns(UserWarning, match="no kernels for models of the type 'bert'"):
        Trainer(toy.tiny_bert(), make_args(**LIGER))
    with pytest.warns(InertArgumentWarning, match="liger_kernel_config.*`use_liger_kernel` is off"):
        Trainer(
            toy.tiny_gpt2(), make_args(liger_kernel_config={"rope": False}, max_steps=1), train_dataset=toy.blocks(4)
        ).train()
    assert liger == []
