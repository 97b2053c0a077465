"""Copy a working folder if the system offers no overlay, and close other folders with Landlock.

The copy is part of a tree of links that looks like the file system, so that `../more` still works.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator

from hf_compat.tools.isolation.plan import Plan, is_below, machine_folders, mark_of

Progress = Callable[[str], None]
_COPIED = "copied.json"
_CLONE = 0x40049409  # ioctl FICLONE: the copy shares its blocks if the file system can
_TELL_EVERY_BYTES = 2**28
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, the same on every machine
_NO_NEW_RIGHTS = 38  # prctl
# Landlock's rights to change: write, remove and make anything (bits 4 to 12), move between folders, truncate.
_TO_CHANGE = 1 << 1 | 0b111111111 << 4 | 1 << 13 | 1 << 14
_LEAST_VERSION = 3  # earlier ones do not cover truncating
_GIB = 2**30


def make(plan: Plan, limit: int, progress: Progress) -> list[str]:
    """Copy the working folder of a plan into its folder. Returns the files that became links for lack of room."""
    files = plan.in_folder("files")
    links = _link_around(plan, files)
    sizes = dict(_lay_out(plan, files, links))
    copied, linked, told = 0, [], 0
    for path, size in sorted(sizes.items(), key=lambda one: one[1]):
        is_readable = os.access(path, os.R_OK)
        if is_readable and _is_cloned(path, files + path):
            continue
        if not is_readable or copied + size > limit:
            linked.append(path)
            os.symlink(path, files + path)
            continue
        shutil.copyfile(path, files + path)
        copied += size
        if copied - told > _TELL_EVERY_BYTES:
            told = copied
            progress(f"copied {copied / _GIB:.1f} GiB of {sum(sizes.values()) / _GIB:.1f} GiB of {plan.working_folder}")
    for path in sizes.keys() - set(linked):
        shutil.copystat(path, files + path)
    for parent, _, _ in os.walk(files + plan.working_folder, topdown=False):  # some may be read-only
        shutil.copymode(parent.removeprefix(files), parent)
    with open(plan.in_folder(_COPIED), "w", encoding="utf-8") as file:  # so that changed files can be found
        json.dump({path: mark_of(files + path) for path in [*links, *sizes]}, file)
    return linked


def settle(plan: Plan) -> Iterator[str]:
    """Remove the unchanged copies and links, and yield those that the command has deleted."""
    if not os.path.exists(plan.in_folder(_COPIED)):
        return
    with open(plan.in_folder(_COPIED), encoding="utf-8") as file:
        copies: dict[str, list[int]] = json.load(file)
    files = plan.in_folder("files")
    for parent, _, _ in os.walk(files):
        os.chmod(parent, os.stat(parent).st_mode | stat.S_IRWXU)
    for path, mark in copies.items():
        if not os.path.lexists(files + path):
            yield path
        elif mark == list(mark_of(files + path)):
            os.unlink(files + path)
    for parent, _, _ in os.walk(files, topdown=False):
        if not os.listdir(parent):
            os.rmdir(parent)
    os.unlink(plan.in_folder(_COPIED))


def restrict(plan: Plan) -> None:
    """Let this process and its children change only what the plan allows. Without Landlock it does nothing."""
    if not has_landlock():
        return
    rules = _call(_CREATE, ctypes.byref(ctypes.c_uint64(_TO_CHANGE)), 8, 0)
    elsewhere = [one for one in machine_folders() if not is_below(plan.working_folder, os.path.realpath(one))]
    # Temporary files are removed with the plan's folder, even if the command is killed.
    os.environ["TMPDIR"] = plan.in_folder("tmp")  # noqa: TID251 - the environment of the command
    os.makedirs(plan.in_folder("tmp"), exist_ok=True)
    for folder in (plan.folder, *plan.open_to, *elsewhere):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            rule = (ctypes.c_char * 12).from_buffer_copy(
                _TO_CHANGE.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
            )
            _call(_ADD, rules, 1, ctypes.byref(rule), 0)
            os.close(opened)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _call(_RESTRICT, rules, 0)
    os.close(rules)


def has_landlock() -> bool:
    """Whether the system lets a process give up the right to change files."""
    try:
        return sys.platform.startswith("linux") and _call(_CREATE, None, 0, 1) >= _LEAST_VERSION
    except OSError:
        return False


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answer: int = libc.syscall(ctypes.c_long(number), *arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return answer


def _link_around(plan: Plan, files: str) -> list[str]:
    """Make the folders above the working folder, with links to everything beside it. Returns the links."""
    links, folder = [], os.sep
    for part in plan.working_folder.strip(os.sep).split(os.sep):
        os.makedirs(files + folder, exist_ok=True)
        with contextlib.suppress(PermissionError):  # such a folder may be entered but not listed
            for entry in os.scandir(folder):
                if entry.name != part and entry.path != plan.folder:
                    links.append(entry.path)
                    os.symlink(entry.path, files + entry.path)
        folder = os.path.join(folder, part)
    os.makedirs(files + plan.working_folder, exist_ok=True)
    return links


def _lay_out(plan: Plan, files: str, links: list[str]) -> Iterator[tuple[str, int]]:
    """Make the folders and links of the working folder, and yield each file with its size.

    Sockets, pipes and devices are left out. A folder that holds an interpreter or stays real becomes a link.
    """
    for parent, folders, names in os.walk(plan.working_folder):
        for name in list(folders):
            path = os.path.join(parent, name)
            if path == plan.folder:
                folders.remove(name)
            elif os.path.islink(path):
                names.append(name)
            elif path in plan.open_to or os.path.exists(os.path.join(path, "pyvenv.cfg")):
                folders.remove(name)
                links.append(path)
                os.symlink(path, files + path)
            else:
                os.makedirs(files + path, exist_ok=True)
        for path in (os.path.join(parent, name) for name in names):
            told = os.lstat(path)
            if stat.S_ISLNK(told.st_mode):
                links.append(path)
                # An absolute link into the working folder leads into the copy
                target = os.readlink(path)
                is_inside = os.path.isabs(target) and is_below(target, plan.working_folder)
                os.symlink(files + target if is_inside else target, files + path)
            elif stat.S_ISREG(told.st_mode):
                yield path, told.st_size


def _is_cloned(source: str, target: str) -> bool:
    """Copy a file without its blocks. False if the file system cannot."""
    with open(source, "rb") as whole, open(target, "wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _CLONE, whole.fileno())
        except OSError:
            os.unlink(target)
            return False
    return True
