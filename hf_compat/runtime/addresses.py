"""Which texts are addresses of folders in other storage that can be written to. It is quick to import."""

from __future__ import annotations

import re

from fsspec.registry import known_implementations, registry

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
# Protocols of fsspec by which nothing can be kept: of this machine, or read alone
_NOT_KEEPING = frozenset(
    ["file", "local", "http", "https", "ftp", "data", "git", "github", "jupyter", "jlab", "libarchive", "zip", "tar"]
)
# Those whose files are in another storage
_LAYERS = re.compile("async.*|.*cache(d)?|dir|generic|reference")
# The package of a protocol
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
}


def store_address(text: str) -> str | None:
    """The address of a folder in a storage that fsspec knows, as it writes it. None for any other text."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    protocol, place = match[1].lower(), match[2].strip("/")
    known = protocol in known_implementations or protocol in registry or protocol in PACKAGES
    is_none = protocol in _NOT_KEEPING or _LAYERS.fullmatch(protocol) is not None
    return f"{protocol}://{place}" if known and not is_none and place else None
