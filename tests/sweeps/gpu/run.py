"""What only a machine with a GPU shows: throughput in bf16, float16's scaler, NCCL, FSDP, and what an update waits for.

    .venv/bin/python tests/sweeps/gpu/run.py [--only NAME ...] [--rounds 3]

Two checks repeat what `tests/device` does on a pretended GPU: all configurations under both trainers, and what an
update, a log, an evaluation and a save wait for. One table has both.

Prints a line a check; one that this machine cannot make is left out, with the reason. The exit status is 0 when no
check is bad, 1 when one is, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import torch

NO_GPU = 2
VISIBLE = "CUDA_VISIBLE_DEVICES"
# What makes the host wait for the device, by the names that torch's profiler gives them.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "aten::item",
         "aten::_local_scalar_dense")  # fmt: skip
UPDATES = 12


class LeftOut(Exception):
    """What keeps a machine from making a check."""


def count_synchronisations(names: Iterable[str]) -> Counter[str]:
    """Count the events of a trace that make the host wait for the device."""
    return Counter(wait for name in names for wait in WAITS if name.startswith(wait))


def model_and_rows(samples: int):
    from sweeps.benchmarks import throughput

    torch.manual_seed(0)
    return throughput.gpt2(), throughput.rows(samples, causal=True)


def losses(api, **options) -> list[float]:
    """Train a small GPT-2 and return the losses that were logged."""
    model, rows = model_and_rows(UPDATES * 8)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=UPDATES, logging_steps=1, per_device_train_batch_size=8, save_strategy="no",
            report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = api.Trainer(model, args, train_dataset=rows)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def throughput_in_bf16(rounds: int) -> tuple[bool, str]:
    """Samples a second in bf16 are no fewer than transformers'."""
    import transformers

    import hf_compat
    from sweeps.benchmarks import throughput

    took = {api.__name__: [] for api in (transformers, hf_compat)}
    for _ in range(rounds):
        for api in (transformers, hf_compat):
            took[api.__name__].append(throughput.seconds(api, throughput.gpt2, {"bf16": True, "use_cpu": False}, 60))
    ours, theirs = statistics.median(took["hf_compat"]), statistics.median(took["transformers"])
    return ours <= 1.05 * theirs, f"{ours / theirs:.3f} × transformers' seconds"


def scaler_of_float16(rounds: int) -> tuple[bool, str]:
    """Losses in float16, whose scaler skips updates, are transformers' own."""
    import transformers

    import hf_compat

    # kernels of the GPU that add in any order would differ from themselves
    theirs, ours = (losses(api, fp16=True, full_determinism=True) for api in (transformers, hf_compat))
    return ours == theirs, f"{ours[-1]} and {theirs[-1]} after {UPDATES} updates"


def _in_launched_processes(count: int, **options) -> tuple[bool, str]:
    """Train under a launcher's environment, in a process group of NCCL; every process has to see the same losses."""
    code = f"import json, run, hf_compat; print('LOSSES', json.dumps(run.losses_of_a_group(hf_compat, **{options!r})))"
    path = os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "PYTHONPATH": path}
    with contextlib.ExitStack() as folders:
        logs = [Path(folders.enter_context(tempfile.TemporaryDirectory())) / "log" for _ in range(count)]
        processes = []
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **group}
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", code],
                        env={**_environment_at_start(), **place},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for process in processes:
                process.wait(timeout=300)
        finally:
            for process in processes:
                process.kill()
        texts = [log.read_text() for log in logs]
    for process, text in zip(processes, texts, strict=True):
        if process.returncode != 0:
            return False, text.strip().rpartition("\n")[2]
    found = [losses_in(text) for text in texts]
    good = all(math.isfinite(loss) for loss in found[0]) and all(other == found[0] for other in found)
    return good, f"{count} process{'es' if count > 1 else ''}, loss {found[0][-1]}"


def losses_in(text: str) -> list[float]:
    """Return the losses that a process has printed, whatever stands before and after them."""
    return json.loads(text.rpartition("LOSSES")[2].splitlines()[0])


def losses_of_a_group(api, **options) -> list[float]:
    """Train, and see to it that the processes have been a group of NCCL."""
    found = losses(api, **options)
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() != "nccl":
        raise RuntimeError("the processes are no group of NCCL")
    return found


def _two_gpus() -> int:
    if _gpus_at_start() < 2:
        raise LeftOut("NCCL takes one process a GPU, and there is one GPU")
    return 2


def nccl(rounds: int) -> tuple[bool, str]:
    """Two processes train in a group of NCCL."""
    return _in_launched_processes(_two_gpus(), ddp_backend="nccl")


def fsdp(rounds: int) -> tuple[bool, str]:
    """A model that FSDP shards over two processes trains."""
    return _in_launched_processes(_two_gpus(), fsdp="full_shard", ddp_backend="nccl")


def synchronisations(rounds: int) -> tuple[bool, str]:
    """Between logs an update waits for what the model's own forward waits for, and for nothing else."""
    import hf_compat

    _waits_of(hf_compat, 4)  # what is loaded and tuned at first
    few, many = (_waits_of(hf_compat, updates) for updates in (10, 30))
    model, rows = model_and_rows(8)
    model.cuda()
    ids = torch.stack([row["input_ids"] for row in rows]).cuda()
    with torch.profiler.profile() as profile:  # transformers' GPT-2 reads at each forward whether samples are packed
        for _ in range(20):
            model(input_ids=ids, labels=ids, use_cache=False)  # as both trainers call it
    of_model = count_synchronisations(event.name for event in profile.events())
    more = many - few - of_model
    return not more, f"in 20 updates more: {dict(more) or 'none'}, beside the model's own: {dict(of_model) or 'none'}"


def _waits_of(api, updates: int) -> Counter[str]:
    model, rows = model_and_rows(updates * 8)
    with tempfile.TemporaryDirectory() as folder:
        args = api.TrainingArguments(
            folder, max_steps=updates, logging_steps=10**6, per_device_train_batch_size=8, save_strategy="no",
            report_to="none", disable_tqdm=True, bf16=True,
            accelerator_config={"non_blocking": True},  # upstream's default waits for each batch's copy
        )  # fmt: skip
        trainer = api.Trainer(model, args, train_dataset=rows)
        with torch.profiler.profile() as profile:
            trainer.train()
    return count_synchronisations(event.name for event in profile.events())


DEVICE = HERE.parent / "device"


def configurations(rounds: int) -> tuple[bool, str]:
    """All configurations of `tests/sweeps/device/device_matrix.py` give on this GPU what transformers gives."""
    done = _on_this_gpu("device_matrix.py", "--kind", "real")
    told = done.stdout.strip().splitlines()
    print(*(f"          {line[:300]}" for line in told[:-1] if line.startswith("DIFFERENT")), sep="\n")
    return done.returncode == 0, told[-1] if told else done.stderr.strip().rpartition("\n")[2]


def waits_and_kernels(rounds: int) -> tuple[bool, str]:
    """Nothing waits for the device more often than under transformers, here and on the pretended one."""
    tables = [_on_this_gpu("waits.py", *words) for words in ((), ("--real",))]
    print(*side_by_side(*(done.stdout for done in tables)), sep="\n")
    ends = [done.stdout.strip().rpartition("\n")[2] for done in tables]
    return all(done.returncode == 0 for done in tables), f"pretended: {ends[0]}; real: {ends[1]}"


def side_by_side(pretended: str, real: str) -> list[str]:
    """Join the tables of two runs of `waits.py`: a row a configuration and moment, transformers and ours on both."""
    rows = [
        "| configuration | moment | pretended: transformers, ours | real: transformers, ours |",
        "|---|---|---|---|",
    ]
    one, other = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
        for text in (pretended, real)
    )
    moments = [head.partition(":")[0] for head in one[0][1:]] if one else []
    there = {line[0]: line[1:] for line in other[2:]}
    for name, *cells in one[2:]:
        for moment, cell, measured in zip(moments, cells, there.get(name, ["not measured"] * len(cells)), strict=True):
            rows += [f"| {name} | {moment} | {cell} | {measured} |"] if cell else []
    return rows


def _on_this_gpu(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    # a process that has asked CUDA for its devices cannot fork any more
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, str(DEVICE / script), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def tokens_a_second(rounds: int) -> tuple[bool, str]:
    """Tokens a second of a model bound by launches and of one bound by computing are no fewer than transformers'."""
    from sweeps.gpu import tokens

    ratios, rows = [], []
    for name in ("small", "large"):
        found = tokens.measured(tokens.SIZES[name], rounds, updates=40, names=list(tokens.CONTESTANTS))
        ratios.append(statistics.median(found["hf_compat"]) / statistics.median(found["transformers"]))
        rows += tokens.table(name, found)
    return min(ratios) >= 0.95, "\n".join(["", *tokens.HEAD, *rows])


def fsdp_1(rounds: int) -> tuple[bool, str]:
    """Version 1 of FSDP is refused, with the way to version 2."""
    good, found = _in_launched_processes(_two_gpus(), fsdp="full_shard", fsdp_config={"version": 1}, ddp_backend="nccl")
    return not good and "version" in found, found


CHECKS: dict[str, Callable[[int], tuple[bool, str]]] = {
    check.__name__: check
    for check in (
        throughput_in_bf16,
        tokens_a_second,
        scaler_of_float16,
        nccl,
        fsdp,
        fsdp_1,
        synchronisations,
        configurations,
        waits_and_kernels,
    )
}


@functools.cache
def _environment_at_start() -> dict[str, str]:
    return dict(os.environ)


@functools.cache
def _gpus_at_start() -> int:
    return torch.cuda.device_count()


def see_one_gpu() -> None:
    """Hide all GPUs but the first from this process: transformers would spread a model over them."""
    _environment_at_start()
    _gpus_at_start()
    os.environ[VISIBLE] = os.environ.get(VISIBLE, "0").partition(",")[0]


def outcome(check: Callable[[int], tuple[bool, str]], rounds: int) -> tuple[str, str]:
    """Make a check; one that fails in any way is bad, and those after it are made."""
    try:
        is_good, found = check(rounds)
    except LeftOut as reason:
        return "left out", str(reason)
    except Exception as error:
        return "BAD", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "good" if is_good else "BAD", found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was checked", file=sys.stderr)
        return NO_GPU
    see_one_gpu()
    outcomes = []
    for name in chosen.only:
        verdict, found = outcome(CHECKS[name], chosen.rounds)
        outcomes.append(verdict)
        print(f"{verdict:<8}  {name}: {found}", flush=True)
    return 1 if "BAD" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
