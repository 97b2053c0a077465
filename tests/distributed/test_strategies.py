"""Every strategy on two CPU processes: train, evaluate, save, resume as it was and with one process, `from_pretrained`.

The numbers are those of one process with the same global batch, within 1e-5 (sums are made in another order). The table
of docs/scale.md is made here: `python -m pytest tests/distributed/test_strategies.py` says where it differs.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.launching import OURS, result, series, start
from hf_compat.checkpoint.convert import convert

DOCS = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
STRATEGIES = {
    "DDP": {},
    "FSDP 2": {"fsdp": "True"},
    "FSDP 2, gradients and states only": {"fsdp": "shard_grad_op auto_wrap"},
    "FSDP 2, sharded checkpoints": {"fsdp": "True", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    **{f"DeepSpeed ZeRO {stage}": {"stage": stage} for stage in (1, 2, 3)},
    **{f"DeepSpeed ZeRO {stage}, `tensor_parallel`": {"stage": stage, "tensor_parallel": 2} for stage in (1, 2)},
    "tensor parallel, by `from_pretrained`": {"split": "loaded"},
    "tensor parallel, by torch's plan": {"split": "planned"},
    "tensor parallel × FSDP 2, by `from_pretrained`": {"split": "loaded", "processes": 4},
    "tensor parallel × FSDP 2, by torch's plan": {"split": "planned", "processes": 4, "fsdp": "True"},
    "tensor parallel × FSDP 2, sharded checkpoints": {
        "split": "planned", "processes": 4, "fsdp": "True", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
    },
}  # fmt: skip
# 16 samples are evaluated in whole batches: no process repeats one, and the losses are means over the same
COMMON = ("model=gpt2", "eval_strategy=epoch", "samples=32", "save_steps=2", "eval_samples=16")
ALONE = ("per_device_train_batch_size=4",)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process that trains a model on the whole batch."""
    run = functools.partial(result, launcher=())
    return functools.cache(lambda model: run(tmp_path_factory.mktemp("one") / "out", *COMMON, *ALONE, f"model={model}"))


@pytest.fixture(scope="module")
def found():
    """What the strategies of this session did, by name."""
    return {}


def words_of(name, folder):
    options = dict(STRATEGIES[name])
    if "stage" in options:
        config, split = folder / "zero.json", options.get("tensor_parallel", 1)
        content = {**ZERO, "zero_optimization": {"stage": options["stage"]}, "tensor_parallel": {"autotp_size": split}}
        config.write_text(json.dumps(content))
        kept = {"model": "llama", "per_device_train_batch_size": 4} if split > 1 else {}
        options = {"deepspeed": str(config), **kept}
    if "split" in options:  # two processes read each batch
        options |= {"model": "llama", "per_device_train_batch_size": 8 // options.pop("processes", 2)}
    return [f"{key}={value}" for key, value in options.items()]


def close(mine, theirs):
    return len(mine) == len(theirs) and max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-5


IN_EVERY_RUN = ("DDP", "tensor parallel, by torch's plan", "FSDP 2, sharded checkpoints", "DeepSpeed ZeRO 2")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.matrix) for name in STRATEGIES]
)
def test_strategy(name, tmp_path, one, found):
    words, launcher = words_of(name, tmp_path), [*OURS[:-1], str(STRATEGIES[name].get("processes", 2))]
    model = "llama" if "model=llama" in words else "gpt2"
    one = one(model)
    trained = result(tmp_path / "run", *COMMON, *words, launcher=launcher)
    row = {"trains": all(close(series(trained, key), series(one, key)) for key in ("loss", "grad_norm"))}
    assert series(trained, "total_flos") == series(one, "total_flos") and series(one, "total_flos")[-1] > 0
    row["evaluates"] = close(series(trained, "eval_loss"), series(one, "eval_loss"))

    shutil.copytree(tmp_path / "run" / "checkpoint-6", tmp_path / "checkpoint-6")
    resume = f"resume={tmp_path / 'checkpoint-6'}"
    again = result(tmp_path / "again", *COMMON, *words, resume, launcher=launcher)
    row["resumes"] = again == trained

    alone = start(tmp_path / "alone", *COMMON, *ALONE, f"model={model}", resume, launcher=())
    if alone.returncode == 0:
        other = json.loads((tmp_path / "alone" / "result.json").read_text())
        # the mean loss is that of the whole run there, too
        row["resumes in one process"] = all(close(series(other, k), series(trained, k)) for k in ("loss", "train_loss"))

    from transformers import AutoModelForCausalLM

    source = tmp_path / "run" / "checkpoint-8"  # written by the last update
    if (source / "pytorch_model_fsdp_0").is_dir():  # by the converter
        convert(str(source / "pytorch_model_fsdp_0"), str(tmp_path / "whole"))
        shutil.copy(source / "config.json", tmp_path / "whole")
        source = tmp_path / "whole"
    model = AutoModelForCausalLM.from_pretrained(source)
    saved = load_file(tmp_path / "run" / "final" / "model.safetensors")
    found_weights = model.state_dict()
    row["from_pretrained"] = bool(saved) and all(torch.equal(found_weights[name], saved[name]) for name in saved)
    found[name] = row
    needed = ("trains", "evaluates", "resumes", "from_pretrained")
    assert all(row[part] for part in needed), row
    assert row["resumes in one process"], alone.stderr[-2000:]


@pytest.mark.whole_file
def test_the_table_in_the_docs_says_what_was_found(found):
    parts = ("trains", "evaluates", "resumes", "resumes in one process", "from_pretrained")
    text = DOCS.read_text()
    assert set(IN_EVERY_RUN) <= set(found) <= set(STRATEGIES), (
        "run this whole file: the strategies' tests fill the table"
    )
    for name, row in found.items():
        line = f"| {name} | {' | '.join('yes' if row.get(part) else 'no' for part in parts)} |"
        assert line in text, f"docs/scale.md lacks:\n{line}"


ONE_RANK = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]


@pytest.mark.matrix
@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (1, 1), (3, 3), (2, 3), (3, 1)])
def test_zero_goes_on_with_another_number_of_ranks_and_stage(saved, resumed, tmp_path):
    """Two ranks, then one, then two again: each time as if nothing had changed but the order of sums."""
    before, after = (words_of(f"DeepSpeed ZeRO {stage}", tmp_path) for stage in (saved, resumed))
    part = ("gradient_accumulation_steps=2", *(word for word in COMMON if word != "eval_strategy=epoch"))
    expected = result(tmp_path / "whole", *part, *before, "num_train_epochs=1")
    config = Path(after[0].partition("=")[2])
    alone = (*ALONE, f"deepspeed={config}", f"resume={tmp_path / 'whole' / 'checkpoint-2'}", "num_train_epochs=1")
    shrunk = result(tmp_path / "one", *part, *alone, launcher=ONE_RANK)
    assert close(series(shrunk, "loss"), series(expected, "loss"))
    assert close(series(shrunk, "grad_norm"), series(expected, "grad_norm"))
    grown = result(tmp_path / "two", *part, *after, f"resume={tmp_path / 'one' / 'checkpoint-4'}", "num_train_epochs=2")
    longer = result(tmp_path / "longer", *part, *before, "num_train_epochs=2",
                    f"resume={tmp_path / 'whole' / 'checkpoint-4'}")  # fmt: skip
    assert close(series(grown, "loss"), series(longer, "loss"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        *(("DDP", f"DeepSpeed ZeRO {stage}") for stage in (1, 2, 3)),
        *(("FSDP 2", "DeepSpeed ZeRO 3"), ("DDP", "FSDP 2"), ("FSDP 2, sharded checkpoints", "DDP")),
    ],
)
def test_another_strategy_goes_on(saved, resumed, tmp_path):
    """Optimizer and schedule continue, too: no step begins anew."""
    part = (*(word for word in COMMON if word != "eval_strategy=epoch"), "num_train_epochs=1")
    expected = result(tmp_path / "whole", *part, *words_of(saved, tmp_path))
    first = tmp_path / "whole" / "checkpoint-2"
    found = result(tmp_path / "resumed", *part, *words_of(resumed, tmp_path), f"resume={first}")
    for value in ("loss", "learning_rate"):
        assert close(series(found, value), series(expected, value)), value


def test_an_optimizer_whose_parts_are_not_known_does_not_go_on_from_a_whole_checkpoint(tmp_path):
    """It would begin anew without a word."""
    part = ("model=plain", "max_steps=4", "optim=adafactor")
    done = start(tmp_path / "whole", *part, launcher=())
    assert done.returncode == 0, done.stderr[-3000:]
    words = (*words_of("DeepSpeed ZeRO 2", tmp_path), f"resume={tmp_path / 'whole' / 'checkpoint-2'}")
    done = start(tmp_path / "resumed", *part, *words, launcher=ONE_RANK)
    assert done.returncode == 1 and "this run's is Adafactor" in done.stderr, done.stderr[-3000:]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["DeepSpeed ZeRO 3", "FSDP 2, sharded checkpoints"])
def test_the_best_model_is_loaded_into_one_that_is_in_parts(name, tmp_path):
    best = ("load_best_model_at_end=True", "metric_for_best_model=loss")
    often = ("eval_strategy=steps", "eval_steps=2", "save_steps=2", "max_steps=4")
    trained = result(tmp_path / "run", *COMMON, *words_of(name, tmp_path), *often, *best)
    first, last = series(trained, "eval_loss")[:2]
    assert first < last
    assert trained["eval_loss"] == pytest.approx(first, abs=1e-6)
