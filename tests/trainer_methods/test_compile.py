"""`torch_compile`: compiled models, number of graphs, and files. Numbers are in tests/helpers/parity/model_cases.py."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from torch._dynamo.utils import counters

import hf_compat
from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.errors import ArgumentError
from hf_compat.plan.translate import Compilation, compilation_of

EAGER = {"torch_compile_backend": "eager"}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture
def make(make_args):
    def make(trainer_class=Trainer, model=toy.Classifier, **values):
        hf_compat.set_seed(1)
        data = {"train_dataset": toy.rows(48), "eval_dataset": toy.rows(8)}
        return trainer_class(model(), make_args(**{**EAGER, **values}), **data)

    return make


@pytest.fixture
def compiled_graphs():
    """Count the graphs passed to a backend."""
    seen = []

    def count(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    name = "counting_of_the_tests"
    if name not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(lambda graph, inputs: _COUNT[0](graph, inputs), name=name)
    _COUNT[:] = [count]
    return name, seen


_COUNT: list = []


@pytest.mark.parametrize(
    "values", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}, {"eval_strategy": "steps", "eval_steps": 2}]
)
def test_a_run_compiles_once_not_once_a_step(make, compiled_graphs, values):
    name, seen = compiled_graphs
    trainer = make(torch_compile_backend=name, max_steps=3, **values)
    trainer.train()
    after_three = len(seen)
    again = make(torch_compile_backend=name, max_steps=12, **values)
    again.train()
    assert after_three > 0 and len(seen) <= 2 * after_three
    again.train()
    assert len(seen) <= 2 * after_three  # a second `train()` finds what is compiled


def test_the_model_stays_as_it_is_and_files_have_its_names(make):
    trainer = make(save_strategy="steps", save_steps=4, max_steps=8, load_best_model_at_end=False)
    model = trainer.model
    trainer.train()
    trainer.save_model(f"{trainer.args.output_dir}/saved")
    assert trainer.model is model and type(trainer.model_wrapped).__name__ == "OptimizedModule"
    for folder in ("checkpoint-4", "checkpoint-8", "saved"):
        names = safetensors.torch.load_file(os.path.join(trainer.args.output_dir, folder, "model.safetensors"))
        assert set(names) == set(model.state_dict()) and not any("_orig_mod" in name for name in names)
    resumed = make(save_strategy="no", max_steps=8, torch_compile_backend="aot_eager")
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_only_the_first_evaluation_before_training_is_compiled_as_upstream(make, compiled_graphs):
    name, seen = compiled_graphs
    trainer = make(torch_compile_backend=name)
    first = trainer.evaluate()
    compiled = len(seen)
    second = trainer.evaluate(toy.rows(5))
    assert compiled > 0 and len(seen) == compiled and first["eval_loss"] != second["eval_loss"]


@pytest.mark.parametrize(
    ("values", "variables", "expected"),
    [
        ({}, {}, None),
        ({"torch_compile": True}, {}, Compilation(backend="inductor")),
        ({"torch_compile_mode": "max-autotune"}, {}, Compilation(backend="inductor", mode="max-autotune")),
        ({"torch_compile_backend": "AOT_EAGER"}, {}, Compilation(backend="aot_eager")),
        ({"torch_compile": True, "torch_compile_backend": "no"}, {}, None),
        ({}, {"BACKEND": "EAGER"}, Compilation(backend="eager")),
        ({}, {"BACKEND": "no"}, None),
        (
            {"torch_compile_backend": "eager"},
            {"BACKEND": "inductor", "MODE": "reduce-overhead", "USE_FULLGRAPH": "true", "USE_DYNAMIC": "false"},
            Compilation(backend="eager", mode="reduce-overhead", fullgraph=True, dynamic=False),
        ),
        ({}, {"BACKEND": "eager", "USE_REGIONAL_COMPILATION": "1"}, Compilation(backend="eager", by_blocks=True)),
    ],
)
def test_what_is_asked_for_is_what_accelerate_reads(make_args, monkeypatch, values, variables, expected):
    from accelerate.utils import TorchDynamoPlugin

    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    args = make_args(**values)
    assert compilation_of(args) == expected
    plugin = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    assert {"backend": "no", **plugin.to_kwargs()} == ({"backend": "no"} if expected is None else expected.keywords())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"torch_compile_backend": "inductr"}, "torch_compile_backend='inductr'.*inductor"),
        ({"torch_compile_mode": "fast"}, "torch_compile_mode='fast'.*max-autotune"),
    ],
)
def test_what_torch_does_not_know_is_refused_when_the_trainer_is_made(make_args, values, words):
    args = make_args(**values)
    for make in (lambda: Trainer(toy.Classifier(), args), lambda: HFModule(toy.Classifier(), args)):
        with pytest.raises(ArgumentError, match=f"(?s){words}"):
            make()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
def test_the_launchers_compilation_block_by_block(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    hf_compat.set_seed(1)
    data = {"train_dataset": toy.blocks(), "eval_dataset": toy.blocks(4)}
    args = make().args
    args.torch_compile, args.torch_compile_backend = False, None
    trainer = Trainer(toy.tiny_gpt2(), args, **data)
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    blocks = [type(module).__name__ for module in trainer.model_wrapped.modules()]
    assert "OptimizedModule" in blocks and type(trainer.model_wrapped).__name__ == "GPT2LMHeadModel"
    assert not torch.equal(before, trainer.model.lm_head.weight)
    assert "_orig_mod" not in "".join(trainer.model.state_dict())


# A Lightning trainer of the user's own -------------------------------------------------------------------------------


def native(folder, **values):
    hf_compat.set_seed(1)
    args = TrainingArguments(str(folder), use_cpu=True, per_device_train_batch_size=4, **values)
    module = HFModule(toy.Classifier(), args)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet)
    return trainer, module, HFDataModule(args, train_dataset=toy.rows(24), eval_dataset=toy.rows(8))


def test_a_native_module(tmp_path, compiled_graphs):
    name, seen = compiled_graphs
    trainer, plain, data = native(tmp_path)
    trainer.fit(plain, data)
    assert seen == []
    trainer, module, data = native(tmp_path, torch_compile_backend=name)
    trainer.fit(module, data)
    assert 0 < len(seen) <= 3
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert set(saved) == set(plain.state_dict())
    for parameter, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_native_evaluation_alone(tmp_path, compiled_graphs):
    name, seen = compiled_graphs
    trainer, module, data = native(tmp_path, torch_compile_backend=name)
    trainer.validate(module, data, verbose=False)
    assert 0 < len(seen) <= 2


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_inductor_trains_as_under_transformers(tmp_path):
    import transformers

    found = []
    for package in (hf_compat, transformers):
        torch._dynamo.reset()
        counters.clear()
        package.set_seed(1)
        values = {"max_steps": 6, "logging_steps": 1, "torch_compile": True, "use_cpu": True, "report_to": "none"}
        args = package.TrainingArguments(output_dir=str(tmp_path / package.__name__), disable_tqdm=True, **values)
        assert args.torch_compile_backend == "inductor"
        trainer = package.Trainer(toy.tiny_gpt2(), args, train_dataset=toy.blocks(), eval_dataset=toy.blocks(5))
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found.append((losses, trainer.evaluate()["eval_loss"], counters["stats"]["unique_graphs"]))
    assert found[0] == found[1]
