"""A power cut at any instant of a run that saves: what was not forced to the disk is lost, and the run still goes on.

The run notes what the folder holds before every rename, removal and flush, and what of it was flushed. Each of these
instants is then played again with the losses that a disk may have: contents that were not flushed are gone or zeros,
and renames that were not flushed have not happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from helpers import toy
from helpers.incomplete_disk import Disk
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.checkpoint import layout as hidden_folders
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint import manifest as sealing
from hf_compat.checkpoint.layout import checkpoint_step
from hf_compat.checkpoint.reading import read_manifest
from hf_compat.errors import CheckpointWriteError


@dataclasses.dataclass(frozen=True)
class Instant:
    """What the system holds, and what of it the disk surely does.

    Args:
        files: By name the file's number, content and time.
        on_disk: By number what was flushed of it.
        renamed: New names of checkpoints whose folder was not flushed since, with the old ones.
        replaced: By number manifests whose folder was not flushed since, with what the disk has instead, if anything.
    """

    files: dict[str, tuple[int, bytes, int]]
    on_disk: dict[int, bytes]
    renamed: dict[str, str]
    replaced: dict[int, bytes | None]

    def after_power_cut(self, lost: str, are_renamed: bool) -> dict[str, tuple[bytes, int]]:
        """Return what is found; `lost` says what has become of the rest: gone, zeros, or zeros but for lists."""
        found = {}
        for name, (number, content, time) in self.files.items():
            left = b"" if lost == "gone" else bytes(len(content))
            if lost == "zeros but for lists" and name.endswith("manifest.json"):
                left = content
            top = name.split("/")[0]
            old = name if are_renamed or top not in self.renamed else self.renamed[top] + name.removeprefix(top)
            content = self.on_disk.get(number, left)
            content = content if are_renamed else self.replaced.get(number, content)
            if content is not None:
                found[old] = content, time
        return found


class Recorder:
    """Notes an instant before every call that renames, removes or flushes."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.instants, self.order = folder, [], []
        self._on_disk, self._renamed, self._replaced, self._lock = {}, {}, {}, threading.RLock()
        for path in folder.rglob("*"):  # what lay there before the run
            if path.is_file():
                self._on_disk[path.stat().st_ino] = path.read_bytes()
        for name in ("replace", "rename", "unlink", "rmdir", "fsync"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name, call):
        def noted(*args, **kwargs):
            with self._lock:
                self.note()
                before = self._manifest(Path(args[1])) if name == "replace" else None
                self._forget(name, args, kwargs.get("dir_fd", kwargs.get("dst_dir_fd")))
                result = call(*args, **kwargs)
                self._after(name, args, before)
                return result

        return noted

    def _forget(self, name, args, folder):
        """Forget a file that goes: another one may get its number."""
        gone = {"unlink": args[0], "replace": args[-1], "rename": args[-1]}.get(name)
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(gone, dir_fd=folder, follow_symlinks=False) if gone is not None else None
            if facts is not None and facts.st_nlink == 1:
                self._on_disk.pop(facts.st_ino, None)
                self._replaced.pop(facts.st_ino, None)

    def _manifest(self, path: Path) -> bytes | None:
        """Return what the disk has under a manifest's name."""
        with contextlib.suppress(FileNotFoundError):
            number = path.stat().st_ino
            return self._replaced.get(number, self._on_disk.get(number))

    def note(self):
        files = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.name.startswith("hf_compat.lock"):
                facts = path.stat()
                files[path.relative_to(self.folder).as_posix()] = (facts.st_ino, path.read_bytes(), facts.st_mtime_ns)
        self.instants.append(Instant(files, dict(self._on_disk), dict(self._renamed), dict(self._replaced)))

    def _after(self, name, args, before):
        if name in ("replace", "rename"):
            source, target = Path(args[0]), Path(args[1])
            if target.name == "manifest.json":
                self._replaced[target.stat().st_ino] = before
            if target.parent == self.folder and checkpoint_step(target.name) is not None:
                self._renamed[target.name] = source.relative_to(self.folder).as_posix()
                self.order.append(("named", target.name))
            elif checkpoint_step(source.name) is not None:
                self.order.append(("removed", source.name))
        elif name == "fsync":
            path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
            if (path / "manifest.json").is_file():
                self._replaced.pop((path / "manifest.json").stat().st_ino, None)
            if path == self.folder:
                self._renamed.clear()
                self.order.append(("flushed", "folder"))
            elif path.is_file():
                self._on_disk[path.stat().st_ino] = path.read_bytes()


class Waits(TrainerCallback):
    """Lets what goes on beside the training end before the next update: one call after the other is noted."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer._saver.background.wait()


class Sees(Waits):
    """Hears of checkpoints, and may look at them: they are on the disk with all hashes before, and room is made."""

    def on_save(self, args, state, control, **kwargs):
        self.on_step_begin(args, state, control)


class Writes(Trainer):
    """Has an override that takes part in writing, so checkpoints are written in place."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "own.txt").write_text("of the override")


RECORDED = {
    "hashed at once": (2**18, Waits, Trainer),
    "hashed later": (-1, Waits, Trainer),
    "seen": (-1, Sees, Trainer),
    "in place": (-1, Waits, Writes),
    "in place, seen": (-1, Sees, Writes),
    "no renames": (-1, Waits, Trainer, "rename of a folder"),
    "no renames, seen": (-1, Sees, Trainer, "rename of a folder"),
}


# What two of the rows show, the last shows in one
FURTHER = ("seen", "in place")


@pytest.fixture(
    params=[
        pytest.param(row, id=name, marks=[pytest.mark.matrix] * (name in FURTHER)) for name, row in RECORDED.items()
    ]
)
def recorded(request, make_args, tmp_path, monkeypatch):
    return record(make_args, tmp_path / "out", monkeypatch, *request.param)


def record(make_args, out, monkeypatch, hashed_at_once, kind, trainer_class, lacks=None, **values):
    if lacks is not None:
        Disk(out, monkeypatch).refused = {lacks: errno.EXDEV}
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", hashed_at_once)
    out.mkdir(exist_ok=True)
    set_seed(3)
    waits = kind()
    args = make_args(**{"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 1, **values})
    sets = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(8, 5)}
    waits.trainer = trainer_class(toy.Classifier(), args, callbacks=[waits], **sets)
    with monkeypatch.context() as patched:
        recorder = Recorder(out, patched)
        waits.trainer.train()
        recorder.note()
    return recorder


def laid_out(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, (content, time) in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(time, time))
    return folder


def step_of(path):
    return 0 if path is None else checkpoint_step(os.path.basename(path))


def on_disk(instant):
    """Return the newest checkpoint that was completely on the disk at an instant."""
    found = [0]
    for top in {name.partition("/")[0] for name in instant.files} - instant.renamed.keys():
        parts = [facts for name, facts in instant.files.items() if name.startswith(f"{top}/")]
        if lists_files(instant, top) and checkpoint_step(top) is not None:
            is_whole = all(instant.on_disk.get(number) == content for number, content, _ in parts)
            is_whole = is_whole and not instant.replaced.keys() & {number for number, _, _ in parts}
            found.append(checkpoint_step(top) if is_whole else 0)
    return max(found)


def named(instant):
    """Return the newest checkpoint that had its name at an instant."""
    tops = {name.partition("/")[0] for name in instant.files}
    return max((checkpoint_step(top) or 0 for top in tops if lists_files(instant, top)), default=0)


def lists_files(instant, top):
    """Return whether a folder has a manifest of files. While it is written in place, it has one without."""
    return b'"files"' in instant.files.get(f"{top}/manifest.json", (0, b"", 0))[1]


def contents(instants):
    """Return what was written under each name: no file of a checkpoint but its manifest is written twice."""
    return {name: content for instant in instants for name, (_, content, _) in instant.files.items()}


def test_a_power_cut_at_any_instant_leaves_the_newest_checkpoint_that_was_on_the_disk(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(sealing, "this_boot", lambda: "another start of the system")
    written, expected = contents(recorded.instants), 0
    for instant in recorded.instants:
        expected = max(expected, on_disk(instant))
        for lost, are_renamed in (("gone", True), ("zeros but for lists", True), ("zeros", False)):
            folder = laid_out(tmp_path / "after", instant.after_power_cut(lost, are_renamed))
            last = get_last_checkpoint(folder)
            assert step_of(last) >= expected, (lost, are_renamed, sorted(path.name for path in folder.iterdir()))
            for path in [path for path in Path(last).rglob("*") if path.is_file()] if last else []:
                name = path.relative_to(folder).as_posix()
                assert "manifest.json" in path.name or path.read_bytes() == written[name], name
    assert expected == 6


@pytest.mark.parametrize("trainer_class", [Trainer, Writes])
@pytest.mark.parametrize("lost", ["gone", "zeros", None])
def test_the_users_files_survive_a_save_into_their_folder(make_args, tmp_path, monkeypatch, trainer_class, lost):
    """A power cut (or a kill, where nothing is lost) at any instant of a run that writes checkpoint-2 anew."""
    notes = tmp_path / "out" / "checkpoint-2" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    recorder = record(make_args, tmp_path / "out", monkeypatch, -1, Waits, trainer_class)
    monkeypatch.setattr(sealing, "this_boot", lambda: "another start of the system")
    removed = [name for kind, name in recorder.order if kind == "removed"]
    assert "checkpoint-2" in removed
    for instant in recorder.instants:
        if not any(name.endswith("notes.txt") for name in instant.files):
            break  # `save_total_limit` has removed the checkpoint
        files = {name: facts[1:] for name, facts in instant.files.items()}
        folder = laid_out(tmp_path / "after", files if lost is None else instant.after_power_cut(lost, True))
        before = [path.relative_to(folder).as_posix() for path in folder.rglob("notes.txt")]
        if any("deleted" in name for name in before):
            break
        manifest.recover(str(folder), has_lock=True)
        found = [path.relative_to(folder).as_posix() for path in folder.rglob("notes.txt")]
        assert found == ["checkpoint-2/notes.txt"] and (folder / found[0]).read_text() == "mine", before
    assert instant is not recorder.instants[0]


@pytest.mark.parametrize("lacks", [None, "rename of a folder"])
def test_a_power_cut_leaves_a_checkpoint_of_a_name_that_is_written_anew(make_args, tmp_path, monkeypatch, lacks):
    for _ in range(2):
        recorder = record(make_args, tmp_path / "out", monkeypatch, 2**18, Waits, Trainer, lacks, max_steps=2)
    monkeypatch.setattr(sealing, "this_boot", lambda: "another start of the system")
    for instant in recorder.instants:
        for are_renamed in (True, False):
            folder = laid_out(tmp_path / "after", instant.after_power_cut("gone", are_renamed))
            manifest.recover(str(folder), has_lock=True)
            assert get_last_checkpoint(folder) == str(folder / "checkpoint-2")
            assert read_manifest(folder / "checkpoint-2").files


def test_a_kill_at_any_instant_leaves_the_newest_checkpoint_that_has_its_name(recorded, tmp_path):
    found = []
    for instant in recorded.instants:
        folder = laid_out(tmp_path / "after", {name: facts[1:] for name, facts in instant.files.items()})
        last = get_last_checkpoint(folder)
        found.append(step_of(last))
        assert found[-1] >= named(instant)
        assert last is None or '"boot"' not in Path(last, "manifest.json").read_text(), (
            "the next run finishes what was killed"
        )
        assert last is None or not manifest.problems(last)
    assert found == sorted(found) and found[-1] == 6


class FirstIsBest(Trainer):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_score": -self.state.global_step}


def test_a_kill_while_checkpoints_are_removed_leaves_one_and_no_remains_for_long(make_args, tmp_path, monkeypatch):
    """The best one is the first, so the run removes both older and newer ones, up to its end."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    recorder = record(
        make_args, tmp_path / "out", monkeypatch, 2**18, Waits, FirstIsBest, greater_is_better=True, **best
    )
    assert [name for kind, name in recorder.order if kind == "removed"] == ["checkpoint-4", "checkpoint-6"]
    has_begun = half_removed = False
    for instant in recorder.instants:
        folder = laid_out(tmp_path / "after", {name: facts[1:] for name, facts in instant.files.items()})
        half_removed |= any("deleted" in path.name for path in folder.rglob("*"))
        last = get_last_checkpoint(folder)
        assert last is not None or not has_begun
        has_begun |= last is not None
        manifest.recover(str(folder), has_lock=True)
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert half_removed and has_begun


@pytest.mark.parametrize("recorded", [row for row in RECORDED.values() if len(row) == 3], indirect=True)  # by renames
def test_a_checkpoint_is_removed_when_the_next_one_is_on_the_disk(recorded):
    order = recorded.order
    assert [name for kind, name in order if kind == "named"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for old, new in (("checkpoint-2", "checkpoint-4"), ("checkpoint-4", "checkpoint-6")):
        flushed = order.index(("flushed", "folder"), order.index(("named", new)))
        assert flushed < order.index(("removed", old)), order


def run(make_args, trainer_class=Trainer, callbacks=(), **values):
    set_seed(3)
    args = make_args(save_strategy="steps", save_steps=2, max_steps=4, **values)
    trainer = trainer_class(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=list(callbacks))
    trainer.train()


def unhashed(folder):
    """Files that nothing vouches for."""
    return [name for name, facts in read_manifest(folder).files.items() if not facts.keys() & {"sha256", "sums"}]


@pytest.fixture
def slow_flush(monkeypatch):
    """Nothing is hashed at once, and what goes on beside the training takes until it is let go."""
    let_go = threading.Event()
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", -1)
    for name in ("flush_and_hash", "flush_listed"):
        own = getattr(sealing, name)
        monkeypatch.setattr(sealing, name, lambda folder, own=own: (let_go.wait(30), own(folder)))
    return let_go


def test_training_goes_on_before_the_hashes_are_there_and_ends_after_them(make_args, tmp_path, slow_flush):
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                seen.append(unhashed(tmp_path / "out" / "checkpoint-2"))
                assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
                slow_flush.set()

    run(make_args, callbacks=[Looks()])
    assert "model.safetensors" in seen[0]
    assert unhashed(tmp_path / "out" / "checkpoint-2") == unhashed(tmp_path / "out" / "checkpoint-4") == []


def copied(folder, to):
    """Copy a checkpoint as `cp -r` does, which keeps no times."""
    shutil.copytree(folder, to / folder.name, copy_function=shutil.copyfile)
    return to / folder.name


class Copies(TrainerCallback):
    def __init__(self, to):
        self.to = to

    def on_save(self, args, state, control, **kwargs):
        self.to.mkdir(exist_ok=True)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        copied(folder, self.to)


class CopiesItself(Trainer):
    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.copies.on_save(self.args, self.state, self.control)


class SavesItself(TrainerCallback):
    """Calls the Trainer's method in an event of its own, and copies what it has written."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (2, 4):
            self.trainer._save_checkpoint(self.trainer.model, None)
            self.copies.on_save(args, state, control)


def test_who_calls_the_method_and_copies_at_once_has_what_vouches_for_it(make_args, tmp_path, monkeypatch):
    saves, copies = SavesItself(), tmp_path / "copies"
    saves.copies, args = Copies(copies), make_args(save_strategy="no", max_steps=4)
    saves.trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[saves])
    saves.trainer.train()
    monkeypatch.setattr(sealing, "this_boot", lambda: "another machine")
    assert [manifest.problems(str(copies / f"checkpoint-{step}")) for step in (2, 4)] == [[], []]


@pytest.mark.parametrize("trainer_class", [Trainer, CopiesItself])
def test_who_copies_a_checkpoint_elsewhere_at_once_has_what_vouches_for_it(
    make_args, tmp_path, monkeypatch, trainer_class
):
    copies = tmp_path / "copies"
    callback = Copies(copies)
    monkeypatch.setattr(CopiesItself, "copies", callback, raising=False)
    run(make_args, trainer_class, callbacks=[callback] if trainer_class is Trainer else [])
    monkeypatch.setattr(sealing, "this_boot", lambda: "another machine")
    for step in (2, 4):
        copy = copies / f"checkpoint-{step}"
        assert unhashed(copy) == manifest.problems(str(copy)) == []
    assert get_last_checkpoint(copies) == str(copies / "checkpoint-4")


@pytest.mark.parametrize("how", ["a bit", "zeros", "the end"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_copy_that_is_damaged_is_found(make_args, tmp_path, monkeypatch, name, how):
    copies = tmp_path / "copies"
    run(make_args, callbacks=[Copies(copies)])
    monkeypatch.setattr(sealing, "this_boot", lambda: "another machine")
    file = copies / "checkpoint-4" / name
    content = bytearray(file.read_bytes())
    if how == "a bit":
        content[content.index(numbers_within(name, content)) + 5] ^= 1
    elif how == "zeros":
        content[:] = bytes(len(content))
    else:
        content[-64:] = bytes(64)
    file.write_bytes(content)
    assert manifest.problems(str(copies / "checkpoint-4")) == [f"{name} is damaged (its hash differs)"]
    assert get_last_checkpoint(copies) == str(copies / "checkpoint-2")


def numbers_within(name, content):
    """Return the bytes of a tensor that a file holds."""
    if name == "model.safetensors":
        return next(iter(safetensors.torch.load(bytes(content)).values())).numpy().tobytes()
    states = torch.load(io.BytesIO(content), weights_only=True)["state"]
    return states[0]["exp_avg"].numpy().tobytes()


def test_an_older_checkpoint_goes_only_when_the_one_that_somebody_saw_is_on_the_disk(make_args, tmp_path, slow_flush):
    seen = []

    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")))
            slow_flush.set()

    run(make_args, callbacks=[Looks()], save_total_limit=1)
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_callback_is_called_before_the_disk_has_the_files_and_finds_them_hashed(make_args, tmp_path, slow_flush):
    """Its copy is whole on another machine, although nothing is flushed before it returns."""
    flushed = []

    class Copies(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / "out" / f"checkpoint-{state.global_step}"
            flushed.append(slow_flush.is_set())
            assert unhashed(folder) == []
            shutil.copytree(folder, tmp_path / "copies" / folder.name)
            slow_flush.set()

    run(make_args, callbacks=[Copies()])
    assert flushed[0] is False
    for copy in (tmp_path / "copies").iterdir():
        assert manifest.problems(str(copy)) == []


def test_nothing_is_written_into_a_checkpoint_that_somebody_has_seen(make_args, tmp_path):
    """A callback's own thread may upload it, by hashes that it has computed before."""

    def stats(folder):
        return {path.name: (*path.stat()[:7], path.stat().st_mtime_ns) for path in [folder, *folder.iterdir()]}

    seen = {}

    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = tmp_path / "out" / f"checkpoint-{state.global_step}"
            seen[folder] = stats(folder)

    run(make_args, callbacks=[Looks()])
    assert len(seen) == 2 and seen == {folder: stats(folder) for folder in seen}


def test_a_checkpoint_is_flushed_although_a_callback_fails(make_args, tmp_path, monkeypatch):
    class Fails(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            flush = sealing.flush
            monkeypatch.setattr(sealing, "flush", lambda path: (flushed.append(path.name), flush(path)))
            raise ZeroDivisionError

    flushed = []
    with pytest.raises(ZeroDivisionError):
        run(make_args, callbacks=[Fails()])
    assert {"model.safetensors", "optimizer.pt", "manifest.json", "checkpoint-2", "out"} <= set(flushed)


def test_a_tracker_that_reads_no_checkpoints_does_not_hold_a_save_up(make_args, tmp_path, slow_flush):
    class Hears(TrainerCallback):
        reads_checkpoints = False
        found = []

        def on_save(self, args, state, control, **kwargs):
            self.found.append(unhashed(Path(args.output_dir) / f"checkpoint-{state.global_step}"))
            slow_flush.set()

    run(make_args, callbacks=[Hears()], save_total_limit=1)
    assert "model.safetensors" in Hears.found[0]
    Hears.reads_checkpoints = True
    run(make_args, callbacks=[Hears()], save_total_limit=1, output_dir=str(tmp_path / "read"))
    assert Hears.found[2:] == [[], []]


def test_a_disk_that_fails_afterwards_ends_the_run_and_keeps_what_was_there(make_args, tmp_path, monkeypatch):
    flush = sealing.flush

    def fail(path):
        if "checkpoint-4" in str(path) and path.name == "optimizer.pt":
            raise OSError(5, "Input/output error")
        flush(path)

    monkeypatch.setattr(sealing, "flush", fail)
    with pytest.raises(
        CheckpointWriteError, match=r"(?s)checkpoint-4 could not be written: .*Input/output error.*Hint"
    ):
        run(make_args, save_total_limit=1)
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    assert not (tmp_path / "out" / "checkpoint-4").exists()


@pytest.mark.parametrize("what", ["out", "checkpoint-2"])
@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
def test_a_folder_may_be_removed_at_any_instant_of_the_flushing(make_args, tmp_path, monkeypatch, name, what):
    out = tmp_path / "out"
    removed = out if what == "out" else out / what
    instant, instants = 0, 1
    while instant < instants:
        instant += 1
        with monkeypatch.context() as patched:
            count = remove_at(patched, instant, name, removed)
            run(make_args, save_total_limit=1)
        assert get_last_checkpoint(out) == str(out / "checkpoint-4") and unhashed(out / "checkpoint-4") == []
        shutil.rmtree(out)
        instants += count() == instant
    assert instants > 1


def remove_at(patched, instant, name, removed):
    """Remove a folder at the n-th call of one of the system's functions while checkpoint-2 is being flushed."""
    calls, call, finish = [], getattr(os, name), sealing.flush_and_hash

    def count(*args, **kwargs):
        if threading.current_thread() in flushing:
            calls.append(args)
            if len(calls) == instant:
                flushing.clear()
                shutil.rmtree(removed)
        return call(*args, **kwargs)

    def note(folder):
        if folder.endswith("checkpoint-2"):
            flushing.add(threading.current_thread())
        finish(folder)
        flushing.clear()

    flushing = set()
    patched.setattr(sealing, "_HASHED_AT_ONCE", -1)
    patched.setattr(sealing, "flush_and_hash", note)
    patched.setattr(os, name, count)
    return lambda: len(calls)


def test_who_copies_a_folder_while_it_is_flushed_finds_no_file_that_comes_and_goes(make_args, tmp_path, monkeypatch):
    checkpoint, fsync, found = tmp_path / "out" / "checkpoint-2", os.fsync, []

    def look(descriptor):
        if checkpoint.is_dir():
            found.append({path.name for path in checkpoint.iterdir()})
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    run(make_args)
    assert len(found) > 5 and all(names == found[-1] for names in found)


def test_a_manifest_that_a_kill_has_left_half_written_is_removed(make_args, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(CheckpointWriteError):
        patched.setattr(os, "replace", fail_to_name_manifests(os.replace))
        patched.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        remove = hidden_folders.remove_hidden
        patched.setattr(hidden_folders, "remove_hidden", lambda path: None if ".saving-" in path else remove(path))
        run(make_args)
    assert list((tmp_path / "out").glob(".saving-*/manifest.json"))
    run(make_args)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-2", "checkpoint-4"}


def fail_to_name_manifests(replace):
    def fail(source, target, **options):
        if Path(source).parent.parent.name == "out" and Path(target).name == "manifest.json":
            raise OSError(28, "No space left on device")
        replace(source, target, **options)

    return fail


@pytest.fixture
def unfinished(make_args, tmp_path, monkeypatch):
    """A checkpoint as a kill leaves it: listed, not hashed."""
    monkeypatch.setattr(sealing, "_HASHED_AT_ONCE", -1)
    with monkeypatch.context() as patched:
        patched.setattr(sealing, "flush_and_hash", lambda folder: None)
        run(make_args)
    return tmp_path / "out" / "checkpoint-4"


def test_what_was_changed_before_it_was_hashed_is_found(unfinished):
    state = unfinished / "trainer_state.json"
    assert manifest.problems(str(unfinished)) == []
    state.write_text(state.read_text().replace("4", "5", 1))
    os.utime(state, ns=(1, 1))
    assert manifest.problems(str(unfinished)) == ["trainer_state.json was changed before it was hashed"]
    sealing.flush_and_hash(str(unfinished))
    assert unhashed(unfinished) == ["trainer_state.json"], "the change is not taken for what was written"


def test_what_no_hash_vouches_for_is_no_whole_checkpoint_after_the_system_started_anew(unfinished, monkeypatch):
    monkeypatch.setattr(sealing, "this_boot", lambda: "another start of the system")
    wrong = manifest.problems(str(unfinished))
    assert wrong and all("was not on the disk when its system stopped" in problem for problem in wrong)
    (unfinished / "manifest.json").write_text((unfinished / "manifest.json").read_text().replace('"boot"', '"b"'))
    assert all("has no hash" in problem for problem in manifest.problems(str(unfinished)))


def test_a_system_that_does_not_tell_its_starts_apart_waits_for_the_disk(make_args, tmp_path, slow_flush, monkeypatch):
    monkeypatch.setattr(sealing, "this_boot", lambda: None)
    run(make_args)
    assert unhashed(tmp_path / "out" / "checkpoint-4") == []
