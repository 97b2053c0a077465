"""Paths of this machine, and addresses of other storage, which a system takes for paths below the current folder."""

from __future__ import annotations

import errno
import os
import re
from urllib.parse import unquote, urlsplit

from hf_compat.errors import ArgumentError
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.text import brief, shown

# A scheme has two characters or more: `C:` is a drive. fsspec chains schemes by `::`. `pathlib` and `normpath` leave
# one slash of two, which only a known scheme is told by: a folder's name may end with a colon, too.
_KNOWN = (
    "abfss?|adl|az|cos|dbfs|file|ftp|gcs|gs|hdfs|hf|https?|local|memory|oci|oss|r2|s3[an]?|sftp|viewfs|wasbs?|webhdfs"
)
_ADDRESS = re.compile(rf"([a-z][a-z0-9+.-]*::)*([a-z][a-z0-9+.-]+:/|({_KNOWN}):)/", re.IGNORECASE)


def way_to_path(text: str) -> str:
    """The way out for an address of other storage. Empty for a path of this machine."""
    if _ADDRESS.match(text) is None:
        return ""
    parts = urlsplit(text)
    if parts.scheme in ("file", "local") and parts.netloc in ("", "localhost") and parts.path:
        return f"write it as {brief(unquote(parts.path))}."
    if store_address(text) is None and store_address(with_two := re.sub(r"(?<=[a-z0-9]):/(?!/)", "://", text, count=1)):
        return f"paths and `normpath` leave one slash of two: write it as the text {brief(with_two)}."
    return (
        "it is an address of other storage, and not one that fsspec can keep files in, as `s3://bucket/run` is. "
        f"Name one, or a folder of this machine, and copy between it and {brief(text)} with a tool of that storage."
    )


def local_path(name: str, path: object) -> str:
    """Return the value of an argument that is a path.

    Raises:
        ArgumentError: It is an address of other storage, such as `s3://bucket/run`, or not a path at all.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]  # whatever a script passes
        way_out = way_to_path(text)
        os.lstat(text)
    except TypeError:
        raise ArgumentError(f"`{shown(name, path)}` is not a path.\n\nHint: pass a text or a Path.") from None
    except ValueError as error:  # a null character, or a lone surrogate that no file system can name
        raise ArgumentError(f"`{shown(name, path)}` is not a path: {error}.\n\nHint: remove the character.") from None
    except OSError as error:  # most often there is nothing yet
        if error.errno == errno.ENAMETOOLONG:
            raise ArgumentError(f"`{shown(name, path)}` is too long for a path.\n\nHint: shorten it.") from None
    if way_out:
        raise ArgumentError(f"`{shown(name, text)}` is not a path.\n\nHint: {way_out}")
    return text
