"""Damages files of every kind that is read, one at a time, and uses them as a user would.

    python tests/sweeps/faults/mutations.py [--every N] [--seed SEED] [--only FORM] [--details]

Each checkpoint is resumed from by name and by `True`, converted or plotted. Right is: the run that was not damaged, or
an error of ours that names the file, or a warning of what is missing; by `True` the run goes on from the older, whole
checkpoint. What has the form of what might have been written, and no manifest to say otherwise, is accepted. Whole
weights that do not fit the model are those of another model: `True` refuses them by name, and takes no older ones. The
table counts for each form how the uses ended; the status is 1 if one hung, raised anything else, stopped an automatic
resume, named no file, left something behind, or went on silently and came to another result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import transformers
import wandb
from tqdm import tqdm

from helpers import damage, toy
from helpers.damage import Damage
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.checkpoint.convert import convert
from hf_compat.checkpoint.reading import read_weights
from hf_compat.errors import CheckpointMismatch, HfCompatError
from hf_compat.tools.commands.plot import plot
from sweeps.faults import payloads

LIMIT_SECONDS = 30
GOOD = ("right", "refused", "warned", "accepted", "misfit")
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
# what is told of a state that another program might have left out
WARNED = (
    "missing keys",
    "start anew",
    "Didn't find an RNG file",
    "random numbers are not those",
    "is not the one",
    "differs from its manifest.json and is read as it is",
)
BAD = ("HUNG", "FOREIGN", "STOPPED", "DIFFERS", "unnamed", "left over")
OPTIONS = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 4,
    "use_cpu": True, "disable_tqdm": True, "report_to": "none",
}  # fmt: skip
Weights = dict[str, torch.Tensor]
Use = Callable[[Path], object]  # of the output folder; returns weights where there are some


class Hung(BaseException):
    """A use took too long. Nothing catches it by the name of `Exception`."""


# ---- what is used, and how ----


def trained(out: Path, resume: object = None, model: torch.nn.Module | None = None, **values: object) -> Weights:
    """Train one update further than the checkpoints, and return the weights."""
    torch.manual_seed(5)
    steps = 4 if resume is None else 5
    args = TrainingArguments(str(out), **{**OPTIONS, "max_steps": steps, **values})
    trainer = Trainer(toy.Classifier() if model is None else model, args, train_dataset=toy.rows(16))
    trainer.train(resume_from_checkpoint=resume)
    assert resume is None or trainer.state.global_step == 5
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def tracked(out: Path, resume: object = None) -> Weights:
    """Train with a run of wandb that exists in this process only."""
    os.environ["WANDB_MODE"] = "disabled"
    try:
        return trained(out, resume, report_to="wandb")
    finally:
        wandb.finish()


def adapted() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(toy.tiny_gpt2(), LoraConfig(target_modules=["c_attn"], r=2))


def trained_adapter(out: Path, resume: object = None) -> Weights:
    torch.manual_seed(5)
    args = TrainingArguments(str(out), **{**OPTIONS, "max_steps": 4 if resume is None else 5})
    trainer = Trainer(adapted(), args, train_dataset=toy.blocks(16))
    trainer.train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def fit(out: Path, resume: str | None) -> Weights:
    """Train with Lightning's own trainer."""
    args = TrainingArguments(str(out), **{**OPTIONS, "max_steps": -1, "num_train_epochs": 1, "save_strategy": "no"})
    torch.manual_seed(5)
    model = toy.Classifier()
    saver = pl.callbacks.ModelCheckpoint(out, filename="it", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[] if resume else [saver], enable_checkpointing=not resume,
        limit_train_batches=4 if resume else 2,
    )  # fmt: skip
    trainer.fit(HFModule(model, args), HFDataModule(args, toy.rows(16)), ckpt_path=resume)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_name(out: Path) -> Weights:
    return trained(out, str(out / "checkpoint-4"))


def by_true(out: Path) -> Weights:
    return trained(out, True)


def into_folder(source: str) -> Use:
    def use(out: Path) -> Weights:
        convert(str(out / source), str(out / "converted"))
        return read_weights(str(out / "converted"))

    return use


def into_ckpt(out: Path) -> None:
    convert(str(out / "checkpoint-4"), str(out / "converted.ckpt"))


def plotted(out: Path) -> None:
    (picture,) = plot([str(out)], str(out / "curves"), kind="png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kind of folder, and what a user does with it.

    Args:
        write: Writes a good one.
        place: Where in it the damaged files are.
        uses: By name; "by True" has to go on whatever the damage.
        is_sealed: Whether the manifest is written again, so that it looks whole.
        has_places: Whether files are also removed, replaced, hidden.
        has_bytes: Whether bytes are damaged.
        most: Values that are changed in a file.
        only: Names of the files; all where it is empty.
    """

    write: Callable[[Path], object]
    place: str
    uses: dict[str, Use]
    is_sealed: bool = False
    has_places: bool = True
    has_bytes: bool = True
    most: int = 0
    only: tuple[str, ...] = ()

    def damages(self, good: Path, pick: random.Random) -> Iterator[Damage]:
        folder = good / self.place
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in self.only or names:
            if self.is_sealed and name == "manifest.json":
                continue
            if self.has_bytes:
                yield from damage.of_bytes(folder, name, pick)
            if self.has_places:
                others = [f"../checkpoint-2/{name}"] if (folder.parent / "checkpoint-2" / name).is_file() else []
                yield from damage.of_places(name, others)
            yield from damage.of_file(folder, name, self.most, pick)


def write_transformers(out: Path) -> None:
    torch.manual_seed(5)
    args = transformers.TrainingArguments(str(out), **OPTIONS)
    transformers.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16)).train()


def write_sharded(out: Path) -> None:
    """Write what FSDP writes, from one process: `checkpoint-4` holds shards, the older one is plain."""
    torch.manual_seed(5)
    trainer = Trainer(toy.Classifier(), TrainingArguments(str(out), **OPTIONS), train_dataset=toy.rows(16))
    trainer.train()
    last = out / "checkpoint-4"
    payloads.write_shards(last, trainer.model, trainer.optimizer)
    for name in ("model.safetensors", "optimizer.pt"):
        (last / name).unlink()
    payloads.sealed(last)


def write_ckpt(out: Path) -> None:
    trained(out / "plain")
    convert(str(out / "plain" / "checkpoint-4"), str(out / "it.ckpt"))


def write_zero(stage: str) -> Callable[[Path], object]:
    return lambda out: shutil.copytree(payloads.ZERO.parent / stage, out / "zero")


def write_state(out: Path) -> None:
    trained(out)
    shutil.copy(out / "checkpoint-4" / "trainer_state.json", out)
    for step in (2, 4):
        shutil.rmtree(out / f"checkpoint-{step}")


RESUMES: dict[str, Use] = {"by name": by_name, "by True": by_true}
ADAPTER: dict[str, Use] = {
    "by name": lambda out: trained_adapter(out, str(out / "checkpoint-4")),
    "by True": lambda out: trained_adapter(out, True),
}
SHARDS = payloads.shards.MODEL_FOLDER, payloads.shards.OPTIMIZER_FOLDER
FORMS = {
    "ours": Form(write=trained, place="checkpoint-4", uses=RESUMES),
    "sealed again": Form(
        write=trained, place="checkpoint-4", uses={**RESUMES, "convert": into_ckpt}, is_sealed=True, has_places=False,
        has_bytes=False, most=60,
    ),
    "transformers": Form(
        write=write_transformers, place="checkpoint-4", uses={**RESUMES, "convert": into_ckpt}, most=12
    ),
    "adapter": Form(
        write=trained_adapter, place="checkpoint-4", uses=ADAPTER, is_sealed=True, has_places=False, has_bytes=False,
        most=12, only=("adapter_config.json", "adapter_model.safetensors"),
    ),
    "shards": Form(
        write=write_sharded, place="checkpoint-4",
        uses={**RESUMES, **{f"convert {part}": into_folder(f"checkpoint-4/{part}") for part in SHARDS[:1]}},
        is_sealed=True, has_places=False,
        only=tuple(f"{part}/{file}" for part in SHARDS for file in (".metadata", "__0_0.distcp")),
    ),
    "ZeRO 2": Form(write=write_zero("stage2"), place="zero", uses={"convert": into_folder("zero")}, most=25),
    "ZeRO 3": Form(write=write_zero("stage3"), place="zero", uses={"convert": into_folder("zero")}, most=25),
    ".ckpt of convert": Form(
        write=write_ckpt, place="", most=60, only=("it.ckpt",),
        uses={"by name": lambda out: trained(out / "run", str(out / "it.ckpt")), "convert": into_folder("it.ckpt")},
    ),
    ".ckpt of Lightning": Form(
        write=lambda out: fit(out, None), place="", most=60, only=("it.ckpt",),
        uses={"fit": lambda out: fit(out, str(out / "it.ckpt")), "convert": into_folder("it.ckpt")},
    ),
    "trackers.json": Form(
        write=tracked, place="", most=40, only=("trackers.json",), uses={"by True": lambda out: tracked(out, True)},
    ),
    "plot": Form(write=write_state, place="", uses={"plot": plotted}, most=60, only=("trainer_state.json",)),
}  # fmt: skip


# ---- one try ----


@dataclass(frozen=True)
class Good:
    """A folder that is not damaged, and what its uses come to."""

    folder: Path
    results: dict[str, object]


def prepare(form: Form, folder: Path) -> Good:
    with muted():
        form.write(folder)
    good = Good(folder, {})
    for name, use in form.uses.items():
        copied = shutil.copytree(folder, folder.parent / "reference", symlinks=True)
        with muted():
            good.results[name] = use(copied)
        shutil.rmtree(copied)
    return good


def try_one(form: Form, good: Good, one: Damage, place: Path) -> dict[str, tuple[str, str]]:
    """Return how each use of a damaged copy ended, with the message of its error."""
    ends = {}
    for name, use in form.uses.items():
        out = shutil.copytree(good.folder, place, symlinks=True)
        path = out / form.place / one.file
        one.apply(path)
        if form.is_sealed:
            payloads.sealed(out / form.place)
        before = listing(out)
        with without_privileges() if one.is_hidden else contextlib.nullcontext():
            ends[name] = outcome(name, lambda use=use, out=out: use(out), good.results[name], path)
        if ends[name][0] == "DIFFERS" and is_open(name, one) and form is not FORMS["ours"]:
            ends[name] = ("accepted", "")
        if "convert" in name and ends[name][0] == "refused" and listing(out) != before:
            ends[name] = ("left over", str(listing(out) - before))
        shutil.rmtree(out)
    return ends


def outcome(name: str, use: Callable[[], object], expected: object, damaged: Path) -> tuple[str, str]:
    told_of: list[str] = []
    try:
        with muted(told_of), time_limit():
            found = use()
    except Hung:
        return "HUNG", ""
    except HfCompatError as error:
        told = str(error)
        is_named = any(place.name in told for place in (damaged, *list(damaged.parents)[:2]))
        if name == "by True":
            is_misfit = isinstance(error, CheckpointMismatch) and damaged.name in WEIGHTS and damaged.name in told
            return ("misfit" if is_misfit else "STOPPED"), told
        return ("refused" if is_named else "unnamed"), told
    except Exception:
        return "FOREIGN", traceback.format_exc(limit=-6)
    if same(found, expected):
        return "right", ""
    return ("warned" if any(words in one for one in told_of for words in WARNED) else "DIFFERS"), str(told_of)


def is_open(use: str, one: Damage) -> bool:
    """Return whether nobody can know that a value is not the one that was written; `convert` passes values on."""
    return one.is_plausible or ("convert" in use and one.is_value and one.file.endswith(".ckpt"))


def same(found: object, expected: object) -> bool:
    if not isinstance(expected, dict):
        return True
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    faulthandler.dump_traceback_later(
        4 * LIMIT_SECONDS, exit=True, file=sys.__stderr__
    )  # where C never comes back to Python
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def muted(messages: list[str] | None = None) -> Iterator[None]:
    """Show nothing; keep the messages of the package."""
    logger, listener = logging.getLogger("hf_compat"), Listener([] if messages is None else messages)
    before = logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.propagate = before
        logger.removeHandler(listener)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Take from root what lets it open any file: this thread's effective capabilities. Others have none of them."""
    if os.geteuid() != 0:
        yield
        return
    libc, head, data = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(head, data):
        raise OSError(ctypes.get_errno(), "capget")
    effective = data[0], data[3]
    data[0] = data[3] = 0
    libc.capset(head, data)
    try:
        yield
    finally:
        data[0], data[3] = effective
        libc.capset(head, data)


# ---- the run ----


def run(every: int = 1, seed: int = 0, only: str = "", details: bool = False) -> tuple[list[list[str]], bool]:
    """Try each n-th damage of each form. Returns the table, and whether all went well."""
    counts: dict[str, collections.Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="mutations_") as place:
        chosen = []
        for name, form in FORMS.items():
            if only in name:
                good = prepare(form, Path(place) / name.replace(" ", "_"))
                chosen += [(name, good, one) for one in form.damages(good.folder, random.Random(seed))][::every]
        for name, good, one in tqdm(chosen, desc="mutations", disable=None):
            count = counts.setdefault(name, collections.Counter())
            count["mutations"] += 1
            for use, (end, told) in try_one(FORMS[name], good, one, Path(place) / "try").items():
                count[end] += 1
                if end in BAD or details:
                    tqdm.write(f"{end}: {name}, {use}: {one.file}: {one.what}\n    {told.strip()}", file=sys.stderr)
    heads = ("mutations", *GOOD, *BAD)
    rows = [[name, *(str(count[head]) for head in heads)] for name, count in counts.items()]
    total = sum(counts.values(), collections.Counter())
    rows.append(["all", *(str(total[head]) for head in heads)])
    return [["form", *heads], *rows], not any(total[head] for head in BAD)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="each n-th damage of a form")
    parser.add_argument("--seed", type=int, default=0, help="which bytes and values are damaged")
    parser.add_argument("--only", default="", help="forms whose name holds this")
    parser.add_argument("--details", action="store_true", help="print each try")
    torch.set_num_threads(1)
    table, is_well = run(**vars(parser.parse_args()))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
