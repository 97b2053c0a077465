"""What the warm process imports beforehand, and what of it a child sees only when it imports it itself."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

# What every run of ours imports sooner or later.
CORE = (
    "torch", "torch._dynamo", "torch.distributed.run", "torch.utils.tensorboard", "numpy", "safetensors.torch",
    "lightning", "lightning.pytorch.cli", "torchmetrics", "torchmetrics.classification", "jsonargparse", "tqdm.auto",
    "yaml", "isal",
)  # fmt: skip
# Packages that the code asks about: a child has them once it imports them. Each with what its import imports.
GUESTS = {
    "datasets": (),
    "accelerate": (),
    "deepspeed": (),
    "transformers": ("accelerate", "datasets"),
    "peft": ("transformers", "accelerate"),
}
OF_GUESTS = (
    "datasets", "accelerate", "deepspeed", "transformers", "transformers.trainer", "transformers.trainer_seq2seq",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "transformers.integrations",
    "transformers.data.data_collator", "transformers.hf_argparser", "peft", "sklearn.datasets",
)  # fmt: skip
# Ours that starting is about: a child imports these itself.
NOT_OURS = ("hf_compat.cli.main", "hf_compat.__main__", "hf_compat.interop.child_site.sitecustomize")


@dataclass
class Loaded:
    """What the warm process has imported.

    Args:
        hidden: Modules of guests, by name, outside `sys.modules`.
        read: Names of the variables that were read meanwhile.
        before: The variables at the start.
        after: The variables that were set meanwhile.
        path: Where modules are looked for, after a script's folder and PYTHONPATH.
    """

    hidden: dict[str, ModuleType]
    read: set[str]
    before: dict[str, str]
    after: dict[str, str]
    path: list[str]


def load(ours: bool = True) -> Loaded:
    """Import everything, and hide the guests; what is imported already costs nothing.

    Args:
        ours: Whether this package is a part of it.
    """
    own = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    path = sys.path[:]
    for folder in own:
        if folder in path:
            path.remove(folder)
    before = dict(os.environ)
    with _reads_noted() as read, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*CORE, *(_ours() if ours else ()), *OF_GUESTS):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:  # an extra that is not installed
                print(f"{name} needs {error.name}", file=sys.stderr)
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in GUESTS}
    for name in hidden:
        del sys.modules[name]
    after = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return Loaded(hidden=hidden, read=read, before=before, after=after, path=path)


def _ours() -> Iterator[str]:
    import hf_compat

    for found in pkgutil.walk_packages(hf_compat.__path__, "hf_compat."):
        if found.name not in NOT_OURS:
            yield found.name


@contextmanager
def _reads_noted() -> Iterator[set[str]]:
    """Note every variable that is asked for by its name."""
    kind, read = type(os.environ), set()
    plain = kind.__getitem__

    def noted(self: object, name: str) -> str:
        if sys._getframe(1).f_code.co_name != "__iter__":  # of a copy of all
            read.add(name)
        return plain(self, name)

    kind.__getitem__ = noted
    try:
        yield read
    finally:
        kind.__getitem__ = plain


class Guests(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a child the hidden modules of a guest when it imports the guest."""

    def __init__(self, hidden: dict[str, ModuleType]) -> None:
        self.hidden = hidden

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in GUESTS or fullname not in self.hidden:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname)
        if found is None or found.origin != self.hidden[fullname].__spec__.origin:
            return None  # a stand-in for the guest comes first in `sys.path`
        found.loader = self
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        for guest in (*GUESTS[spec.name], spec.name):
            for name in [name for name in self.hidden if name.partition(".")[0] == guest]:
                sys.modules[name] = self.hidden[name] if name == spec.name else self.hidden.pop(name)
        self.kept = self.hidden.pop(spec.name).__spec__
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.kept
