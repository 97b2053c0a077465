"""Force files and folders to their disk, and tell of what a disk does not offer.

Network disks, and those that a program or a container offers, may lack the flush of files or folders, or the rename of
folders. A system says so by the errors in `NOT_OFFERED`. None of them means that data were lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]

NOT_OFFERED = frozenset((
    *(errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EXDEV, errno.EACCES, errno.EPERM, errno.EMFILE),  # of a rename
))  # fmt: skip
FLUSH = "a flush (fsync)", "A checkpoint survives a kill there, but a power cut may take the newest ones."
# By device, what this process has told of
_TOLD: set[tuple[int, str]] = set()


def tell(path: Path, operation: tuple[str, str], error: OSError) -> None:
    """Warn once that the disk of a path does not offer an operation, and say what follows."""
    what, follows = operation
    known = os.stat(path).st_dev, what
    if known not in _TOLD:
        _TOLD.add(known)
        disk = os.path.realpath(path)
        while not os.path.ismount(disk):
            disk = os.path.dirname(disk)
        logger.warning("The disk at %s does not offer %s: %s. %s", disk, what, error.strerror, follows)


def force(descriptor: int, path: Path) -> None:
    """Force an open file or folder to the disk, if the disk offers that.

    Raises:
        OSError: The disk has refused what was written.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise OSError(error.errno, f"{error.strerror}, when it was forced to the disk", os.fspath(path)) from error
        tell(path, FLUSH, error)


def flush(path: Path) -> None:
    """Force a file or folder to the disk. Some systems cannot open folders for that."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            force(descriptor, path)
        finally:
            os.close(descriptor)
