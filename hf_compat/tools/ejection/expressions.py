"""Write the Python that makes a value of the run again.

Nothing is pickled. A value is written as a literal, imported, made by the call that made it, or read from a file of a
format without code.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import safetensors.torch
import torch

from hf_compat.interop.transformers_models import is_datasets_dataset, is_pretrained_model
from hf_compat.tools.ejection.findings import CannotBeWritten
from hf_compat.tools.ejection.recording import Call, Given, Recorder
from hf_compat.tools.ejection.secrets import is_dense, looks_secret, secrets_in
from hf_compat.tools.ejection.sources import STAND_INS, Import, UserCode

_LARGEST_WRITTEN_TENSOR = 64
Save = Callable[[Path], object]


@dataclasses.dataclass(slots=True)
class ProjectFiles:
    """Files and folders that the project reads."""

    saves: dict[str, Save] = dataclasses.field(default_factory=dict)
    secrets: set[str] = dataclasses.field(default_factory=set)
    _of: dict[int, tuple[str, object]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: object, save: Save) -> str:
        """Save a value once, and give the name of its file."""
        if id(value) in self._of:
            return self._of[id(value)][0]
        stem, dot, suffix = name.partition(".")
        free = (f"{stem}{number}{dot}{suffix}" for number in ("", *range(2, 1000)))
        chosen = next(name for name in free if name not in self.saves)
        self.saves[chosen] = save
        self._of[id(value)] = chosen, value
        return chosen


class Expressions:
    """Writes values for one file of the project, and keeps the imports of that file.

    `code` is the user's own code, or None if this writes for that file itself. `known` are the names that values have
    where the expressions are used, such as the model.
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
        self.loads_weights = True  # of modules, unless they are part of one whose weights are loaded
        self._under_way: list[int] = []

    def of(self, value: object) -> str:
        """Write the Python that makes a value.

        Raises:
            CannotBeWritten: There is none. The message says why.
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
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise CannotBeWritten(f"a {name} is an object of which only the script knows how it was made")

    def named(self, module: str, name: str) -> str:
        """Import a name of a module."""
        return self.import_(Import(module, name, name))

    def of_user_code(self, name: str) -> str:
        """Name an object of the user's own code, with its module so that nothing else has the same name."""
        self.import_(Import("user_code", None, "user_code"))
        return f"user_code.{name}"

    def here(self, file: str) -> str:
        """Write the path of a file of the project."""
        return f'{self.named("pathlib", "Path")}(__file__).parent / "{file}"'

    def call(self, made: type, given: Given) -> str:
        return f"{self.of(made)}({self.words(given, made)})"

    def words(self, given: Given, called: object = None) -> str:
        positional, named = given
        try:
            names = list(inspect.signature(called).parameters) if callable(called) else []
        except (ValueError, TypeError):  # of a builtin
            names = []
        names += [""] * (len(positional) - len(names))
        placed = [self.under(name, value) for name, value in zip(names, positional, strict=False)]
        return ", ".join([*placed, *(f"{name}={self.under(name, value)}" for name, value in named.items())])

    def under(self, name: object, value: object) -> str:
        """Write a value that has a name. The name of a secret gives it away."""
        is_secret = type(value) is str and isinstance(name, str) and looks_secret(name, value)
        if is_secret and not self.recorder.environment.names_in(str(value)):
            return self._from_environment(re.sub(r"\W", "_", str(name)).upper(), is_left=True)
        return self.of(value)

    def text(self, value: str) -> str:
        """Write a text. Parts that came from the environment or are secrets are read from there."""
        cut = self.recorder.environment.names_in(value)
        secrets = [value] if is_dense(value) and not cut else secrets_in(value)
        hidden = [text for text in secrets if not any(text in one or one in text for one, _ in cut)]
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
        """Import something, and give its name."""
        if self.is_user_code:
            return self.code.import_(wanted)
        for other in self.imports:
            if other.known_as == wanted.known_as and other != wanted:
                raise CannotBeWritten(f"`{wanted}` and `{other}` name two things alike")
        self.imports.add(wanted)
        return wanted.known_as


def _quoted(text: str) -> str:
    shown = repr(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in shown else shown


def _plain(write: Expressions, value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value) and type(value) is float:
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float, complex, bytes, range):
        return repr(value)
    if isinstance(value, PurePath):
        return f"{write.named('pathlib', 'Path')}({write.text(str(value))})"
    if isinstance(value, enum.Enum):
        is_ours = _home(type(value)).startswith("hf_compat")
        return write.of(value.value) if is_ours else f"{write.of(type(value))}.{value.name}"
    return write.text(value) if type(value) is str else None


def _logger(write: Expressions, value: object) -> str | None:
    """Write a logger of Python's by its name."""
    if not isinstance(value, logging.Logger):
        return None
    module = write.import_(Import("logging", None, "logging"))
    return f'{module}.getLogger("{re.sub("^hf_compat", "transformers", value.name)}")'


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
    if isinstance(value, np.generic):
        return _plain(write, value.item())
    if isinstance(value, np.ndarray) and value.size <= _LARGEST_WRITTEN_TENSOR and value.dtype.kind in "biuf":
        write.import_(Import("numpy", None, "np"))
        return f'np.array({value.tolist()}, dtype="{value.dtype}")'
    is_generator = isinstance(value, torch.Generator) and value.device.type == "cpu"
    is_tensor = type(value) is torch.Tensor and not value.requires_grad
    if not (is_generator or is_tensor or isinstance(value, (torch.dtype, torch.device))):
        return None
    write.import_(Import("torch", None, "torch"))
    if isinstance(value, torch.Generator):
        seed = value.initial_seed()
        if not torch.equal(value.get_state(), torch.Generator().manual_seed(seed).get_state()):
            raise CannotBeWritten("a torch.Generator has been drawn from")
        return f"torch.Generator().manual_seed({seed})"
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, torch.dtype) else f'torch.device("{value}")'
    if value.numel() <= _LARGEST_WRITTEN_TENSOR and bool(torch.isfinite(value).all()):
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    kept = value.detach().clone()
    file = write.files.add("tensor.pt", value, lambda path: torch.save(kept, path))
    return f"torch.load({write.here(file)}, weights_only=True)"


def _code(write: Expressions, value: object) -> str | None:
    """Write a module, function, class, `partial` or bound method: by its name, of the user's code or imported."""
    if isinstance(value, functools.partial):
        words = [write.of(value.func), *map(write.of, value.args)]
        named = (f"{name}={write.of(part)}" for name, part in value.keywords.items())
        return f"{write.named('functools', 'partial')}({', '.join([*words, *named])})"
    if isinstance(value, MethodType):
        return f"{write.of(value.__self__)}.{value.__name__}"
    if isinstance(value, ModuleType):
        write.import_(Import(value.__name__, None, value.__name__.partition(".")[0]))
        return value.__name__
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return None
    home, name = _home(value), value.__name__
    if name in STAND_INS and home.partition(".")[0] in ("hf_compat", "transformers"):
        return write.named(STAND_INS[name], name)
    if write.recorder.is_of_script(home) and isinstance(value, (type, FunctionType)):
        if isinstance(value, FunctionType) and name == "<lambda>":
            name = write.code.add_lambda(value)
        else:
            name = write.code.add(inspect.unwrap(value) if isinstance(value, FunctionType) else value)
        return name if write.is_user_code else write.of_user_code(name)
    return name if home == "builtins" else write.named(_public_home(value), name)


def _saved(write: Expressions, value: object) -> str | None:
    """Write an object that is saved in a folder: a tokenizer, processor, configuration, or the table of a stream."""
    if is_datasets_dataset(value):
        save: Save = value.save_to_disk  # type: ignore[attr-defined]  # a table
        return f"{write.named('datasets', 'load_from_disk')}({write.here(write.files.add('data/table', value, save))})"
    kind = type(value)
    if isinstance(value, torch.nn.Module) or not callable(getattr(kind, "from_pretrained", None)):
        return None
    if getattr(value, "save_pretrained", None) is None:
        return None
    names = {parent.__name__ for parent in kind.__mro__}
    found = (word.lower() for word in ("Tokenizer", "Config") if any(word in name for name in names))
    file = write.files.add(next(found, "processor"), value, value.save_pretrained)  # type: ignore[attr-defined]  # as just seen
    return f"{write.of(kind)}.from_pretrained({write.here(file)})"


def _module(write: Expressions, value: object) -> str | None:
    """Write a module beside the trained model, such as a teacher, with its weights and its mode."""
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
            raise CannotBeWritten(f"the making of a {type(value).__name__} was not recorded")
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
    """Write an object by the recorded call that made it, or an instance of a class without constructor."""
    origin, kind = write.recorder.origin_of(value), type(value)
    if isinstance(origin, Call):
        if not isinstance(origin.of, str):
            return f"{write.of(origin.of)}.{origin.name}({write.words(origin.given)})"
        called = getattr(sys.modules.get(origin.of), origin.name, None)
        made = f"{write.named(origin.of, origin.name)}({write.words(origin.given, called)})"
        is_one_of_several = origin.name == "load_dataset" and "split" not in origin.given[1]
        return f'{made}["{value.split}"]' if is_one_of_several else made  # type: ignore[attr-defined]  # a stream
    if origin is None:
        is_of_script = write.recorder.is_of_script
        has_constructor = any("__init__" in vars(one) and is_of_script(one.__module__) for one in kind.__mro__)
        is_simple = is_of_script(kind.__module__) and not has_constructor and kind.__new__ is object.__new__
        if isinstance(value, (type, torch.nn.Module)) or not is_simple or dataclasses.is_dataclass(value):
            return None
    made = write.call(kind, ((), {}) if origin is None else origin)
    changed = write.recorder.changes_of(value)
    if not changed:
        return made
    told = ", ".join(f"{name}={write.under(name, part)}" for name, part in changed.items())
    return f"{write.named('restoring', 'with_attributes')}({made}, {told})"


def _dataclass(write: Expressions, value: object) -> str | None:
    """Write a dataclass by its fields that are not at their default."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    chosen: dict[str, object] = {}
    for field in dataclasses.fields(value):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        held = getattr(value, field.name)
        is_plain = type(held) is type(default) and isinstance(held, (bool, int, float, str))
        if field.init and held is not default and not (is_plain and held == default):
            chosen[field.name] = held
    return write.call(type(value), ((), chosen))


_FORMS: tuple[Callable[[Expressions, object], str | None], ...] = (
    _plain, _logger, _container, _array, _code, _saved, _module, _recorded, _dataclass,
)  # fmt: skip


def _home(value: object) -> str:
    return str(getattr(value, "__module__", None) or "builtins")


def _public_home(value: type | FunctionType | BuiltinFunctionType) -> str:
    """The module from which something is imported: the shortest that has it under its name."""
    home, name = _home(value), value.__name__
    if home.partition(".")[0] == "hf_compat":  # only collators may be taken from transformers instead
        if "collat" in home:
            return "transformers"
        raise CannotBeWritten(f"{name} belongs to HF's trainer, or to this package, which the project does without")
    parts = home.split(".")
    for length in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None and getattr(module, name, None) is value:
            return ".".join(parts[:length])
    raise CannotBeWritten(f"{value.__qualname__} of {home} has no name there")
