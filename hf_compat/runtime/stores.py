"""Folders in other storage: their addresses, and requests by fsspec that are tried again.

An output folder on this machine may have a store, whose address `note_store` remembers for scripts that ask for the
folder's newest checkpoint before there is a Trainer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from hf_compat.errors import ArgumentError, MissingPackage, StoreError
from hf_compat.runtime.addresses import PACKAGES, store_address
from hf_compat.runtime.launch import environment
from hf_compat.runtime.text import brief

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between the tries of a request. Packages of a storage try again, too, by their own rules.
PAUSES = (0.5, 1.0, 2.0, 4.0)
# In these a name with slashes needs no folders.
_WITHOUT_FOLDERS = frozenset(["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hf"])
# By local folder, the store that has a copy of it
_STORES: dict[str, str] = {}
# `hf-compat check`, `compare`, `eject` and `explain` set it: a run of theirs leaves nothing behind
_ISOLATED = "HF_COMPAT_ISOLATED_IN"


def folder_for(address: str) -> str:
    """The folder of this machine in which a run writes that is to be stored at an address, if no other is named."""
    protocol, _, place = address.partition("://")
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parts = [quote(part, safe="@=+, ").replace("..", "%2E%2E") for part in place.split("/") if part not in ("", ".")]
    return os.path.join(cache, "hf_compat", "stores", protocol, *parts)


def are_reachable() -> bool:
    """Whether this process may write to stores."""
    return _ISOLATED not in environment


def note_store(folder: str, address: str | None) -> None:
    """Remember the store of a local folder. None forgets it."""
    _STORES.pop(os.path.realpath(folder), None)
    if address is not None and are_reachable():
        _STORES[os.path.realpath(folder)] = address


def store_of(folder: str) -> str | None:
    """The address of the store of a folder: its own, or what was remembered for a local one."""
    address = store_address(folder)
    if address is not None or not _STORES:
        return address
    try:
        return _STORES.get(os.path.realpath(folder))
    except ValueError:  # no path
        return None


class _Counted(Callback):
    """Tells how many bytes a request has sent."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def relative_update(self, inc: int = 1) -> None:
        self._tell(inc)


class Storage:
    """A folder in other storage. Names are those below it, with `/`.

    Raises:
        ArgumentError: fsspec cannot read the address.
        MissingPackage: The package of that storage is not installed.
        StoreError: A request has failed each time that it was tried.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        protocol = address.partition("://")[0]
        self._has_folders = protocol not in _WITHOUT_FOLDERS
        try:
            self._files, root = url_to_fs(address)
        except ImportError as error:
            package = PACKAGES.get(protocol)
            way_out = f"`pip install {package}`" if package else "install it"
            raise MissingPackage(
                f"{brief(address)} needs a package that is not installed: {error}.\n\nHint: {way_out}."
            ) from error
        except (ValueError, TypeError) as error:
            if protocol in PACKAGES and protocol not in known_implementations:  # the package brings the name
                raise MissingPackage(
                    f"{brief(address)} needs a package that is not installed.\n\n"
                    f"Hint: `pip install {PACKAGES[protocol]}`."
                ) from error
            raise ArgumentError(f"{brief(address)} cannot be read: {error}.\n\nHint: name a folder of it.") from error
        except Exception as error:  # some connect at once
            raise self._failed("opened", error) from error
        self._root = root.rstrip("/")

    def sizes(self, name: str = "") -> dict[str, int]:
        """List the names below a folder, or the whole storage, with their sizes in bytes."""
        place = f"{self._root}/{name}" if name else self._root

        def ask() -> dict[str, int]:
            self._files.invalidate_cache()
            try:
                found = self._files.find(place, detail=True)
            except FileNotFoundError:
                return {}
            return {path[len(self._root) :].lstrip("/"): int(facts["size"] or 0) for path, facts in found.items()}

        return {path: size for path, size in self._asked("listed", ask).items() if path}

    def read(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            FileNotFoundError: There is none.
        """
        content: bytes = self._asked("read", lambda: self._files.cat_file(f"{self._root}/{name}"))
        return content

    def fetch(self, name: str, path: str, size: int) -> None:
        """Copy a file to a path of this machine. `size` is that of the listing, in bytes.

        Raises:
            FileNotFoundError: There is none.
        """

        def ask() -> None:
            self._files.get_file(f"{self._root}/{name}", path)
            if os.path.getsize(path) != size:  # a connection that was cut
                raise OSError(f"{os.path.getsize(path)} of {size} bytes of {name} came")

        self._asked("read", ask)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in place of any other."""

        def send() -> None:
            self._make_folder(name)
            self._files.pipe_file(f"{self._root}/{name}", content)

        self._sent(send)

    def send(self, path: str, name: str, tell: Callable[[int], None]) -> None:
        """Copy a file of this machine, in place of any other. It tells the bytes that were sent, as they are sent."""

        def send() -> None:
            self._make_folder(name)
            self._files.put_file(path, f"{self._root}/{name}", callback=_Counted(tell))

        if not os.path.isfile(path):
            raise FileNotFoundError(path)
        self._sent(send)

    def remove(self, *names: str) -> None:
        """Remove files. One that is not there is none to remove."""
        for name in names:

            def ask(name: str = name) -> None:
                try:
                    self._files.rm_file(f"{self._root}/{name}")
                except FileNotFoundError:
                    return

            self._asked("removed", ask)

    def remove_empty(self, folder: str) -> None:
        """Remove the empty folders below a folder, and itself, in a storage that has such."""
        if not self._has_folders:
            return
        place = f"{self._root}/{folder}"
        try:
            within = [path for path, folders, files in self._files.walk(place) if not files]
            for path in sorted({place, *within}, key=len, reverse=True):
                self._files.rmdir(path)
        except Exception:  # an empty folder harms nobody
            logger.debug("%s keeps an empty folder.", place, exc_info=True)

    def _make_folder(self, name: str) -> None:
        if self._has_folders:
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)

    def _sent(self, call: Callable[[], None]) -> None:
        try:
            self._asked("written", call)
        except FileNotFoundError as error:  # its bucket
            raise self._failed("written", error) from error

    def _asked(self, what: str, call: Callable[[], T]) -> T:
        """Make a request, again after a pause if it fails. What is refused or not there is not asked for again."""
        for pause in PAUSES:
            try:
                return call()
            except FileNotFoundError:
                raise
            except (PermissionError, NotImplementedError) as error:
                raise self._failed(what, error) from error
            except Exception as error:
                logger.info("%s could not be %s (%s). It is tried again.", self.address, what, _reason(error))
                time.sleep(pause)
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> StoreError:
        return StoreError(f"{self.address} could not be {what}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
