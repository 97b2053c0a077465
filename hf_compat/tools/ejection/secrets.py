"""Find texts that a script has read from the environment, and texts that look like a token or key."""

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
from hf_compat.tools.until_train import replaced

# Documented shapes of tokens. A text of such a shape is always a secret.
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
    """Texts that the script has read from the environment."""

    def __init__(self, is_of_script: Callable[[str], bool]) -> None:
        self._is_of_script = is_of_script
        self._read: dict[int, tuple[str, str]] = {}  # keeps the texts, so that no other one gets their identity

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        kind = type(os.environ)  # noqa: TID251 - the script's reads are recorded
        read = kind.__getitem__

        def read_and_keep(environ: os._Environ[str], name: str) -> str:
            text = read(environ, name)
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _PYTHONS:
                frame = frame.f_back
            if self._is_of_script(str(frame.f_globals.get("__name__"))):
                self._read[id(text)] = text, name
            return text

        with replaced(kind, "__getitem__", read_and_keep):
            yield

    def names_in(self, text: str) -> list[tuple[str, str]]:
        """The recorded texts in another text, the longest first, with their variables."""
        known = self._read.get(id(text))
        if known is not None and len(text) >= _KNOWN_BY_IDENTITY:
            return [known]
        found = {
            value: name for value, name in self._read.values() if len(value) >= _KNOWN_BY_CONTENT and value in text
        }
        return sorted(found.items(), key=lambda one: -len(one[0]))


def looks_secret(name: str, value: object) -> bool:
    """Whether a text of that name is a secret: `hub_token`, `AWS_SECRET_ACCESS_KEY`, `db_password`."""
    is_plausible = isinstance(value, str) and _PLAUSIBLE.fullmatch(value)
    return bool(is_plausible) and (is_secret(name) or bool(_NAMED.search(name.lower())))


def secrets_in(text: str) -> list[str]:
    """List the parts of a text that look like a token or key."""
    return [found.group() for found in _SHAPES.finditer(text)]


def is_dense(text: str) -> bool:
    """Whether a text is one long random word of letters and digits, like keys without a documented shape."""
    counts = Counter(text)
    bits = -sum(count / len(text) * math.log2(count / len(text)) for count in counts.values())
    return bool(_DENSE.fullmatch(text)) and bits > _DENSE_BITS


def without_secrets(source: str) -> tuple[str, list[str]]:
    """Let source read its secrets from the environment. Returns it with the names of the variables.

    A secret in a comment or f-string, which no expression can replace, is masked.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    nodes = list(ast.walk(ast.parse(source)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    # The name that a text is given to
    named: dict[int, str] = {}
    for node in nodes:
        if isinstance(node, ast.keyword):
            named[id(node.value)] = node.arg or ""
        elif isinstance(node, ast.Assign):
            named[id(node.value)] = ast.unparse(node.targets[0]).rpartition(".")[2]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            named |= {id(v): key for key, v in zip(keys, node.values, strict=True) if isinstance(key, str)}
    texts = [one for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    names: list[str] = []
    for text in sorted(texts, key=lambda one: (-one.lineno, -one.col_offset)):
        name = named.get(id(text), "")
        if id(text) in parts or not (looks_secret(name, text.value) or secrets_in(str(text.value))):
            continue
        names.append(re.sub(r"\W", "_", name or "SECRET").upper())
        rest = lines[(text.end_lineno or text.lineno) - 1][text.end_col_offset or 0 :]
        before = lines[text.lineno - 1][: text.col_offset]
        lines[text.lineno - 1] = before + f'os.environ["{names[-1]}"]'.encode() + rest
        del lines[text.lineno : text.end_lineno]
    return hide_tokens(b"".join(lines).decode()), names


def hide_tokens(text: str) -> str:
    """Mask the parts of a text that have the shape of a token."""
    return _SHAPES.sub(MASKED, text)
