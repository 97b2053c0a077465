"""Processes that share each sequence (DeepSpeed's Ulysses, `sp_size` of a `ParallelismConfig`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from helpers.launching import TORCHRUN, result, series

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "sequence_job.py"
# Of 12 micro-batches an epoch, the third update's is the first of the two that the processes have exchanged
WITHIN_AN_EXCHANGE = ("gradient_accumulation_steps=1", "max_steps=14")


def run(folder: Path, processes: int, *words: str) -> dict:
    return result(folder, *words, launcher=[*TORCHRUN[:-1], str(processes)], script=JOB)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        # dropout shows whether random states go on within an exchange, too
        pytest.param(2, (*WITHIN_AN_EXCHANGE, "dropped=0.1"), id="ZeRO 1"),
        *(
            pytest.param(processes, words, id=name, marks=pytest.mark.matrix)
            for name, processes, words in (
                ("ZeRO 2, windows", 2, ("stage=2", "max_steps=8")),
                ("ZeRO 3", 2, ("stage=3", "max_steps=8")),
                ("ZeRO 0", 2, ("stage=0", *WITHIN_AN_EXCHANGE)),
                ("two groups", 4, ("max_steps=8",)),
                ("two groups, within an exchange", 4, (*WITHIN_AN_EXCHANGE, "stage=2")),
            )
        ),
    ],
)
def test_the_numbers_are_those_of_transformers(tmp_path, processes, words):
    train = partial(run, tmp_path, processes)
    theirs, ours = (train(api, *words) for api in ("theirs", "ours"))
    assert ours == theirs  # losses, norms, rates, epochs, tokens, evaluations, weights
    saved = {api: tmp_path / api / "checkpoint-6" for api in ("theirs", "ours")}
    found = LlamaForCausalLM.from_pretrained(saved["ours"]).state_dict()
    # under ZeRO 3 transformers saves parts alone
    others = {} if "stage=3" in words else load_file(saved["theirs"] / "model.safetensors")
    assert all(torch.equal(found[name], others[name]) for name in others)
    assert train("ours", *words, f"resume={str(tmp_path / 'ours' / 'checkpoint-3')!r}") == ours


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [pytest.param(2, 1), pytest.param(1, 2, marks=pytest.mark.matrix)],
)
def test_another_number_of_processes_keeps_the_place_in_the_data(tmp_path, saved, resumed):
    """Their losses tell the samples, as each has another."""

    def losses(folder: str, processes: int, *words: str) -> list[float]:
        # of less than an epoch, whose end is filled up for two
        part = ("gradient_accumulation_steps=1", "max_steps=8", f"sp={processes}")
        found = run(tmp_path / folder, processes, "ours", *part, *words)
        # DeepSpeed adds up the gradients of those that share a sequence, and upstream's loss does so before
        return series(found, "loss") + [norm / processes for norm in series(found, "grad_norm")[3:]]

    trained = losses("saved", saved)
    checkpoint = str(tmp_path / "saved" / "ours" / "checkpoint-3")
    # a sequence's parts are summed in another order
    assert losses("resumed", resumed, f"resume={checkpoint!r}") == pytest.approx(trained, abs=1e-5)
