"""Secrets: what a script has read from the environment, and texts that look like a token or key."""

from __future__ import annotations

import ast
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
MASKED = "<masked>"
_DENSE = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z0-9+=_-]{24,}")
_DENSE_BITS = 4.5  # bits a character: the bound that detect-secrets has for base64
_NAMED = re.compile(
    r"(?:secret|passwd|password|(?:api|access|private|signing)_?key|auth|credential)(?:s|_?key|_?token)?$"
)
_PLAUSIBLE = re.compile(r"[\w+/=.:~!@#$%^&*-]{8,}")  # a word, which special tokens such as `<pad>` are not
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


def looks_secret(name: str, value: object) -> bool:
    """Return whether a text of that name is a secret: `hub_token`, `AWS_SECRET_ACCESS_KEY`, `db_password`."""
    is_plausible = isinstance(value, str) and _PLAUSIBLE.fullmatch(value)
    return bool(is_plausible) and (is_secret(name) or bool(_NAMED.search(name.lower())))


def secrets_in(text: str) -> list[str]:
    """Return the parts of a text that look like a token or key."""
    return [found.group() for found in _SHAPES.finditer(text)]


def is_dense(text: str) -> bool:
    """Return whether a text is one long word of letters and digits at random, as keys without a shape are."""
    counts = Counter(text)
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
    return bool(_DENSE.fullmatch(text)) and bits > _DENSE_BITS


def without_secrets(source: str) -> tuple[str, list[str]]:
    """Return source that reads its secrets from the environment, and the names of the variables.

    What no expression can stand for, in a comment or within an f-string, is masked.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    names: list[str] = []
    found = [(node, name) for node, name in _named_texts(tree) if id(node) not in parts]
    for node, name in sorted(found, key=lambda one: (-one[0].lineno, -one[0].col_offset)):
        if not looks_secret(name, node.value) and not secrets_in(str(node.value)):
            continue
        names.append(re.sub(r"\W", "_", name or "SECRET").upper())
        last = lines[(node.end_lineno or node.lineno) - 1]
        rest = last[node.end_col_offset or 0 :]
        lines[node.lineno - 1] = (
            lines[node.lineno - 1][: node.col_offset] + f'os.environ["{names[-1]}"]'.encode() + rest
        )
        del lines[node.lineno : node.end_lineno]
    text = b"".join(lines).decode()
    return hide_tokens(text), names


def hide_tokens(text: str) -> str:
    """Return a text with what has the shape of a token masked."""
    return _SHAPES.sub(MASKED, text)


def _named_texts(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Yield each text of some code, with the name that it is given to."""
    named: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            named[id(node.value)] = node.arg or ""
        elif isinstance(node, ast.Assign):
            named[id(node.value)] = ast.unparse(node.targets[0]).rpartition(".")[2]
        elif isinstance(node, ast.Dict):
            named |= {id(v): k.value for k, v in zip(node.keys, node.values, strict=True) if _is_text(k)}  # type: ignore[union-attr]  # a text
    yield from ((node, named.get(id(node), "")) for node in ast.walk(tree) if _is_text(node))  # type: ignore[misc]  # as above


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
