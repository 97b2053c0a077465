"""Secrets: what a script has read from the environment, and texts that look like a token or key."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from hf_compat.runtime.text import is_secret

# Shapes of tokens that their makers document; each is a secret wherever it stands.
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}|sk-(?:proj-|ant-)?[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|glpat-[\w-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|xox[abeoprs]-[\w-]{10,}"
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|SG\.[\w-]{20,}\.[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*KEY-----|\Z)"
    r"|(?<=://)[^\s/:@'\"]+:[^\s/@'\"]+(?=@)"
)
_DENSE = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9+=_-]{24,}")
_DENSE_BITS = 4.5  # bits a character: the bound that detect-secrets has for base64
_NAMED = re.compile(r"(?:secret|passwd|password|api_?key|access_?key|auth|credential)(?:s|_?key|_?token)?$|_key$")
_PYTHONS = ("os", "collections.abc", "_collections_abc")  # `getenv`, `environ.get`
_KNOWN_BY_IDENTITY = 2  # shorter texts are one object for all of Python
_KNOWN_BY_CONTENT = 8


class Environment:
    """Texts that the script has read from the environment while it was listened to.

    Args:
        is_of_script: Whether a module is the script, or stands beside it.
    """

    def __init__(self, is_of_script: Callable[[str], bool]) -> None:
        self._is_of_script = is_of_script
        self._read: dict[int, tuple[str, str]] = {}  # a text that was read is kept, so that its identity stays its own

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the script's own lines read within."""
        kind = type(os.environ)  # noqa: TID251 - what the script reads of it is listened to
        read = kind.__getitem__

        def read_and_note(environ: os._Environ[str], name: str) -> str:
            text = read(environ, name)
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in (
                "os",
                "collections.abc",
                "_collections_abc",
            ):
                frame = frame.f_back
            if self._is_of_script(str(frame.f_globals.get("__name__"))):
                self._read[id(text)] = text, name
            return text

        kind.__getitem__ = read_and_note  # type: ignore[method-assign]  # given back below
        try:
            yield
        finally:
            kind.__getitem__ = read  # type: ignore[method-assign]  # as it was

    def names_in(self, text: str) -> list[tuple[str, str]]:
        """Return the texts that were read and stand in another one, the longest first, with their variables."""
        known = self._read.get(id(text))
        if known is not None and len(text) >= _KNOWN_BY_IDENTITY:
            return [known]
        found = {
            value: name for value, name in self._read.values() if len(value) >= _KNOWN_BY_CONTENT and value in text
        }
        return sorted(found.items(), key=lambda one: -len(one[0]))


def looks_secret(name: str) -> bool:
    """Return whether a value of that name is a secret: `hub_token`, `AWS_SECRET_ACCESS_KEY`, `db_password`."""
    return is_secret(name) or bool(_NAMED.search(name.lower()))


def secrets_in(text: str) -> list[str]:
    """Return the parts of a text that look like a token or key."""
    return [found.group() for found in _SHAPES.finditer(text)]


def is_dense(text: str) -> bool:
    """Return whether a text is one long word of letters and digits at random, as keys without a shape are."""
    counts = Counter(text)
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
    return bool(_DENSE.fullmatch(text)) and bits > _DENSE_BITS
