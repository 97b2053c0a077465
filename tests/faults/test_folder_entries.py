"""A new file is lost with its folder's entry, so all entries on its path are on the disk before older copies go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers import toy
from hf_compat import Trainer, TrainerCallback, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.layout import DELETED, REPLACED, list_checkpoints
from hf_compat.checkpoint.reading import read_manifest


class Disk:
    """Notes what is on the disk: of each folder the entries, of each file the content, by its number.

    Attributes:
        lost: What a power cut would have taken from the checkpoints, each time that an older copy went, or that a
            sealed checkpoint was listed anew.
    """

    def __init__(self, root: Path, out: Path, monkeypatch):
        self.root, self.out, self.lost, self.moments = root, out, [], []
        self._held = {path.stat().st_ino: self._content(path) for path in (root, *root.rglob("*")) if path.exists()}
        for home, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            monkeypatch.setattr(home, name, self._noting(name, getattr(home, name)))

    def _noting(self, name, call):
        def noted(*args, **kwargs):
            moment = self._moment(name, *args, **kwargs)
            if moment is not None:
                self.look(moment)
            if name in ("unlink", "rmdir"):  # another one may get its number
                self._held.pop(os.stat(args[0], dir_fd=kwargs.get("dir_fd"), follow_symlinks=False).st_ino, None)
            result = call(*args, **kwargs)
            if name == "fsync":
                path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
                self._held[path.stat().st_ino] = self._content(path)
            return result

        return noted

    def _moment(self, name, source, target=None, **options):
        source, target = Path(str(source)), Path(str(target))
        if "dst_dir_fd" in options:
            target = Path(os.readlink(f"/proc/self/fd/{options['dst_dir_fd']}"), target)
        if name == "replace" and target.parent.name == DELETED:
            return f"{source.name} goes"
        if name == "rmtree" and source.name == REPLACED:
            return "what was replaced goes"
        is_manifest = target.name == "manifest.json" and target.parent.parent == self.out
        return f"{target.parent.name} is listed anew" if is_manifest and len(list_checkpoints(self.out)) == 1 else None

    def _content(self, path):
        if path.is_dir():
            return {entry.name: entry.inode() for entry in os.scandir(path)}
        return path.read_bytes()

    def look(self, moment):
        """Note what of the newest checkpoint is not on the disk, from the first copy that goes on."""
        if self.moments or "goes" in moment:
            self.moments.append(moment)
            newest = Path(list_checkpoints(self.out)[-1])
            self.lost += [(moment, path.relative_to(newest).as_posix()) for path in self._beyond(newest)]

    def _beyond(self, checkpoint):
        for path in sorted(checkpoint.rglob("*")):
            if path.is_symlink() or path.is_file():
                is_there = path.is_symlink() or self._held.get(path.stat().st_ino) == path.read_bytes()
                way = [path, *path.parents]
                if not is_there or not all(map(self._has_entry, way[: way.index(self.root)])):
                    yield path

    def _has_entry(self, path):
        return self._held.get(path.parent.stat().st_ino, {}).get(path.name) == path.lstat().st_ino


class Nested(Trainer):
    """Writes deeper than the checkpoint's own files."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        place = Path(output_dir, "a", "b")
        place.mkdir(parents=True)
        (place / "w.txt").write_text("of the override")


class AddsAdapter(TrainerCallback):
    """Saves a second adapter below the checkpoint, and replaces the weights."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        place = folder / "second" / "adapter"
        place.mkdir(parents=True)
        weights = load_file(folder / "model.safetensors")
        save_file(weights, place / "adapter_model.safetensors")
        save_file(weights, folder / "model.safetensors")


def users_files(out):
    """Put files of the user's where two checkpoints will be: nested, and links."""
    for step in (2, 4):
        place = out / f"checkpoint-{step}" / "notes" / "of mine"
        place.mkdir(parents=True)
        (place / "day.txt").write_text("mine")
        links = out / f"checkpoint-{step}" / "links"
        links.mkdir()
        (links / "there").symlink_to("/elsewhere")


SHAPES = {
    "an override's": (Nested, [], None, {}),
    "a callback's": (Trainer, [AddsAdapter], None, {}),
    "the user's, async": (Trainer, [], users_files, {"async_save": True}),
}
FURTHER = {
    "its own": (Trainer, [], None, {}),
    "its own, async": (Trainer, [], None, {"async_save": True}),
    "the user's": (Trainer, [], users_files, {}),
    "the user's, in place": (Nested, [], users_files, {}),
}
ROWS = [
    *(pytest.param(*shape, id=name) for name, shape in SHAPES.items()),
    *(pytest.param(*shape, id=name, marks=pytest.mark.matrix) for name, shape in FURTHER.items()),
]


@pytest.mark.parametrize(("kind", "callbacks", "prepare", "values"), ROWS)
def test_all_entries_are_on_the_disk(make_args, tmp_path, monkeypatch, kind, callbacks, prepare, values):
    set_seed(3)
    out = tmp_path / "runs" / "of today" / "out"
    if prepare is not None:
        prepare(out)
    values = {"output_dir": str(out), "save_strategy": "steps", "save_steps": 2, "max_steps": 6, **values}
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, out, patched)
        args = make_args(save_total_limit=1, **values)
        kind(toy.Classifier(), args, train_dataset=toy.rows(), callbacks=[make() for make in callbacks]).train()
        disk.look("the run has ended")
    assert {"checkpoint-2 goes", "checkpoint-4 goes"} <= set(disk.moments)
    assert [(moment, file) for moment, file in disk.lost if "manifest.json" not in file] == []
    assert manifest.problems(str(out / "checkpoint-6")) == []
    if callbacks:
        assert "second/adapter/adapter_model.safetensors" in read_manifest(out / "checkpoint-6").files
