"""Tries to run code, or to delete a file elsewhere, by way of every file of every form of checkpoint.

    python tests/sweeps/faults/payloads.py [--every N]

A payload writes a mark when it runs. The checkpoints are used as a user would: resumed from by name and by `True`,
converted, rotated. The table counts for each form and file the tries, and how each one ended; the status is 1 if
anything ran, was deleted outside, took longer than a minute, or raised an error that is not ours.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from helpers import toy
from hf_compat import Trainer, TrainingArguments, get_last_checkpoint
from hf_compat.checkpoint import deepspeed_state, manifest
from hf_compat.checkpoint import model_state as shards
from hf_compat.checkpoint.convert import convert
from hf_compat.errors import HfCompatError

ZERO = Path(__file__).parents[2] / "checkpoint" / "zero" / "stage2"
LIMIT_SECONDS = 60
BAD = ("RAN", "DELETED", "hung", "foreign error")


# ---- payloads: each is an object that runs code when it is unpickled ----


class Reduced:
    """Calls a function when it is unpickled."""

    def __init__(self, function: object, *arguments: object):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def code_of(mark: Path) -> str:
    return f"open({str(mark)!r}, 'a').close()"


def objects(mark: Path) -> dict[str, object]:
    import codecs
    import functools
    import operator
    import runpy
    import subprocess
    import timeit

    import numpy as np

    code, touch = code_of(mark), f"touch '{mark}'"
    script = mark.with_suffix(".py")
    script.write_text(code)
    hidden = np.empty(1, dtype=object)
    hidden[0] = Reduced(exec, code)
    careless_load = functools.partial(torch.load, weights_only=False)
    return {
        "os.system": Reduced(os.system, touch),
        "exec": Reduced(exec, code),
        "eval": Reduced(eval, code),
        "subprocess": Reduced(subprocess.check_output, ["touch", str(mark)]),
        "runpy": Reduced(runpy.run_path, str(script)),
        "timeit": Reduced(timeit.timeit, code, "pass", timeit.default_timer, 1),
        "pickle in a pickle": Reduced(pickle.loads, pickle.dumps(Reduced(exec, code))),
        "torch.load": Reduced(careless_load, io.BytesIO(torch_bytes(Reduced(exec, code)))),
        "operator": Reduced(operator.methodcaller("__call__", code), exec),
        "partial": Reduced(functools.partial(exec, code)),
        "codecs": Reduced(functools.reduce, operator.add, [codecs.encode("a", "rot13"), Reduced(exec, code)]),
        "in an array": hidden,
    }


def torch_bytes(content: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def contents(mark: Path) -> dict[str, bytes]:
    """Each payload as a file's content, in the forms that readers of torch know."""
    found = {}
    for name, harmful in objects(mark).items():
        found[f"{name}, torch"] = torch_bytes({"version": 2, "state": harmful, "param_groups": [], "a": harmful})
        found[f"{name}, pickle"] = pickle.dumps(harmful)
    exec_it = Reduced(exec, code_of(mark))
    found["exec, old torch"] = torch_bytes({"a": exec_it}, zipped=False)
    found |= {f"exec, protocol {number}": pickle.dumps(exec_it, protocol=number) for number in (0, 1, 2, 5)}
    return found


# ---- checkpoints: one folder of each form, written once ----


@dataclass
class Forms:
    """One good checkpoint of each form, and what is copied for a try."""

    folder: Path

    def arguments(self, out: Path, **values: object) -> TrainingArguments:
        base = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
        quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 2}
        return TrainingArguments(output_dir=str(out), **{**base, **quiet, **values})

    def trainer(self, out: Path, form: str, **values: object) -> Trainer:
        if form == "PEFT":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(toy.tiny_gpt2(), LoraConfig(target_modules=["c_attn"], r=2))
            return Trainer(model, self.arguments(out, **values), train_dataset=toy.blocks(16))
        return Trainer(toy.Classifier(), self.arguments(out, **values), train_dataset=toy.rows(16))

    def write(self) -> None:
        for form in ("plain", "PEFT"):
            self.trainer(self.folder / form, form).train()
        shutil.copytree(self.folder / "plain", self.folder / "DCP")
        for step in (2, 4):
            self._shard(self.folder / "DCP" / f"checkpoint-{step}")
        shutil.copytree(self.folder / "plain", self.folder / "DeepSpeed")
        for step in (2, 4):
            target = self.folder / "DeepSpeed" / f"checkpoint-{step}"
            (target / "optimizer.pt").unlink()
            shutil.copytree(ZERO, target, dirs_exist_ok=True)
            manifest.seal(str(target))
        (self.folder / ".ckpt").mkdir()
        convert(str(self.folder / "plain" / "checkpoint-4"), str(self.folder / ".ckpt" / "it.ckpt"))

    def _shard(self, folder: Path) -> None:
        model = toy.Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8), torch.zeros(1, dtype=torch.long))["loss"].backward()
        optimizer.step()
        write_shards(folder, model, optimizer)
        for name in ("model.safetensors", "optimizer.pt"):
            (folder / name).unlink()
        manifest.seal(str(folder))

    def use(self, form: str, out: Path) -> None:
        """Use a form as a user would."""
        last = out / "checkpoint-4"
        if form == ".ckpt":
            attempt(lambda: convert(str(out / "it.ckpt"), str(out / "converted")))
            return attempt(lambda: self.trainer(out / "run", form).train(resume_from_checkpoint=str(out / "it.ckpt")))
        if form == "DeepSpeed":
            attempt(lambda: load_deepspeed(last))
        if form in ("DCP", "DeepSpeed"):
            attempt(lambda: convert(str(last), str(out / "converted")))
            for part in (shards.MODEL_FOLDER, shards.OPTIMIZER_FOLDER):
                attempt(lambda part=part: convert(str(last / part), str(out / f"converted_{part}")))
        attempt(lambda: get_last_checkpoint(out))
        attempt(lambda: self.trainer(out, form, max_steps=5).train(resume_from_checkpoint=str(last)))
        attempt(lambda: self.trainer(out, form, max_steps=5).train(resume_from_checkpoint=True))
        attempt(lambda: manifest.recover(str(out)))
        attempt(lambda: manifest.remove(str(last)))
        return None


def write_shards(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write shards of weights and optimizer, as a model of FSDP 2 does."""
    state = shards.MeshState(model, writes_shards=True)
    state.write_weights(str(folder), lambda folder, state_dict: None, for_checkpoint=True)
    state.write_optimizer(str(folder), optimizer, is_writer=True)


class Engine:
    """What DeepSpeed's engine does to load: it looks for files by a pattern and unpickles what it finds."""

    def __init__(self) -> None:
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        self.checkpoint_engine = TorchCheckpointEngine()

    def load_universal_checkpoint(self) -> bool:
        return False

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def load_checkpoint(self, load_dir: str, tag: str | None = None, load_lr_scheduler_states: bool = True) -> None:
        import glob

        tag = tag or Path(load_dir, "latest").read_text().strip()
        for pattern in ("*_model_states.pt", "*_optim_states.pt"):
            for path in sorted(glob.glob(os.path.join(load_dir, tag, pattern))):
                self.checkpoint_engine.load(path, map_location="cpu")


def load_deepspeed(folder: Path) -> None:
    counted = deepspeed_state.distributed.get_world_size
    deepspeed_state.distributed.get_world_size = lambda: 2
    try:
        state = deepspeed_state.DeepSpeedState(toy.Classifier(), Engine())
        state.load_optimizer(str(folder), torch.optim.SGD(toy.Classifier().parameters()))
    finally:
        deepspeed_state.distributed.get_world_size = counted


ENDS: list[str] = []
READERS = shards.read_dcp, deepspeed_state.check_zero_files


def attempt(action: Callable[[], object]) -> None:
    """Do something; an error of ours is as good as none, and others are counted."""
    try:
        action()
        ENDS.append("read or passed over")
    except HfCompatError:
        ENDS.append("refused")
    except TimeoutError:
        ENDS.append("hung")
    except Exception as error:
        ENDS.append("foreign error")
        if os.environ.get("PAYLOADS_DEBUG"):
            import traceback

            traceback.print_exception(error)


# ---- tries ----


@dataclass(frozen=True)
class Try:
    """A checkpoint of a form, with something harmful in one of its files."""

    form: str
    file: str
    kind: str
    harm: Callable[[Path, Path], None]  # of the output folder, and the mark
    is_targeted: bool = False


def sealed(folder: Path) -> None:
    """Write the manifest again, as an attacker would."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "manifest.json").unlink()
    manifest.seal(str(folder))


def put(name: str, kind: str, has_manifest: bool) -> Callable[[Path, Path], None]:
    """Return what puts a payload into a file of the newest checkpoint."""

    def harm(out: Path, mark: Path) -> None:
        folder = out / "checkpoint-4" if (out / "checkpoint-4").is_dir() else out
        payload = contents(mark)[kind]
        if name == "trackers.json":
            (out / name).write_bytes(payload)
            return
        (folder / name).write_bytes(payload)
        for stem, index in (("pytorch_model", "pytorch_model.bin.index.json"),):
            if name == f"{stem}-00001-of-00001.bin":
                (folder / index).write_text(json.dumps({"weight_map": {"inner.weight": name}}))
        if name.startswith("pytorch_model"):
            (folder / "model.safetensors").unlink(missing_ok=True)
        if name == "adapter_model.bin":
            (folder / "adapter_model.safetensors").unlink(missing_ok=True)
        if name == "rng_state.pth":
            (folder / "run_state.pt").unlink(missing_ok=True)
        if folder != out and name != "manifest.json":
            sealed(folder)
            if not has_manifest:
                (folder / "manifest.json").unlink()

    return harm


STATES = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "run_state.pt", "training_args.bin")
RANK = "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"
FILES = {
    "plain": (*STATES, "pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.safetensors"),
    "PEFT": ("adapter_model.bin", "adapter_model.safetensors", "adapter_config.json"),
    "DCP": tuple(
        f"{part}/{name}"
        for part in (shards.MODEL_FOLDER, shards.OPTIMIZER_FOLDER)
        for name in (".metadata", "__0_0.distcp")
    ),
    "DeepSpeed": ("global_step4/mp_rank_00_model_states.pt", RANK, "latest"),
    ".ckpt": ("it.ckpt",),
}
TEXTS = ("manifest.json", "trainer_state.json", "trackers.json", "model.safetensors.index.json")


def broad_tries(kinds: list[str]) -> Iterator[Try]:
    """Every payload in every file that might be unpickled."""
    for form, files in FILES.items():
        for name in files:
            for number, kind in enumerate(kinds):
                yield Try(form, name, kind, put(name, kind, has_manifest=number % 2 == 0))
    for name in TEXTS:
        for kind in kinds[:6]:
            yield Try("plain", name, kind, put(name, kind, has_manifest=True))


def targeted_tries() -> Iterator[Try]:
    """What got through once, and what is like it."""
    for form, file, kind, harm in TARGETED:
        yield Try(form, file, kind, harm, is_targeted=True)


TARGETED: list[tuple[str, str, str, Callable[[Path, Path], None]]] = []


def targeted(form: str, file: str, kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def note(harm: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        TARGETED.append((form, file, kind, harm))
        return harm

    return note


def entry_as_bytes(folder: Path, key_has: str, payload: bytes) -> None:
    """Turn an entry of a shard folder into bytes: a payload that the index calls a plain value."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    key = next(key for key in index.state_dict_metadata if key_has in key)
    place = next(place for place in index.storage_data if place.fqn == key)
    info = index.storage_data[place]
    shard = folder / info.relative_path
    start = shard.stat().st_size
    with open(shard, "ab") as file:
        file.write(payload)
    index.state_dict_metadata[key] = BytesStorageMetadata()
    del index.storage_data[place]
    bytes_place = type(place)(fqn=key)
    index.storage_data[bytes_place] = type(info)(info.relative_path, start, len(payload))
    path.write_bytes(pickle.dumps(index))


def shard_attack(part: str, key_has: str, kind: str) -> None:
    @targeted("DCP", f"{part}/__0_0.distcp", f"{key_has} as bytes: {kind}")
    def harm(out: Path, mark: Path) -> None:
        entry_as_bytes(out / "checkpoint-4" / part, key_has, contents(mark)[kind])
        sealed(out / "checkpoint-4")


for _kind in ("os.system, torch", "exec, torch", "exec, old torch", "exec, protocol 2", "in an array, torch"):
    for _key in ("betas", "lr", "weight_decay", "exp_avg"):
        shard_attack(shards.OPTIMIZER_FOLDER, _key, _kind)
    for _key in ("inner.weight", "outer.bias"):
        shard_attack(shards.MODEL_FOLDER, _key, _kind)


@targeted("DCP", ".metadata", "swapped between check and use")
def swap_index(out: Path, mark: Path) -> None:
    read = shards.read_dcp

    def swap_and_read(dcp, state):
        Path(dcp.path, ".metadata").write_bytes(pickle.dumps(Reduced(exec, code_of(mark))))
        shards.read_dcp = read
        read(dcp, state)

    shards.read_dcp = swap_and_read


@targeted("DCP", ".metadata", "a rank's own index, and none of all")
def own_index(out: Path, mark: Path) -> None:
    folder = out / "checkpoint-4" / shards.OPTIMIZER_FOLDER
    (folder / "__0.metadata").write_bytes(pickle.dumps(Reduced(exec, code_of(mark))))
    (folder / ".metadata").write_bytes(b"")
    sealed(out / "checkpoint-4")


@targeted("plain", "optimizer_0/", "planted, not in the manifest")
def planted_shards(out: Path, mark: Path) -> None:
    made = out.parent / "made"
    Forms(made)._shard(shutil.copytree(out / "checkpoint-4", made / "checkpoint-4"))
    for part in (shards.MODEL_FOLDER, shards.OPTIMIZER_FOLDER):
        shutil.copytree(made / "checkpoint-4" / part, out / "checkpoint-4" / part)
        (out / "checkpoint-4" / part / ".metadata").write_bytes(pickle.dumps(Reduced(exec, code_of(mark))))


def latest_attack(text: str) -> None:
    @targeted("DeepSpeed", "latest", f"names {text!r}")
    def harm(out: Path, mark: Path) -> None:
        folder = out / "checkpoint-4"
        shutil.copytree(folder / "global_step4", folder / "global_step[2]")
        shutil.copytree(folder / "global_step4", folder / "global_step2")
        shutil.copytree(folder / "global_step4", out / "elsewhere")
        for place in (folder / "global_step2", out / "elsewhere"):
            for path in place.iterdir():
                path.write_bytes(contents(mark)["exec, torch"])
        (folder / "latest").write_text(text)
        sealed(folder)


for _text in ("global_step[2]", "global_step?", "*", "global_step2*", "global_step2", "a\0b"):
    latest_attack(_text)
for _text in ("../elsewhere", "../elsewhere\n", "./global_step2", "/elsewhere", "global_step2/../global_step2"):
    latest_attack(_text)


@targeted("DeepSpeed", "*_model_states.pt", "a second file that the pattern finds, not in the manifest")
def more_states(out: Path, mark: Path) -> None:
    planted = out / "checkpoint-4" / "global_step4" / "mp_rank_01_model_states.pt"
    planted.write_bytes(contents(mark)["exec, torch"])


@targeted("DeepSpeed", "*_model_states.pt", "swapped between check and use")
def swap_states(out: Path, mark: Path) -> None:
    check, payload = deepspeed_state.check_zero_files, contents(mark)["exec, torch"]

    def check_and_swap(found, name):
        deepspeed_state.check_zero_files = check
        check(found, name)
        for path in (found.folder / name).iterdir():
            path.write_bytes(payload)

    deepspeed_state.check_zero_files = check_and_swap


def name_attack(name: str) -> None:
    @targeted("plain", "manifest.json", f"lists {name[:40]!r}")
    def harm(out: Path, mark: Path) -> None:
        folder = out / "checkpoint-4"
        listed = json.loads((folder / "manifest.json").read_text())
        listed["files"][name.replace("VICTIM", str(out.parent / "victim.txt"))] = {"bytes": 6, "sha256": "0"}
        (folder / "manifest.json").write_text(json.dumps(listed))
        (folder / "notes.md").write_text("so that files are deleted one by one")
        (folder / "up").symlink_to(out.parent)


for _name in (
    "../../victim.txt", "../victim.txt", "VICTIM", "up/victim.txt", "./../../victim.txt", "part/../../../victim.txt",
    "a\0b", "\ud800", "x" * 5000, "", ".", "..", "up",
):  # fmt: skip
    name_attack(_name)


def planted_file(name: str) -> None:
    @targeted("plain", name, "planted, not in the manifest")
    def harm(out: Path, mark: Path) -> None:
        (out / "checkpoint-4" / name).write_bytes(contents(mark)["exec, torch"])


for _name in ("pytorch_model.bin", "scaler.pt", "rng_state_0.pth", "run_state_0.pt", "adapter_model.bin", "latest"):
    planted_file(_name)


def special_file(name: str, what: str) -> None:
    @targeted("plain", name, what)
    def harm(out: Path, mark: Path) -> None:
        path = out / "checkpoint-4" / name
        path.unlink()
        if what == "a FIFO":
            os.mkfifo(path)
        elif what == "a circle of links":
            path.symlink_to(name)
        else:
            path.symlink_to(what)


for _name in ("manifest.json", "trainer_state.json", "run_state.pt", "model.safetensors", "optimizer.pt"):
    for _what in ("a FIFO", "/dev/zero", "a circle of links"):
        special_file(_name, _what)


@targeted("plain", "trainer_state.json", "a callback's state with attributes of Python's")
def attributes_of_python(out: Path, mark: Path) -> None:
    path = out / "checkpoint-4" / "trainer_state.json"
    state = json.loads(path.read_text())
    hostile = {"__class__": "os.system", "__dict__": {"x": 1}, "__reduce__": code_of(mark)}
    state["stateful_callbacks"]["TrainerControl"] = {"args": {}, "attributes": hostile}
    path.write_text(json.dumps(state))
    sealed(path.parent)


@targeted(".ckpt", "it.ckpt", "an instantiator in the hyperparameters")
def instantiator(out: Path, mark: Path) -> None:
    content = torch.load(out / "it.ckpt", weights_only=True)
    content["hyper_parameters"] = {"_instantiator": "os.system", "command": f"touch '{mark}'"}
    torch.save(content, out / "it.ckpt")


# ---- the run ----


def all_tries() -> list[Try]:
    with tempfile.TemporaryDirectory() as place:
        kinds = list(contents(Path(place) / "mark"))
    return [*targeted_tries(), *broad_tries(kinds)]


def run(every: int = 1, every_targeted: int = 1) -> tuple[list[list[str]], bool]:
    """Try each n-th of those that are targeted, and of the others. Returns the table, and whether all went well."""
    tries = all_tries()
    chosen = [one for one in tries if one.is_targeted][::every_targeted]
    chosen += [one for one in tries if not one.is_targeted][::every]
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="payloads_") as place, quiet():
        forms = Forms(Path(place) / "forms")
        forms.write()
        for number, one in enumerate(chosen):
            count = counts.setdefault((one.form, one.file), collections.Counter())
            count["tries"] += 1
            count.update(try_one(one, forms, Path(place) / str(number)))
    heads = ("tries", "RAN", "DELETED", "hung", "refused", "read or passed over", "foreign error")
    rows = [[form, file, *(str(count[head]) for head in heads)] for (form, file), count in counts.items()]
    total = sum(counts.values(), collections.Counter())
    rows.append(["all", "", *(str(total[head]) for head in heads)])
    return [["form", "file", *heads], *rows], not any(total[head] for head in BAD)


def try_one(one: Try, forms: Forms, place: Path) -> collections.Counter[str]:
    """Use a copy of a checkpoint with a payload in it."""
    out = place / "inner" / "out"
    shutil.copytree(forms.folder / one.form, out)
    mark = place / "mark"
    victims = [place / "inner" / "victim.txt", place / "inner" / "out" / "victim.txt"]
    for victim in victims:
        victim.write_text("victim")
    ENDS.clear()
    one.harm(out, mark)
    try:
        with time_limit():
            forms.use(one.form, out)
    finally:
        shards.read_dcp, deepspeed_state.check_zero_files = READERS  # some tries replace them
    found = collections.Counter(ENDS)
    found["RAN"] = int(mark.exists())
    found["DELETED"] = int(not all(victim.exists() for victim in victims))
    if any(found[head] for head in BAD):
        print(f"!! {one.form} {one.file} {one.kind}: {dict(found)}", file=sys.stderr)
    shutil.rmtree(place)
    return found


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    except TimeoutError:
        ENDS.append("hung")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="each n-th of the tries that are not targeted")
    torch.set_num_threads(1)
    table, is_well = run(parser.parse_args().every)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
