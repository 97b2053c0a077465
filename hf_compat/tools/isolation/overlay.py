"""Cover everything that is mounted by overlays, in a mount namespace of this process on Linux.

Root covers each mount whole. Another user needs a user namespace, which cannot cover a folder that holds other mounts.
Then the folders in it are covered, and the folder itself is read-only.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from hf_compat.tools.isolation.plan import LAYERS, Plan, is_below, remove_tree

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _UNBINDABLE, _PRIVATE = 1, 32, 4096, 16384, 1 << 17, 1 << 18
_RELATIVE_TIMES = 1 << 21
# Flags of `statvfs` that a mount keeps: nosuid, nodev, noexec, noatime, nodiratime.
_KEPT_FLAGS, _STATVFS_RELATIVE_TIMES = 2 | 4 | 8 | 1024 | 2048, 4096
# File systems without files of users: devices, the kernel's own.
_OF_THE_KERNEL = frozenset(
    (
        "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
        "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs",
        "tracefs",
    )
)  # fmt: skip
_SHARED_MEMORY = "/dev/shm"
_LIBC = ctypes.CDLL(None, use_errno=True)
# The best first. Renamed folders and hard links need rights that a user namespace lacks.
_OPTIONS = ("redirect_dir=on,metacopy=off,index=on", "redirect_dir=on,metacopy=off,index=off", "userxattr")


class Mount(NamedTuple):
    """A mount point with the name of its file system."""

    point: str
    kind: str

    @property
    def is_of_the_kernel(self) -> bool:
        is_within = any(is_below(self.point, one) for one in ("/dev", "/proc", "/sys"))
        return self.kind in _OF_THE_KERNEL or (is_within and self.point != _SHARED_MEMORY)

    @staticmethod
    def reachable(leave_out: str) -> list[Mount]:
        """List the reachable mounts, outer ones first."""
        found = {}
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split(" ")[4]
                for code in ("\\040", "\\011", "\\012", "\\134"):
                    point = point.replace(code, chr(int(code[1:], 8)))
                if os.path.lexists(point) and not is_below(point, leave_out):
                    found[point] = Mount(point=point, kind=after.split(" ")[0])
        return [found[point] for point in sorted(found)]


def enter(plan: Plan) -> list[str]:
    """Cover all files by overlays for this process and its children. Returns the read-only folders."""
    are_nested = _LIBC.unshare(_NEW_MOUNTS) == 0  # whether folders that hold other mounts can be covered
    if not are_nested:
        user, group = os.getuid(), os.getgid()
        if _LIBC.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    mounts = Mount.reachable(plan.folder)
    root, real = plan.in_folder("root"), plan.in_folder("real")
    _mount(None, "/", _RECURSIVE | _PRIVATE)
    _mount("/", root, _BIND | (0 if are_nested else _RECURSIVE))
    _mount(None, root, _UNBINDABLE)  # so that a bound folder does not hold it once more
    cover = _Cover(plan, root, mounts, are_nested)
    for mount in mounts:
        cover.one(mount)
    if are_nested:  # it covers the first one
        _mount(None, root, _UNBINDABLE)
    if plan.working_folder in cover.read_only:
        raise PermissionError(f"{plan.working_folder} holds another mount")
    # Sockets of services are shown as they are, because an overlay disconnects them
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        paths = {path for line in file for path in [line.rstrip("\n").partition(" /")[2]] if path}
    for path in paths:
        if os.path.exists(f"/{path}") and os.path.exists(f"{root}/{path}"):
            _mounts(f"/{path}", f"{root}/{path}", _BIND)  # a vanished one does no harm
    for folder in plan.open_to:
        _mount(folder, root + folder, _BIND | _RECURSIVE)
    _mount(plan.folder, root + plan.folder, _BIND)
    _mount("/", root + real, _BIND | _RECURSIVE)
    os.chroot(root)
    return cover.read_only


def settle(plan: Plan) -> Iterator[str]:
    """Move the content of the layers into one tree, and yield the user's files that the command has deleted."""
    layers = plan.in_folder(LAYERS)
    if not os.path.isdir(layers):
        return
    for number in sorted(os.listdir(layers), key=int):
        place = os.path.join(layers, number)
        with open(os.path.join(place, "of"), encoding="utf-8") as file:
            of = file.read()
        upper = os.path.join(place, "upper")
        for parent, _, names in os.walk(upper):
            for path in (os.path.join(parent, name) for name in names):
                told = os.lstat(path)
                if stat.S_ISCHR(told.st_mode) and told.st_rdev == 0:  # an overlay's mark of a deleted file
                    os.unlink(path)
                    yield os.path.join(of, os.path.relpath(path, upper))
        if os.path.isdir(upper) and os.listdir(upper):
            _merge(upper, f"{plan.in_folder('files')}{of}")
    remove_tree(layers)


def _merge(source: str, target: str) -> None:
    if not os.path.isdir(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return
    for entry in list(os.scandir(source)):
        if entry.is_dir(follow_symlinks=False):
            _merge(entry.path, os.path.join(target, entry.name))
        else:
            os.replace(entry.path, os.path.join(target, entry.name))


class _Cover:
    def __init__(self, plan: Plan, root: str, mounts: list[Mount], are_nested: bool) -> None:
        self._plan = plan
        self._root = root
        self._points = [one.point for one in mounts]
        self._are_nested = are_nested
        self.read_only: list[str] = []

    def one(self, mount: Mount) -> None:
        """Cover a mount or the folders in it. Mounts of the kernel and read-only ones stay as they are."""
        is_written = not mount.is_of_the_kernel and not os.statvfs(mount.point).f_flag & os.ST_RDONLY
        if not is_written or not os.path.isdir(mount.point):
            if self._are_nested or is_written:  # otherwise the outer mount shows it
                _mount(mount.point, self._root + mount.point, _BIND)
            if is_written:
                self._close(mount.point)
            return
        if self._are_nested or not self._holds_mounts(mount.point):
            self._overlay(mount.point)
        else:
            self._descend(mount.point)

    def _holds_mounts(self, folder: str) -> bool:
        return any(one != folder and is_below(one, folder) for one in self._points)

    def _descend(self, folder: str) -> None:
        """Cover the folders in one that holds mounts, and close that one if the user may write there."""
        if os.access(folder, os.W_OK):
            if folder not in self._points:
                _mount(folder, self._root + folder, _BIND | _RECURSIVE)
            self._close(folder)
            self.read_only.append(folder)
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False) or entry.path in self._points:
                continue
            if self._holds_mounts(entry.path):
                self._descend(entry.path)
            else:
                self._overlay(entry.path)

    def _overlay(self, folder: str) -> None:
        place = self._plan.new_layer(folder)
        # Its files stay in memory and vanish with the processes, unless the user works there
        if folder == _SHARED_MEMORY and not is_below(self._plan.working_folder, folder):
            _mount("tmpfs", place, 0, "tmpfs")
        parts = [folder, os.path.join(place, "upper"), os.path.join(place, "work")]
        for part in parts[1:]:
            os.mkdir(part)
        shown = os.stat(folder)  # the top folder shows the layer's owner and mode
        if not os.getuid():
            os.chown(parts[1], shown.st_uid, shown.st_gid)
        os.chmod(parts[1], shown.st_mode & 0o7777)
        opened = [os.open(part, os.O_PATH) for part in parts]  # by number, because names may hold commas and colons
        try:
            lower, upper, work = (f"/proc/self/fd/{number}" for number in opened)
            layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
            for options in _OPTIONS:
                if _mounts("overlay", self._root + folder, 0, "overlay", f"{layers},{options}"):
                    return
        finally:
            for number in opened:
                os.close(number)
        if folder == os.sep:
            raise OSError(ctypes.get_errno(), f"no overlay over {folder}: {os.strerror(ctypes.get_errno())}")
        _mount(folder, self._root + folder, _BIND)
        self._close(folder)
        self.read_only.append(folder)

    def _close(self, folder: str) -> None:
        """Make a mount read-only, and keep its other restrictions."""
        told = os.statvfs(folder).f_flag
        flags = told & _KEPT_FLAGS | (_RELATIVE_TIMES if told & _STATVFS_RELATIVE_TIMES else 0)
        _mount(None, self._root + folder, _REMOUNT | _BIND | _READ_ONLY | flags)


def _mounts(source: str | None, target: str, flags: int, kind: str | None = None, data: str | None = None) -> bool:
    words = [None if one is None else os.fsencode(one) for one in (source, target, kind, data)]
    return bool(_LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) == 0)


def _mount(source: str | None, target: str, flags: int, kind: str | None = None) -> None:
    if not _mounts(source, target, flags, kind):
        raise OSError(ctypes.get_errno(), f"mounting {target}: {os.strerror(ctypes.get_errno())}")
