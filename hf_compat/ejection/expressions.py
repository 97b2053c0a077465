"""From a value of the run to the Python that makes it again.

Nothing is pickled: a value is written as a literal, imported, made again by the call that made it, or read from a file
in a format that holds no code.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import torch

from hf_compat.ejection.findings import CannotBeWritten
from hf_compat.ejection.library_calls import Call, Given
from hf_compat.ejection.recording import Recorder
from hf_compat.ejection.sources import STAND_INS, Import, UserCode
from hf_compat.interop.transformers_models import is_datasets_dataset

_LARGEST_WRITTEN_TENSOR = 64
Save = Callable[[Path], object]


@dataclasses.dataclass(slots=True)
class ProjectFiles:
    """Files and folders that the project reads, and what writes each of them."""

    saves: dict[str, Save] = dataclasses.field(default_factory=dict)
    _of: dict[int, tuple[str, object]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: object, save: Save) -> str:
        """Have a value saved, once; returns the name under which it is."""
        if id(value) in self._of:
            return self._of[id(value)][0]
        stem, dot, suffix = name.partition(".")
        free = (f"{stem}{number}{dot}{suffix}" for number in ("", *range(2, 1000)))
        chosen = next(name for name in free if name not in self.saves)
        self.saves[chosen] = save
        self._of[id(value)] = chosen, value
        return chosen


class Expressions:
    """Writes values for one file of the project, and keeps what that file has to import.

    Args:
        recorder: How objects were made.
        files: What is saved beside the code.
        code: The user's own code; None where this writes for that file itself.
        known: Values that have a name where the expressions stand: the model, say.
    """

    def __init__(
        self,
        recorder: Recorder,
        files: ProjectFiles,
        code: UserCode | None = None,
        known: Mapping[int, str] | None = None,
    ) -> None:
        self.recorder, self.files = recorder, files
        self.known = dict(known or {})
        self.imports: set[Import] = set()
        self.code = code if code is not None else UserCode(recorder.is_of_script, self.of)
        self.is_user_code = code is None
        self._under_way: list[int] = []

    def of(self, value: object) -> str:
        """Return the Python that makes a value.

        Raises:
            CannotBeWritten: There is none; the message says why.
        """
        if id(value) in self.known:
            return self.known[id(value)]
        if id(value) in self._under_way:
            raise CannotBeWritten(f"a {type(value).__name__} refers to itself")
        self._under_way.append(id(value))
        try:
            for form in _FORMS:
                text = form(self, value)
                if text is not None:
                    return text
        finally:
            self._under_way.pop()
        raise CannotBeWritten(f"a {_name_of(type(value))} is an object of which only the script knows how it was made")

    def named(self, module: str, name: str) -> str:
        """Return the name of something that is imported."""
        self.import_(Import(module, name, name))
        return name

    def of_user_code(self, name: str) -> str:
        """Return what names a thing of the user's own code; its name alone might be that of something else here."""
        self.import_(Import("user_code", None, "user_code"))
        return f"user_code.{name}"

    def here(self, file: str) -> str:
        """Return the path of a file of the project."""
        self.import_(Import("pathlib", "Path", "Path"))
        return f'Path(__file__).parent / "{file}"'

    def call(self, made: type, given: Given) -> str:
        """Return the call of a class with what it was given."""
        return f"{self.of(made)}({self.words(given)})"

    def words(self, given: Given) -> str:
        """Return what a call is given, as it stands between its brackets."""
        positional, named = given
        return ", ".join([*map(self.of, positional), *(f"{name}={self.of(value)}" for name, value in named.items())])

    def import_(self, wanted: Import) -> None:
        for other in self.imports | (self.code.imports if self.is_user_code else set()):
            if other.known_as == wanted.known_as and other != wanted:
                raise CannotBeWritten(f"`{wanted}` and `{other}` name two things alike")
        (self.code.imports if self.is_user_code else self.imports).add(wanted)


def _plain(_: Expressions, value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value) and type(value) is float:
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float, complex, bytes, range):
        return repr(value)
    return _quoted(value) if type(value) is str else None


def _quoted(text: str) -> str:
    """Return a text as a formatter would have it."""
    shown = repr(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in shown else shown


def _container(write: Expressions, value: object) -> str | None:
    if type(value) is list:
        return f"[{', '.join(map(write.of, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(write.of, value))}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return "{" + ", ".join(f"{write.of(key)}: {write.of(part)}" for key, part in value.items()) + "}"
    if type(value) in (set, frozenset):
        inner = ", ".join(sorted(map(write.of, value)))  # type: ignore[call-overload]  # a set, as just seen
        return f"{type(value).__name__}([{inner}])"
    return None


def _array(write: Expressions, value: object) -> str | None:
    if isinstance(value, (torch.dtype, torch.device)):
        write.import_(Import("torch", None, "torch"))
        return str(value) if isinstance(value, torch.dtype) else f'torch.device("{value}")'
    if isinstance(value, np.generic):
        return _plain(write, value.item())
    if isinstance(value, np.ndarray) and value.size <= _LARGEST_WRITTEN_TENSOR and value.dtype.kind in "biuf":
        write.import_(Import("numpy", None, "np"))
        return f'np.array({value.tolist()}, dtype="{value.dtype}")'
    if type(value) is torch.Tensor and not value.requires_grad:
        return _tensor(write, value)
    return None


def _tensor(write: Expressions, value: torch.Tensor) -> str:
    write.import_(Import("torch", None, "torch"))
    if value.numel() <= _LARGEST_WRITTEN_TENSOR and bool(torch.isfinite(value).all()):
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    kept = value.detach().clone()
    file = write.files.add("tensor.pt", value, lambda path: torch.save(kept, path))
    return f"torch.load({write.here(file)}, weights_only=True)"


def _path(write: Expressions, value: object) -> str | None:
    return f"{write.named('pathlib', 'Path')}({_quoted(str(value))})" if isinstance(value, PurePath) else None


def _member(write: Expressions, value: object) -> str | None:
    if not isinstance(value, enum.Enum):
        return None
    if _home(type(value)).startswith("hf_compat"):
        return write.of(value.value)
    return f"{write.of(type(value))}.{value.name}"


def _code(write: Expressions, value: object) -> str | None:
    """Write a function or class: by its name, of the user's code or imported."""
    if isinstance(value, ModuleType):
        write.import_(Import(value.__name__, None, value.__name__.partition(".")[0]))
        return value.__name__
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return None
    home, name = _home(value), value.__name__
    if name in STAND_INS and home.partition(".")[0] in ("hf_compat", "transformers"):
        return write.named(STAND_INS[name], name)
    if write.recorder.is_of_script(home) and isinstance(value, (type, FunctionType)):
        return _of_script(write, value)
    if home == "builtins":
        return name
    return write.named(_public_home(value), name)


def _of_script(write: Expressions, value: type | FunctionType) -> str:
    if value.__name__ == "<lambda>":
        return _lambda(write, value)  # type: ignore[arg-type]  # a class has another name
    plain = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    name = write.code.add(plain)
    return name if write.is_user_code else write.of_user_code(name)


def _lambda(write: Expressions, value: FunctionType) -> str:
    """Write a lambda as a function of the user's code, named by its line."""
    name = write.code.add_lambda(value)
    return name if write.is_user_code else write.of_user_code(name)


def _call(write: Expressions, value: object) -> str | None:
    if isinstance(value, functools.partial):
        write.import_(Import("functools", "partial", "partial"))
        words = [write.of(value.func), *map(write.of, value.args)]
        named = (f"{name}={write.of(part)}" for name, part in value.keywords.items())
        return f"partial({', '.join([*words, *named])})"
    if isinstance(value, MethodType):
        return f"{write.of(value.__self__)}.{value.__name__}"
    return None


def _saved_pretrained(write: Expressions, value: object) -> str | None:
    """Write a tokenizer, processor or configuration: saved in a folder, and read from there."""
    save, kind = getattr(value, "save_pretrained", None), type(value)
    if save is None or not callable(getattr(kind, "from_pretrained", None)) or isinstance(value, torch.nn.Module):
        return None
    names = {parent.__name__ for parent in kind.__mro__}
    found = (word.lower() for word in ("Tokenizer", "Config") if any(word in name for name in names))
    what = next(found, "processor")
    file = write.files.add(what, value, save)
    return f"{write.of(kind)}.from_pretrained({write.here(file)})"


def _table(write: Expressions, value: object) -> str | None:
    """Write a table of `datasets`, that a stream is made of: saved in that package's own format."""
    if not is_datasets_dataset(value):
        return None
    save: Save = value.save_to_disk  # type: ignore[attr-defined]  # a table
    return f"{write.named('datasets', 'load_from_disk')}({write.here(write.files.add('data/table', value, save))})"


def _recorded(write: Expressions, value: object) -> str | None:
    origin = write.recorder.origin_of(value)
    if origin is None or not isinstance(origin, Call):
        return None if origin is None else write.call(type(value), origin)
    if isinstance(origin.of, str):
        made = f"{write.named(origin.of, origin.name)}({write.words(origin.given)})"
        is_one_of_several = origin.name == "load_dataset" and "split" not in origin.given[1]
        return f'{made}["{value.split}"]' if is_one_of_several else made  # type: ignore[attr-defined]  # a stream
    return f"{write.of(origin.of)}.{origin.name}({write.words(origin.given)})"


def _dataclass(write: Expressions, value: object) -> str | None:
    """Write a dataclass by those of its fields that are not at their default."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    chosen = {field.name: getattr(value, field.name) for field in _fields_set(value)}
    return write.call(type(value), ((), chosen))


def _fields_set(value: object) -> Iterator[dataclasses.Field[object]]:
    for field in dataclasses.fields(value):  # type: ignore[arg-type]  # a dataclass, as the caller has seen
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and not _is_same(getattr(value, field.name), default):
            yield field


def _is_same(value: object, other: object) -> bool:
    is_plain = type(value) is type(other) and isinstance(value, (bool, int, float, str))
    return value is other or (is_plain and value == other)


_FORMS: tuple[Callable[[Expressions, object], str | None], ...] = (
    _plain, _container, _array, _path, _member, _code, _call, _saved_pretrained, _table, _recorded, _dataclass,
)  # fmt: skip


def _home(value: object) -> str:
    return str(getattr(value, "__module__", None) or "builtins")


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _public_home(value: type | FunctionType | BuiltinFunctionType) -> str:
    """Return the module that something is imported from: the shortest that has it under its name.

    Raises:
        CannotBeWritten: It has no name in any module.
    """
    home, name = _home(value), value.__name__
    if home.partition(".")[0] == "hf_compat":
        return _home_in_transformers(value)
    parts = home.split(".")
    for length in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None and getattr(module, name, None) is value:
            return ".".join(parts[:length])
    raise CannotBeWritten(f"{value.__qualname__} of {home} has no name there")


def _home_in_transformers(value: object) -> str:
    """Return where transformers has what stands here in the place of its own; only collators may be taken there."""
    name = getattr(value, "__name__", "?")
    if "collat" not in _home(value):
        raise CannotBeWritten(f"{name} belongs to HF's trainer, or to this package, which the project does without")
    return "transformers"
