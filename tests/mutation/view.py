"""A view of the repository that a process and its children alone see: what they write in it is thrown away.

An overlay over the repository's own folder, in a mount namespace: every path stays what it is, so the editable install,
the scripts of `.venv` and real interpreters see a changed file without a copy of anything.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER, _NEW_PROCESSES = 0x00020000, 0x10000000, 0x20000000
_PRIVATE = 0x4000 | 0x40000


def enter(folder: Path) -> None:
    """Let this process see an overlay over the repository; its next child is process 1 of a new process namespace.

    Args:
        folder: An empty one, for what is written.
    """
    user, group = os.geteuid(), os.getegid()
    spaces = _NEW_MOUNTS | _NEW_PROCESSES | (_NEW_USER if user else 0)
    _call("unshare", _LIBC.unshare(spaces))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    _mount("none", "/", None, _PRIVATE, None)
    for name in ("upper", "work"):
        (folder / name).mkdir()
    options = f"lowerdir={ROOT},upperdir={folder}/upper,workdir={folder}/work" + (",userxattr" if user else "")
    here = os.getcwd()
    _mount("overlay", str(ROOT), "overlay", 0, options)
    os.chdir(here)  # the same path, seen through the overlay


def see_processes() -> None:
    """Show this process, the first of its namespace, and its children in /proc."""
    _mount("proc", "/proc", "proc", 0, None)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _call(f"mount {target}", _LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]))


def _call(name: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}; mutants need Linux's mount and process namespaces")
