"""From a value of the run to the Python that makes it again.

Nothing is pickled: a value is written as a literal, imported, made again by the call that made it, or read from a file
in a format that holds no code.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import safetensors.torch
import torch

from hf_compat.interop.transformers_models import is_datasets_dataset, is_pretrained_model
from hf_compat.tools.ejection.findings import CannotBeWritten
from hf_compat.tools.ejection.library_calls import Call, Given
from hf_compat.tools.ejection.recording import Recorder
from hf_compat.tools.ejection.secrets import is_dense, looks_secret, secrets_in
from hf_compat.tools.ejection.sources import STAND_INS, Import, UserCode

_LARGEST_WRITTEN_TENSOR = 64
Save = Callable[[Path], object]


@dataclasses.dataclass(slots=True)
class ProjectFiles:
    """Files and folders that the project reads, and what writes each of them.

    Args:
        saves: By name.
        secrets: Names of variables that its user has to set: they stand for secrets of the script.
    """

    saves: dict[str, Save] = dataclasses.field(default_factory=dict)
    secrets: set[str] = dataclasses.field(default_factory=set)
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
        self.code = code if code is not None else UserCode(recorder.is_of_script, self.under)
        self.is_user_code = code is None
        self.loads_weights = True  # of modules; False where the whole that they are part of is loaded
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
        return self.import_(Import(module, name, name))

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
        return f"{self.of(made)}({self.words(given, made)})"

    def words(self, given: Given, called: object = None) -> str:
        """Return what a call is given, as it stands between its brackets."""
        positional, named = given
        try:
            names = list(inspect.signature(called).parameters) if callable(called) else []
        except (ValueError, TypeError):  # of a builtin
            names = []
        names += [""] * (len(positional) - len(names))
        placed = [self.under(name, value) for name, value in zip(names, positional, strict=False)]
        return ", ".join([*placed, *(f"{name}={self.under(name, value)}" for name, value in named.items())])

    def under(self, name: object, value: object) -> str:
        """Return the Python that makes a value of some name: that of a secret says what it is."""
        if type(value) is str and isinstance(name, str) and looks_secret(name, value) and not self._names_in(value):
            return self._from_environment(re.sub(r"\W", "_", name).upper(), is_left=True)
        return self.of(value)

    def _names_in(self, text: str) -> list[tuple[str, str]]:
        return self.recorder.environment.names_in(text)

    def text(self, value: str) -> str:
        """Return the Python of a text; what came from the environment, or is a secret, is read from there."""
        cut = self._names_in(value)
        secrets = [value] if is_dense(value) and not cut else secrets_in(value)
        known = [text for text, _ in cut]
        hidden = [text for text in secrets if not any(text in one or one in text for one in known)]
        if not cut and not hidden:
            return _quoted(value)
        names = {text: self._from_environment(name) for text, name in cut}
        names |= {text: self._from_environment("SECRET", is_left=True) for text in hidden}
        between = re.split("(" + "|".join(map(re.escape, names)) + ")", value)
        return " + ".join(names.get(part) or _quoted(part) for part in between if part)

    def _from_environment(self, name: str, is_left: bool = False) -> str:
        if is_left:
            self.files.secrets.add(name)
        return f'{self.import_(Import("os", None, "os"))}.environ["{name}"]'

    def import_(self, wanted: Import) -> str:
        """Import something, and return the name that it has.

        Raises:
            CannotBeWritten: Another thing has its name.
        """
        if self.is_user_code:
            return self.code.import_(wanted)
        for other in self.imports:
            if other.known_as == wanted.known_as and other != wanted:
                raise CannotBeWritten(f"`{wanted}` and `{other}` name two things alike")
        self.imports.add(wanted)
        return wanted.known_as


def _plain(write: Expressions, value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value) and type(value) is float:
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float, complex, bytes, range):
        return repr(value)
    return write.text(value) if type(value) is str else None


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
        return "{" + ", ".join(f"{write.of(key)}: {write.under(key, part)}" for key, part in value.items()) + "}"
    if type(value) in (set, frozenset):
        inner = ", ".join(sorted(map(write.of, value)))  # type: ignore[call-overload]  # a set, as just seen
        return f"{type(value).__name__}([{inner}])"
    if type(value) is collections.deque:
        return f"{write.named('collections', 'deque')}({write.of(list(value))}, maxlen={value.maxlen})"
    if type(value) in (collections.defaultdict, collections.OrderedDict, collections.Counter):
        made = write.of(dict(value))  # type: ignore[call-overload]  # a mapping, as just seen
        default = f"{write.of(value.default_factory)}, " if isinstance(value, collections.defaultdict) else ""
        return f"{write.named('collections', type(value).__name__)}({default}{made})"
    return None


def _array(write: Expressions, value: object) -> str | None:
    if isinstance(value, (torch.dtype, torch.device)):
        write.import_(Import("torch", None, "torch"))
        return str(value) if isinstance(value, torch.dtype) else f'torch.device("{value}")'
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        write.import_(Import("torch", None, "torch"))
        seed = value.initial_seed()
        if not torch.equal(value.get_state(), torch.Generator().manual_seed(seed).get_state()):
            raise CannotBeWritten("a torch.Generator has been drawn from")
        return f"torch.Generator().manual_seed({seed})"
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
    return f"{write.named('pathlib', 'Path')}({write.text(str(value))})" if isinstance(value, PurePath) else None


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


def _module(write: Expressions, value: object) -> str | None:
    """Write a module beside the model that is trained, a teacher say, with the weights and the mode that it has."""
    if not isinstance(value, torch.nn.Module) or not (write.loads_weights or is_pretrained_model(value)):
        return None
    modes = {part.training for part in value.modules()}
    if len(modes) > 1:
        raise CannotBeWritten(f"of a {type(value).__name__} some parts are in training mode, and some are not")
    file = "None"
    if is_pretrained_model(value):
        save: Save = value.save_pretrained  # type: ignore[assignment]  # a pretrained model, as just seen
        folder = write.files.add(type(value).__name__.lower(), value, save)
        made = f"{write.of(type(value))}.from_pretrained({write.here(folder)})"
    else:
        origin = write.recorder.arguments_of(value)
        if origin is None:
            raise CannotBeWritten(f"nobody has seen how a {type(value).__name__} was made")
        try:
            write.loads_weights = False
            made = write.call(type(value), origin)
        finally:
            write.loads_weights = True
        if not value.state_dict() and value.training:
            return made
        if value.state_dict():
            name = f"{type(value).__name__.lower()}.safetensors"
            file = write.here(write.files.add(name, value, lambda path: safetensors.torch.save_model(value, str(path))))
    frozen = [name for name, weight in value.named_parameters() if not weight.requires_grad]
    told = f", frozen={write.of(frozen)}" if frozen else ""
    return f"{write.named('restoring', 'module_as_it_was')}({made}, {file}, training={value.training}{told})"


def _recorded(write: Expressions, value: object) -> str | None:
    origin = write.recorder.origin_of(value)
    if origin is None:
        return _by_attributes(write, value)
    if not isinstance(origin, Call):
        return _with_changes(write, value, write.call(type(value), origin))
    if isinstance(origin.of, str):
        called = getattr(sys.modules.get(origin.of), origin.name, None)
        made = f"{write.named(origin.of, origin.name)}({write.words(origin.given, called)})"
        is_one_of_several = origin.name == "load_dataset" and "split" not in origin.given[1]
        return f'{made}["{value.split}"]' if is_one_of_several else made  # type: ignore[attr-defined]  # a stream
    return f"{write.of(origin.of)}.{origin.name}({write.words(origin.given)})"


def _by_attributes(write: Expressions, value: object) -> str | None:
    """Write an instance of a class of the script's that has no constructor: what it holds was set afterwards."""
    kind = type(value)
    has_constructor = any(
        "__init__" in vars(one) and write.recorder.is_of_script(one.__module__) for one in kind.__mro__
    )
    is_simple = write.recorder.is_of_script(kind.__module__) and not has_constructor and kind.__new__ is object.__new__
    if isinstance(value, (type, torch.nn.Module)) or not is_simple or dataclasses.is_dataclass(value):
        return None
    return _with_changes(write, value, f"{write.of(kind)}()")


def _with_changes(write: Expressions, value: object, made: str) -> str:
    """Write what the script has set on an object after it was made."""
    changed = write.recorder.changes_of(value)
    if not changed:
        return made
    told = ", ".join(f"{name}={write.under(name, part)}" for name, part in changed.items())
    return f"{write.named('restoring', 'with_attributes')}({made}, {told})"


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
    _plain, _container, _array, _path, _member, _code, _call, _saved_pretrained, _table, _module, _recorded,
    _dataclass,
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
