"""A disk that lacks operations which a save uses, or that begins to refuse them."""

from __future__ import annotations

import os
from pathlib import Path

from hf_compat.checkpoint import disks


class Disk:
    """The disk of a folder. It refuses the operations in `refused`, each by the number of an error."""

    def __init__(self, root: Path, monkeypatch):
        self.root, self.refused, self.asked = root, {}, []
        fsync, replace, rename = os.fsync, os.replace, os.rename
        monkeypatch.setattr(os, "fsync", lambda file: self._answer("fsync", f"/proc/self/fd/{file}") or fsync(file))
        monkeypatch.setattr(os, "replace", self._moving(replace))
        monkeypatch.setattr(os, "rename", self._moving(rename))
        monkeypatch.setattr(disks, "_TOLD", set())

    def _moving(self, call):
        def moved(source, target, **options):
            self._answer("rename", source, os.fspath(source), None, os.fspath(target))
            return call(source, target, **options)

        return moved

    def _answer(self, operation, path, *named):
        place = Path(os.path.realpath(path))
        what = f"{operation} of a {'folder' if place.is_dir() else 'file'}"
        if what in self.refused and place.is_relative_to(self.root):
            self.asked.append(what)
            raise OSError(self.refused[what], os.strerror(self.refused[what]), *named)
