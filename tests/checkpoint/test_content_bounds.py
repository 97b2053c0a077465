"""Small files that stand for gigabytes, and moments in another memory layout: refused, or made what they should be."""

from __future__ import annotations

import collections
import contextlib
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch

from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.checkpoint import files
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.errors import CheckpointError
from hf_compat.runtime.text import brief


def sharing(levels=60):
    """A list whose text has 2**levels parts."""
    parts = ["end"]
    for _ in range(levels):
        parts = [parts, parts]
    return parts


def circular():
    parts = []
    parts.append({"parts": parts})
    return parts


def deep(levels=300):
    parts = []
    for _ in range(levels):
        parts = [parts]
    return parts


def trainer(make_args, steps=4, **values):
    args = make_args(**{"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "logging_steps": 1, **values})
    return Trainer(toy.Classifier(), args, train_dataset=toy.rows())


@pytest.mark.parametrize("make", [sharing, circular, deep, lambda: torch.zeros(1).expand(10**9)])
@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "run_state.pt"])
def test_a_small_file_that_stands_for_gigabytes_is_refused_at_once(make_args, tmp_path, caplog, file, make):
    trainer(make_args).train()
    newest = tmp_path / "out" / "checkpoint-4"
    content = read_torch_file(str(newest / file), allowed=_types()) if file != "rng_state.pth" else {}
    torch.save({**content, "param_groups": make(), "last_epoch": make(), "python": make()}, newest / file)
    for name in ("manifest.json", *(["run_state.pt"] if file == "rng_state.pth" else [])):
        (newest / name).unlink()
    with pytest.raises(ValueError, match=f"{file} cannot be read"):
        trainer(make_args).train(resume_from_checkpoint=str(newest))
    began = time.monotonic()
    trainer(make_args).train(resume_from_checkpoint=True)
    assert time.monotonic() - began < 10
    assert (
        f"checkpoint-4 is not whole and is skipped: it cannot be loaded ({newest / file} cannot be read" in caplog.text
    )


def test_objects_that_only_torch_would_make_are_walked_through_before(tmp_path):
    torch.save({"a": collections.deque([sharing()])}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"its few bytes stand for .* parts or more"):
        read_torch_file(str(tmp_path / "file.pt"))


def _types():
    from hf_compat.checkpoint.run_state import ARRAY_GLOBALS

    return ARRAY_GLOBALS


@pytest.mark.parametrize("make", [sharing, circular, deep])
def test_an_error_shows_the_beginning_of_a_value_alone(make):
    began = time.monotonic()
    assert len(brief(make(), 60)) <= 61 and len(brief({"of": make()}, 60)) <= 61
    assert time.monotonic() - began < 1
    assert brief(["a", 1, None]) == "['a', 1, None]" and brief("x" * 10**8).startswith("'xxx")


def repeated(moment):
    return moment.mean().expand(moment.shape)


def transposed(moment):
    return moment.t().contiguous().t() if moment.dim() == 2 else moment


def with_gaps(moment):
    return torch.stack([moment, moment], -1)[..., 0]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("lay_out", [repeated, transposed, with_gaps])
def test_moments_in_another_layout_train_as_contiguous_ones(make_args, tmp_path, lay_out, optim):
    trainer(make_args, optim=optim).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    content = read_torch_file(str(checkpoint / "optimizer.pt"))
    for kept in content["state"].values():
        kept |= {name: lay_out(kept[name].contiguous()) for name in ("exp_avg", "exp_avg_sq")}
    logs = []
    for change in (torch.Tensor.clone, torch.Tensor.contiguous):
        for kept in content["state"].values():
            kept |= {name: change(kept[name]) for name in ("exp_avg", "exp_avg_sq") if change is not torch.Tensor.clone}
        torch.save(content, checkpoint / "optimizer.pt")
        resumed = trainer(make_args, optim=optim, save_strategy="no")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file was edited
            resumed.train(resume_from_checkpoint=str(checkpoint))
        logs.append([(log["loss"], log["grad_norm"]) for log in resumed.state.log_history if "loss" in log])
        weights = [value.clone() for value in resumed.model.state_dict().values()]
        logs[-1].append([value.tolist() for value in weights])
    assert logs[0] == logs[1] and len(logs[0]) == 5


def fitted(ckpt):
    """Fit for an epoch, or for the second one from a Lightning checkpoint. Return the trainer and the weights."""
    torch.manual_seed(5)
    model = toy.Classifier()
    settings = {"output_dir": "unused", "use_cpu": True, "per_device_train_batch_size": 4}
    args = TrainingArguments(**settings, optim="adamw_torch_fused", learning_rate=1e-2)
    native = pl.Trainer(
        max_epochs=1 if ckpt is None else 2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    native.fit(HFModule(model, args), HFDataModule(args, toy.rows(16)), ckpt_path=ckpt)
    return native, [value.tolist() for value in model.state_dict().values()]


def test_moments_of_a_native_fit_in_another_layout_train_as_contiguous_ones(tmp_path):
    native, _ = fitted(None)
    native.save_checkpoint(path := tmp_path / "it.ckpt")
    content = torch.load(path, weights_only=False)
    found = []
    for change in (repeated, lambda moment: repeated(moment).contiguous()):
        states = content["optimizer_states"][0]["state"]
        for kept in states.values():
            kept |= {name: change(kept[name]) for name in ("exp_avg", "exp_avg_sq")}
        torch.save(content, path)
        found.append(fitted(str(path))[1])
    assert found[0] == found[1]


def test_a_conversion_asks_for_no_more_than_the_file_holds(make_args, tmp_path):
    from hf_compat.checkpoint.convert import convert

    trainer(make_args).train()
    convert(str(tmp_path / "out" / "checkpoint-4"), str(tmp_path / "run.ckpt"))
    content = torch.load(tmp_path / "run.ckpt", weights_only=False)
    name = next(iter(content["state_dict"]))
    content["state_dict"][name] = torch.zeros(1).expand(2**32)
    torch.save(content, tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="its few bytes stand for"):
        convert(str(tmp_path / "run.ckpt"), str(tmp_path / "folder"))


def named(module, *given):
    return type("Kind", (files.Named,), {"module": module, "name": "Kind"})(*given)


ONE, SHARED = torch.zeros(1), [1, 2, 3]
TWICE = ONE.expand(3)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (3, None),
        ([0] * 9, None),
        ([0] * 10, "11 parts"),
        ((0,) * 10, "11 parts"),
        (set(range(10)), "11 parts"),
        (frozenset(range(10)), "11 parts"),
        (dict.fromkeys(range(4)), None),
        (dict.fromkeys(range(5)), "11 parts"),
        (range(100), None),
        ([SHARED, SHARED], None),
        ([SHARED, SHARED, 0, 0], "11 parts"),
        ([[[SHARED[:1]], 0], 0], "nested too deeply"),
        ([[[1, object()]]], None),
        (named("torch", *range(10)), "11 parts"),
        (named("user", *range(10)), None),
        (torch.zeros(100)[:1], None),
        (ONE.expand(3), None),
        (ONE.expand(4), "12 bytes of repeated"),
        ([TWICE, TWICE], "16 bytes of repeated"),
        ([ONE.expand(2), ONE.expand(2)], None),
        (torch.zeros(3).to_sparse(), None),
        ([torch.zeros(3, device="meta")], "without data"),
    ],
)
def test_the_bounds_of_a_content(monkeypatch, content, told):
    for name, bound in {"_MOST_PARTS": 10, "_DEEPEST": 3, "_MOST_REPEATED_BYTES": 8}.items():
        monkeypatch.setattr(files, name, bound)
    with pytest.raises(CheckpointError, match=f"it cannot be read.*{told}") if told else contextlib.nullcontext():
        assert files.refuse_huge_content("it", content) is None
