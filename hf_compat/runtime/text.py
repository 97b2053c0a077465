"""Truth values, secrets and unknown names in texts for people, and errors about missing packages and names."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Never

from hf_compat.errors import AbsentName, ArgumentError, MissingPackage

# The words of `transformers.utils.strtobool` and `accelerate.utils.str_to_bool`, upper or lower case.
_TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))
_FALSE = frozenset(("0", "false", "f", "no", "n", "off"))

# Of tokenizers, and not secret.
_SPECIAL_TOKENS = frozenset(
    f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "audio", "video")
)
_LIKE_TOKEN = re.compile(r"tok(?!ens|eniz)")


def bool_or_none(text: str | bool) -> bool | None:
    """Convert a word such as `true`, `no` or `1` to its truth value, and any other text to None."""
    if isinstance(text, bool):
        return text
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def parse_switch(variables: Mapping[str, str], name: str) -> bool:
    """Whether an environment variable is on. An unset or empty one is off.

    Raises:
        ArgumentError: Its text is not a truth value.
    """
    text = variables.get(name) or "false"
    value = bool_or_none(text)
    if value is None:
        raise ArgumentError(f"`{name}={brief(text)}` is not a truth value.\n\nHint: write true or false.")
    return value


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name with the most similar spelling, or None if none is as similar as `cutoff`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """Make the hint for an unknown name, which is the nearest known one, or `otherwise` if there is none."""
    near = nearest(name, known, cutoff)
    return otherwise if near is None else f"did you mean `{near}`?"


@functools.lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Whether values of that name are secret, as those of `hub_token`, `--args.hub-token` and `api_key`."""
    plain = name.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
    if plain in _SPECIAL_TOKENS:
        return False
    return plain.endswith(("_token", "_api_key", "_password")) or plain in ("token", "api_key", "password")


def shown(name: str, value: object) -> str:
    """Format `name=value` for a message, without secret values."""
    return f"{name}=<{name.upper()}>" if is_secret(name) else f"{name}={brief(value)}"


def check_callables(**functions: object) -> None:
    """Refuse a constructor's arguments that are neither None nor callable.

    Raises:
        ArgumentError: One is neither.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ArgumentError(f"`{shown(name, function)}` cannot be called.\n\nHint: pass the function itself.")


def brief(value: object, longest: int = 400) -> str:
    """Format the beginning of any value for a message, without secrets. The text of the rest is never built."""
    text = ""
    try:
        for piece in _pieces(value.value if isinstance(value, Enum) else value, longest):
            text += piece
            if len(text) > longest:
                return f"{text[:longest]}…"
    except Exception as error:  # the `repr` of a user's object, or a number of 5,000 digits
        return f"<{type(value).__name__}, which cannot be shown: {type(error).__name__}>"
    return text


_BRACKETS = {list: "[]", tuple: "()", set: "{}"}
_DEEPEST_SHOWN = 20  # a container may hold itself


def _pieces(value: object, longest: int, depth: int = 0) -> Iterator[str]:
    """Yield the parts of a value's `repr`, so that the caller can stop."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)) and (value or isinstance(value, (dict, list, tuple))):
        is_mapping = isinstance(value, Mapping)
        brackets = "{}" if is_mapping else _BRACKETS.get(type(value), "[]")
        is_plain = type(value) in (dict, *_BRACKETS)
        yield brackets[0] if is_plain else f"{type(value).__name__}({brackets[0]}"
        for index, item in enumerate(value if depth < _DEEPEST_SHOWN else "…"):
            yield ", " if index else ""
            yield from _pieces(item, longest, depth + 1)
            if isinstance(value, Mapping):
                held = value[item] if depth < _DEEPEST_SHOWN else "…"
                is_hidden = isinstance(item, str) and is_secret(item) and held is not None
                yield ": "
                yield from _pieces(f"<{item.upper()}>" if is_hidden else held, longest, depth + 1)
        yield ("," if type(value) is tuple and len(value) == 1 else "") + brackets[1] + ("" if is_plain else ")")
    else:
        yield repr(value[: longest + 1] if isinstance(value, (str, bytes, bytearray)) else value)


def without_secrets(text: str, words: Sequence[str]) -> str:
    """Remove the values of secret options from a message about a command line.

    Every option with `tok` in its name counts as a token, as it may be misspelt.
    """
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and (is_secret(name) or _LIKE_TOKEN.search(name.lower())):
            secret = value if equals else following
            if secret and not secret.startswith("-"):
                text = text.replace(secret, "<hidden>")
    return text


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a missing parent, or a module without a spec
        return False


# The name of the distribution. No index has it yet, so that no message asks pip for it.
DISTRIBUTION = "hf-compat"


def pip_install(what: str) -> str:
    """Write the command that installs packages.

    Args:
        what: Arguments of pip, or an extra of this package as `[plot]`, whose packages are named.
    """
    if not what.startswith("["):
        return f"pip install {what}"
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        return f"pip install -e '.{what}'"
    by_extra = [(text.partition(";")[0].strip(), re.search(r"""extra == ["'](\w+)["']""", text)) for text in required]
    packages = [package for package, extra in by_extra if extra is not None and f"[{extra[1]}]" == what]
    return f"pip install {' '.join(repr(package) for package in packages)}"


def missing_package(module: str, install: str, for_what: str) -> MissingPackage:
    """Make the error about a missing package.

    Args:
        module: The module that could not be imported.
        install: An argument of `pip_install`.
        for_what: The feature that needs it. The message begins with it.
    """
    return MissingPackage(f"{for_what} needs the package {module}.\n\nHint: {pip_install(install)}", name=module)


def need(module: str, install: str, for_what: str) -> ModuleType:
    """Import an optional package's module, with the arguments of `missing_package`.

    Raises:
        MissingPackage: It cannot be imported. The message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(module.partition(".")[0], install, for_what) from error


@contextlib.contextmanager
def as_import_error(name: str, module: str) -> Iterator[None]:
    """Raise an AttributeError of the body again as an ImportError, where a module's `__getattr__` loads a name.

    Python takes the AttributeError of a `__getattr__` for an absent name: `hasattr` is False, and `from … import` drops
    the cause.
    """
    try:
        yield
    except AttributeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = frames[-1].f_globals.get("__name__")
        raise ImportError(
            f"cannot import name {brief(name)} from {brief(module)}: {place} failed to load with "
            f"{type(error).__name__}: {error}\n\nHint: install the package again, or a release that fits the others.",
            name=module,
        ) from error


class Absent:
    """A name of upstream's class that ours lacks.

    Reading it on the class, an object or `super()` raises `AbsentName`, so `hasattr` is False. A subclass or an object
    may define the name.

    Args:
        name: The name.
        way_out: The replacement, for the message.
    """

    def __init__(self, name: str, way_out: str) -> None:
        self.name, self.way_out = name, way_out

    def __get__(self, instance: object, owner: type) -> Never:
        raise AbsentName(
            f"{owner.__name__} has no `{self.name}` here, which a release of transformers has.\n\nHint: {self.way_out}."
        )
