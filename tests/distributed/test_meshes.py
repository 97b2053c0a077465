"""Processes that share each layer of a model (tensor parallelism). test_strategies.py has their table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from helpers.launching import TORCHRUN, result, start

JOB = Path(__file__).resolve().parents[1] / "helpers" / "jobs" / "loaded_job.py"
ZERO = '{"train_micro_batch_size_per_gpu": "auto", "tensor_parallel": {"autotp_size": %d}, "gradient_clipping": "auto"'


def zero(stage: int, further: str = "", split: int = 2) -> str:
    return f'deepspeed={ZERO % split}{further}, "zero_optimization": {{"stage": {stage}}}}}'


BF16 = ', "bf16": {"enabled": "auto"}'


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        pytest.param(2, ("tp=2",), id="tp_plan"),
        pytest.param(4, ("tp=2",), id="tp_plan, two models", marks=pytest.mark.matrix),
        pytest.param(2, ("whole=True", zero(2)), id="2", marks=pytest.mark.matrix),
        # its loss is the very tensor that the model returned, whose gradients DeepSpeed once divided twice
        pytest.param(1, ("whole=True", zero(0, split=1)), id="one process"),
        pytest.param(2, ("whole=True", zero(0)), id="0", marks=pytest.mark.matrix),
        pytest.param(2, ("whole=True", zero(1, BF16), "bf16=True"), id="1, bf16", marks=pytest.mark.matrix),
        pytest.param(4, ("whole=True", zero(1)), id="1, two models", marks=pytest.mark.matrix),
    ],
)
def test_the_numbers_are_those_of_transformers(tmp_path, processes, words):
    run = partial(result, tmp_path, launcher=[*TORCHRUN[:-1], str(processes)], script=JOB)
    theirs, ours = (run(api, *words) for api in ("theirs", "ours"))
    # each process gives the same results: upstream cuts those of all ranks where one model's end
    assert ours["logs"] == theirs["logs"]
    checkpoint = tmp_path / "ours" / "checkpoint-3"
    assert run("ours", *words, f"resume={str(checkpoint)!r}") == ours


TWO_MODELS = {
    "tp_plan": ("tp=2", "per_device_train_batch_size=1"),
    "DeepSpeed": ("whole=True", zero(1), "per_device_train_batch_size=1"),
}


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        pytest.param(2, ("tp=2",), id="tp_plan"),
        *(
            pytest.param(4, (*words, *running), id=f"{name}, two models{', torchmetrics' * bool(running)}",
                         marks=pytest.mark.matrix)
            for name, words in TWO_MODELS.items()
            for running in ((), ("running=True",))
        ),
    ],
)  # fmt: skip
def test_metrics_the_best_model_and_generation_are_those_of_one_process(tmp_path, processes, words):
    """12 samples in batches of 8: the last batch of the second model is filled up."""
    options = ("ours", "further=True")
    found = result(tmp_path / "some", *options, *words, launcher=[*TORCHRUN[:-1], str(processes)], script=JOB)
    alone = result(tmp_path / "one", *options, "whole=True", launcher=[*TORCHRUN[:-1], "1"], script=JOB)
    for name in ("best", "counted", "generated"):
        assert found[name] == alone[name], name
    assert alone["best"] == 3 and alone["counted"][0] == 12
    numbers = [[number for log in run["logs"] for number in log] for run in (found, alone)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)  # sums are made in another order


PLACES = {  # processes, what splits the model, samples of a process
    "DeepSpeed": (2, ("whole=True", zero(1)), 2),
    "DeepSpeed, two models": (4, ("whole=True", zero(1)), 1),
    "tp_plan": (2, ("tp=2",), 2),
    "DDP": (2, ("whole=True",), 1),
}
# The second has as many processes and samples as before, and other ranks read them
IN_EVERY_RUN = [("DeepSpeed", "tp_plan"), ("tp_plan", "DDP")]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        *IN_EVERY_RUN,
        *(
            pytest.param(saved, resumed, marks=pytest.mark.matrix)
            for saved in ("DeepSpeed", "tp_plan")
            for resumed in PLACES
            if saved != resumed and (saved, resumed) not in IN_EVERY_RUN
        ),
    ],
)
def test_a_run_goes_on_where_layers_are_split_otherwise(tmp_path, saved, resumed):
    """Optimizer and data go on, too: the same samples, each once."""

    def run(name, folder, *words):
        processes, split, size = PLACES[name]
        launcher, size = [*TORCHRUN[:-1], str(processes)], f"per_device_train_batch_size={size}"
        found = result(folder, "ours", *split, size, *words, launcher=launcher, script=JOB)
        return [number for log in found["logs"] for number in log]

    trained = run(saved, tmp_path / "saved")
    checkpoint = str(tmp_path / "saved" / "ours" / "checkpoint-3")
    assert run(resumed, tmp_path / "resumed", f"resume={checkpoint!r}") == pytest.approx(trained, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tp=2", zero(2)), "Hint: leave one of them out"),
        pytest.param(("tp=2", "fsdp=True"), "Hint: leave it out, or start a multiple of 2", marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, words, told):
    done = start(tmp_path, "ours", *words, launcher=TORCHRUN, script=JOB)
    assert done.returncode == 1 and told in done.stderr, done.stderr[-3000:]
