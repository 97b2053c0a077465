"""A working folder in which a script reads the user's files and changes none. The standard library only.

The folder mirrors the file system from its root down to where the command was given: folders on the way are real, all
else are links. What is to be written is taken out of the links first, so relative paths behave as in the user's folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Up to here a file is copied where code beside Python may write into its folder; larger ones stay links.
_COPIED_BYTES = 64 * 2**20
# By audit event: which of its arguments are paths that it changes.
_CHANGES: dict[str, tuple[int, ...]] = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.truncate": (0,), "os.link": (1,),
    "os.symlink": (1,), "os.chmod": (0,), "os.utime": (0,), "shutil.rmtree": (0,), "shutil.move": (0, 1),
}  # fmt: skip
# The place of `dir_fd` among the arguments: with one, the path is not what it seems, and its folder was looked at.
_FOLDER_DESCRIPTOR = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.chmod": 2, "os.utime": 3}
_KEEPS_CONTENT = ("os.truncate", "os.chmod", "os.utime")
_CACHES = ("HOME", "CACHE", "TMPDIR", "TMP", "TEMP", "CACHE_DIR")


class ScratchFolder:
    """The mirror, and the guard over what a script changes.

    Args:
        place: The mirror of the file system's root; absolute.
        origin: The user's working folder; absolute.
        script_folder: Where the script lies: nothing is written there.
        open_to: Folders that the script may write into.
    """

    def __init__(self, place: str, origin: str, script_folder: str, open_to: Iterable[str] = ()) -> None:
        self.place = os.path.realpath(place)
        self.origin = os.path.realpath(origin)
        self._kept = os.path.dirname(os.path.dirname(self.place))  # of this comparison
        self._closed = [self.origin, os.path.realpath(script_folder)]
        self._open = [os.path.realpath(one) for one in (self._kept, *open_to)]
        self._elsewhere = [os.path.realpath(one) for one in _places_of_the_machine()]
        self._busy = threading.local()

    @property
    def working_folder(self) -> str:
        """The mirror of the user's working folder."""
        return self.place + os.path.splitdrive(self.origin)[1]

    def make(self) -> None:
        """Make the mirror down to the working folder."""
        os.makedirs(self.place)
        _link_entries(os.path.abspath(os.sep), self.place, self._kept)
        self._take_out(self.working_folder, keeps_content=True)
        if not os.path.isdir(self.working_folder):  # a folder on the way may be entered, and not be listed
            os.makedirs(self.working_folder)
            _link_entries(self.origin, self.working_folder, self._kept)

    def guard(self) -> None:
        """From now on, take out of the links what this process is about to write; refuse what lies elsewhere."""
        sys.addaudithook(self._look)

    def allow_change(self, path: object, keeps_content: bool | None = False) -> None:
        """Prepare a path for being changed.

        Args:
            path: The path.
            keeps_content: Whether the file's content stays as it is; None where only its folder changes.

        Raises:
            PermissionError: It lies among the user's files, outside of the mirror.
        """
        if not isinstance(path, (str, bytes, os.PathLike)) or getattr(self._busy, "now", False):
            return
        with self._at_work():
            absolute = os.path.abspath(os.fsdecode(path))
            folder = os.path.realpath(os.path.dirname(absolute))
            if _is_below(absolute, self.place):
                self._take_out(absolute, keeps_content)
            elif not self._may_write(os.path.join(folder, os.path.basename(absolute))):
                raise PermissionError(
                    errno.EACCES,
                    "`hf-compat compare` keeps a script from changing files outside of its folder; write to a relative "
                    "path, or let it with `--allow-writes FOLDER`",
                    absolute,
                )

    def _may_write(self, path: str) -> bool:
        if any(_is_below(path, one) for one in self._open):
            return True
        # Whether a path lies in a hidden folder of the project or of the home folder: these are programs' own
        bases = [one for one in (*self._closed, os.path.expanduser("~")) if _is_below(path, one)]
        parts = os.path.relpath(path, max(bases, key=len, default=os.sep)).split(os.sep)
        if "__pycache__" in parts or parts[-1] == ".cache" or any(part.startswith(".") for part in parts[:-1]):
            return True
        if any(_is_below(path, one) for one in self._closed):
            return False
        return any(_is_below(path, one) for one in self._elsewhere)

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING:
                self.allow_change(path, keeps_content=not flags & os.O_TRUNC)
        elif event in _CHANGES and self._has_whole_path(event, arguments):
            for index in _CHANGES[event]:
                self.allow_change(arguments[index], keeps_content=(event in _KEEPS_CONTENT) or None)
            if event in ("os.mkdir", "shutil.rmtree"):  # the first is asked for before a folder is written into
                self._open_folder(arguments[0], copies=event == "os.mkdir")

    def _has_whole_path(self, event: str, arguments: tuple[object, ...]) -> bool:
        index = _FOLDER_DESCRIPTOR.get(event)
        return index is None or len(arguments) <= index or arguments[index] in (-1, None)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = False

    def _take_out(self, path: str, keeps_content: bool | None) -> None:
        """Make real folders of the links on the way to a path; a link there becomes a file of its own, or goes."""
        current = self.place
        for part in os.path.relpath(os.path.dirname(path), self.place).split(os.sep):
            current = os.path.join(current, part)
            self._make_real(current)
        if path == self.working_folder:
            self._make_real(path)
        elif keeps_content is not None and self._is_our_link(path) and os.path.isfile(path):
            _replace_link(path, keeps_content)

    def _open_folder(self, path: object, copies: bool) -> None:
        """Make a real folder of a link; with `copies`, give it files of its own: code beside Python may write them."""
        if not isinstance(path, (str, bytes, os.PathLike)) or getattr(self._busy, "now", False):
            return
        absolute = os.path.abspath(os.fsdecode(path))
        if not _is_below(absolute, self.place) or not os.path.isdir(absolute):
            return
        with self._at_work():
            self._make_real(absolute)
            for entry in list(os.scandir(absolute)) if copies else ():
                if self._is_our_link(entry.path) and entry.is_file() and entry.stat().st_size <= _COPIED_BYTES:
                    _replace_link(entry.path, keeps_content=True)

    def _make_real(self, folder: str) -> None:
        if self._is_our_link(folder) and os.path.isdir(folder):
            source = os.readlink(folder)
            os.unlink(folder)
            os.mkdir(folder)
            _link_entries(source, folder, self._kept)

    def _is_our_link(self, path: str) -> bool:
        """Whether a path is a link that leads out: the mirror's, moved perhaps, or one that the script has made."""
        return os.path.islink(path) and not _is_below(os.path.abspath(os.path.realpath(path)), self._kept)


def _link_entries(source: str, folder: str, leave_out: str) -> None:
    """Link each entry of a folder into another one; none of a folder that cannot be read."""
    try:
        entries = list(os.scandir(source))
    except PermissionError:
        return
    for entry in entries:
        path = os.path.join(source, entry.name)
        if path != leave_out:
            os.symlink(path, os.path.join(folder, entry.name))


def _replace_link(path: str, keeps_content: bool) -> None:
    source = os.readlink(path)
    os.unlink(path)
    if keeps_content:
        shutil.copyfile(source, path)
        os.chmod(path, stat.S_IMODE(os.stat(source).st_mode) | stat.S_IWUSR)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _places_of_the_machine() -> Iterator[str]:
    """Yield where programs keep what is nobody's work: temporary files, caches, devices, the interpreter's folder."""
    yield from (tempfile.gettempdir(), sys.prefix, sys.base_prefix, "/dev", "/proc", "/sys", "/run")
    for name, value in os.environ.items():  # noqa: TID251 - it says where caches are, and cannot ask runtime/
        if name != "HOME" and name.endswith(_CACHES) and os.path.isabs(value):
            yield value


def writing_through(allow: Callable[[object], None], write: Callable[..., object], place: int) -> Callable[..., object]:
    """Return a function that writes a file beside Python's own `open`, and prepares its path first."""

    def prepare_and_write(*arguments: object, **keywords: object) -> object:
        for path in (*arguments[place : place + 1], keywords.get("f"), keywords.get("filename")):
            if isinstance(path, (str, os.PathLike)):
                allow(path)
        return write(*arguments, **keywords)

    return prepare_and_write
