"""Models that are made in parts for ZeRO 3 train, are saved and resume as under transformers, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.launching import TORCHRUN, result, start

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "made_in_parts_job.py"


def weights(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        pytest.param("loaded", [], id="loaded after the arguments"),
        pytest.param("made", [], id="made of a configuration", marks=pytest.mark.matrix),
        pytest.param("by_hand", [], id="under a script's own configuration", marks=pytest.mark.matrix),
        pytest.param("loaded", ["tied=True"], id="tied", marks=pytest.mark.matrix),
        pytest.param("loaded", ["bf16=True"], id="bf16", marks=pytest.mark.matrix),
    ],
)
def test_it_trains_and_resumes_as_under_transformers(tmp_path, way, words):
    theirs = result(tmp_path, "transformers", way, *words, launcher=TORCHRUN, script=JOB)
    ours = result(tmp_path, "hf_compat", way, *words, launcher=TORCHRUN, script=JOB)
    trained, resumed = ours["runs"]
    assert trained["logs"] == theirs["runs"][0]["logs"] and trained["eval_loss"] == theirs["runs"][0]["eval_loss"]
    assert ours["seen"] == theirs["seen"] * 2 and ours["seen"][0][::2] == [True, [[0]]]
    assert same(weights(tmp_path / "hf_compat" / "final"), weights(tmp_path / "transformers" / "final"))
    # the second run has evaluated and saved before, and began with other weights than those of its checkpoint
    assert resumed["logs"] == trained["logs"] and resumed["eval_loss"] == trained["eval_loss"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base0")
    assert trained["parameters"] == sum(parameter.numel() for parameter in base.parameters())
    # upstream counts none, as each parameter is empty there
    counted = sum(parameter.numel() for name, parameter in base.named_parameters() if "embed_tokens" not in name)
    assert trained["flos"] == resumed["flos"] == 6 * 8 * 8 * 6 * counted  # updates × samples × tokens × 6
    if way != "made":
        rows = torch.stack([torch.arange(i, i + 8) % 32 for i in range(16)])
        exact = 1e-2 if "bf16=True" in words else 1e-5
        assert resumed["before"] == pytest.approx(base(input_ids=rows, labels=rows).loss.item(), rel=exact)
        first = {name: tensor.float() for name, tensor in weights(tmp_path / "first").items()}
        expected = weights(tmp_path / "base0")
        if "bf16=True" in words:  # the evaluation before has put the model into half precision
            expected = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
        assert same(first, expected)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.matrix)])
def test_adapters_train_and_resume_as_under_transformers(tmp_path, stage):
    """All of LoRA's weights decay, so the optimizer's other group is empty, and DeepSpeed drops it."""
    words = ("loaded", "adapters=True", f"stage={stage}")
    theirs = result(tmp_path, "transformers", *words, launcher=TORCHRUN, script=JOB)
    ours = result(tmp_path, "hf_compat", *words, launcher=TORCHRUN, script=JOB)
    trained, resumed = ours["runs"]
    assert trained["logs"] == resumed["logs"] == theirs["runs"][0]["logs"]
    mine, other = (weights(tmp_path / api / "final", "adapter_model") for api in ("hf_compat", "transformers"))
    assert same(mine, other)


@pytest.mark.matrix
def test_a_checkpoint_of_transformers_resumes(tmp_path):
    theirs = result(tmp_path, "transformers", "loaded", launcher=TORCHRUN, script=JOB)
    resume = f"resume={str(tmp_path / 'transformers' / 'checkpoint-3')!r}"
    ours = result(tmp_path, "hf_compat", "loaded", resume, launcher=TORCHRUN, script=JOB)
    assert ours["runs"][0]["logs"] == theirs["runs"][0]["logs"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("word", "told"), [("deepspeed=None", "`deepspeed` is not set"), ("stage=2", "the configuration asks for stage 2")]
)
def test_parts_need_zero_3(tmp_path, word, told):
    done = start(tmp_path, "hf_compat", "by_hand", word, launcher=TORCHRUN, script=JOB)
    assert done.returncode == 1, done.stderr[-3000:]
    assert told in done.stderr and "make the model before it" in done.stderr, done.stderr[-3000:]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "names", [("ddp", "zero_3"), pytest.param(("ddp", "zero_2", "zero_3"), marks=pytest.mark.matrix)]
)
def test_adapters_resume_under_another_engine(tmp_path, names):
    """The losses are those of a run that changed nothing. DeepSpeed drops an empty group of the optimizer."""
    ways = {"ddp": "deepspeed=None", "zero_2": "stage=2", "zero_3": "stage=3"}

    def train(name: str, way: str, *words: str) -> list[list[float]]:
        folder = tmp_path / name
        folder.mkdir()
        found = result(folder, "hf_compat", "loaded", "adapters=True", way, *words, launcher=TORCHRUN, script=JOB)
        return found["runs"][0]["logs"]

    whole = {name: train(name, ways[name]) for name in names}
    for before, after in itertools.permutations(names, 2):
        resume = f"resume={str(tmp_path / before / 'hf_compat' / 'checkpoint-3')!r}"
        resumed = train(f"{before}_{after}", ways[after], resume)
        # the engines add gradients in different orders
        assert sum(resumed, []) == pytest.approx(sum(whole[before], []), rel=1e-4), (before, after)
