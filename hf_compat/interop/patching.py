"""Our names in place of those in `transformers`, for code that is not to be changed; and back again.

Names that transformers had before 5, and classes that were pickled under them, are served too.
"""

from __future__ import annotations

import copyreg
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from hf_compat.errors import warn_once
from hf_compat.hf.profiles import follow
from hf_compat.interop.edited_source import let_readers_be, watch_readers
from hf_compat.interop.former_names import add_former_names, take_former_names_back
from hf_compat.interop.kinship import acknowledge, heirs, kin_of
from hf_compat.interop.releases import guest_of, modules_there, need_names
from hf_compat.interop.replaced_globals import forget_globals, remember_globals
from hf_compat.runtime.shared_logger import log_as_transformers
from hf_compat.runtime.text import need

Reduced = tuple[object, ...]  # what `__reduce_ex__` returns
_originals: dict[str, type] = {}


def let_originals_be_pickled(classes: Iterable[type]) -> None:
    """Give pickle a way to write objects of replaced classes; a class that has one of its own keeps it."""
    for cls in classes:
        if cls not in copyreg.dispatch_table:
            copyreg.dispatch_table[cls] = _reduced  # type: ignore[assignment]  # tuples of three lengths
            _originals[_name_of(cls)] = cls


def leave_originals_to_pickle() -> None:
    """Take back what `let_originals_be_pickled` has set: the names are transformers' own again."""
    for cls in _originals.values():
        copyreg.dispatch_table.pop(cls, None)
    _originals.clear()


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _reduced(value: object) -> Reduced:
    """Return what pickle writes, with the class by its name in place of the class."""
    found = value.__reduce_ex__(2)
    if isinstance(found, str):
        return found  # type: ignore[return-value]  # pickle takes a global's name, too
    function, arguments, *rest = found
    cls = type(value)
    if function is cls:
        return (called, (_name_of(cls), *arguments), *rest)
    if arguments and arguments[0] is cls:  # `copyreg.__newobj__`, and `getattr` for members of an enum
        return (with_class, (function, _name_of(cls), *arguments[1:]), *rest)
    return (function, arguments, *rest)


def called(name: str, *arguments: object) -> object:
    """Call transformers' own class."""
    return _original(name)(*arguments)


def with_class(function: Callable[..., object], name: str, *arguments: object) -> object:
    """Call a function with transformers' own class."""
    return function(_original(name), *arguments)


def _original(name: str) -> type:
    """Return transformers' own class of a name, whether ours stands there or not."""
    found: object = _originals.get(name)
    if found is None:
        module, _, path = name.partition(":")
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no class")
    return found


# Where transformers defines what we replace; all of it is imported before anything is replaced, so that its own
# classes are made from its own.
HOMES = (
    "transformers.trainer_utils",
    "transformers.trainer_pt_utils",
    "transformers.training_args",
    "transformers.trainer_callback",
    "transformers.optimization",
    "transformers.data.data_collator",
    "transformers.integrations.integration_utils",
    "transformers.trainer_jit_checkpoint",
    "transformers.trainer",
    "transformers.training_args_seq2seq",
    "transformers.trainer_seq2seq",
    "transformers.hf_argparser",
)
# Modules of ours whose names stand for those of transformers, besides the public names.
_MIRRORS = (
    "trainer_utils", "trainer_pt_utils", "training_args", "trainer_callback", "optimization", "data",
)  # fmt: skip
# Helpers of upstream's own code, which calls them with words that ours do not take.
_KEPT = frozenset(
    {
        "RemoveColumnsCollator", "find_batch_size", "has_length", "nested_detach", "nested_numpify",
        "number_of_arguments",
    }
)  # fmt: skip
# Who has imported or subclassed these of transformers before trains, or reads arguments, with transformers' own.
_TELLTALES = ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments", "HfArgumentParser")
# Without these there is nothing to replace.
_NEEDED = ("Trainer", "TrainingArguments", "TrainerCallback", "TrainerState", "HfArgumentParser")
_ADVICE = (
    "These were imported from transformers, or made from what was, before `hf_compat.patch()`: {}. They stay "
    "transformers' own: trainers among them train there, as far as they do beside ours.\n\n"
    "Hint: call `hf_compat.patch()` before anything imports them, or start the script by `hf-compat run`; in a "
    "notebook restart the kernel, and patch in its first cell."
)


@dataclass(kw_only=True, slots=True)
class _Swap:
    """What stands in the place of what, and what transformers' lazy top level had not loaded before.

    Args:
        pairs: Name → transformers' own and ours.
        not_loaded: Names that the top level finds when somebody asks for them, and nobody had.
    """

    pairs: dict[str, tuple[object, object]]
    not_loaded: list[tuple[ModuleType, str]]

    def forth(self) -> dict[int, object]:
        """Return, by the identity of transformers' own, what is ours."""
        return {id(theirs): ours for theirs, ours in self.pairs.values()}

    def back(self) -> dict[int, object]:
        """Return, by the identity of ours, transformers' own."""
        return {id(ours): theirs for theirs, ours in self.pairs.values()}


_in_force: list[_Swap] = []  # at most one


def is_patched() -> bool:
    """Return whether our names stand in the place of transformers'."""
    return bool(_in_force)


def patch() -> None:
    """Replace transformers' names by ours, for all imports from now on.

    Every class and function of `hf_compat` and its mirrored modules that `transformers` has as well is replaced
    wherever transformers holds it: at the top level, and in each of its modules. Names of earlier releases that
    scripts import are available again. Arguments have the installed release's defaults. A second call also replaces
    names in modules that transformers has loaded since. `unpatch()` restores everything.

    Raises:
        MissingPackage: transformers is not installed.

    Warns:
        HfCompatWarning: A module has imported or subclassed transformers' own Trainer before. The message names it.
    """
    need("transformers", "'hf-compat[transformers]'", "`hf_compat.patch()`")
    if not _in_force:
        _in_force.append(_begin())
        log_as_transformers(True)
    watch_readers()
    (swap,) = _in_force
    let_originals_be_pickled(theirs for theirs, _ in swap.pairs.values() if isinstance(theirs, type))
    for module in _modules_of_transformers():
        _exchange(vars(module), swap.forth())
    for module, name in swap.not_loaded:
        setattr(module, name, swap.pairs[name][1])
    add_former_names(_top_levels())
    remember_globals()
    theirs, _ = swap.pairs["TrainingArguments"]
    assert isinstance(theirs, type)  # that name is a class on either side
    follow(guest_of(theirs))
    originals = [swap.pairs[name][0] for name in _TELLTALES if name in swap.pairs]
    holders = sorted({*_importers(originals), *_subclasses(originals)})
    if holders:
        warn_once(_ADVICE.format(", ".join(holders)))


def unpatch() -> None:
    """Restore transformers' own names. Without an earlier `patch()`, do nothing."""
    if not _in_force:
        return
    let_readers_be()
    log_as_transformers(False)
    leave_originals_to_pickle()
    forget_globals()
    follow(None)
    take_former_names_back()
    swap = _in_force.pop()
    for module in _modules_of_transformers():
        _exchange(vars(module), swap.back())
    for module, name in swap.not_loaded:
        vars(module).pop(name, None)


def _begin() -> _Swap:
    """Import what is to be replaced, and return what stands for what."""
    # importing this one later would load the package again, and bring its own classes back
    modules_there(("transformers.processing_utils",))
    loaded_before = [(module, set(vars(module))) for module in _top_levels()]
    pairs = dict(_pairs(modules_there(HOMES)))
    need_names(pairs, _NEEDED, "`hf_compat.patch()`")
    theirs, ours = pairs["TrainerCallback"]
    assert isinstance(theirs, type) and isinstance(ours, type)  # that name is a class on either side
    pairs = {**dict(heirs(theirs, ours, pairs)), **pairs}
    public = pairs.keys() & set(sys.modules["transformers"].__all__)
    swap = _Swap(pairs=pairs, not_loaded=[(m, name) for m, names in loaded_before for name in public - names])
    for theirs, ours in pairs.values():
        acknowledge(ours, theirs)
    return swap


def _pairs(homes: list[ModuleType]) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield each name that both sides have, with transformers' own and ours."""
    for name, ours in _ours():
        found = (vars(home)[name] for home in homes if name in vars(home))
        theirs = next((one for one in found if _is_defined_in(one, "transformers")), None)
        if theirs is not None:
            yield name, (theirs, ours)


def _ours() -> Iterator[tuple[str, object]]:
    """Yield our classes and functions by name."""
    package = importlib.import_module("hf_compat")
    mirrors = [importlib.import_module(f"hf_compat.{name}") for name in _MIRRORS]
    names = [*((package, name) for name in package.__all__), *((one, name) for one in mirrors for name in dir(one))]
    for module, name in names:
        value = getattr(module, name)
        if name not in _KEPT and _is_defined_in(value, "hf_compat"):
            yield name, value


def _is_defined_in(value: object, package: str) -> bool:
    is_code = isinstance(value, type) or inspect.isfunction(value)
    return is_code and str(getattr(value, "__module__", "")).partition(".")[0] == package


def _modules_of_transformers() -> list[ModuleType]:
    inner = (module for name, module in list(sys.modules.items()) if name.startswith("transformers."))
    return [*_top_levels(), *(module for module in inner if isinstance(module, ModuleType))]


def _top_levels() -> list[ModuleType]:
    """Return `transformers`, and what code holds under that name from before it loaded itself once more."""
    kind = type(sys.modules["transformers"])
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    held = (value for module in modules for value in list(vars(module).values()) if type(value) is kind)
    known = {id(one): one for one in (*modules, *held) if type(one) is kind and one.__name__ == "transformers"}
    return list(known.values())


def _exchange(names: dict[str, object], replacements: dict[int, object]) -> None:
    """Replace values of a module: under a name, or in a list or dict that stands under one."""
    for name, value in list(names.items()):
        if id(value) in replacements:
            names[name] = replacements[id(value)]
        elif type(value) is list and any(id(item) in replacements for item in value):
            value[:] = [replacements.get(id(item), item) for item in value]
        elif type(value) is dict and not name.startswith("__"):
            value.update({key: replacements[id(item)] for key, item in value.items() if id(item) in replacements})


def _importers(originals: list[object]) -> Iterator[str]:
    """Yield `module.name` for each global of other packages that is one of the originals."""
    identities = {id(original) for original in originals}
    for name, module in list(sys.modules.items()):
        is_own = name.partition(".")[0] in ("transformers", "hf_compat")
        if isinstance(module, ModuleType) and not is_own and name != "__mp_main__":  # it is `__main__`, once more
            yield from (f"{name}.{key}" for key, value in list(vars(module).items()) if id(value) in identities)


def _subclasses(originals: list[object]) -> Iterator[str]:
    """Yield the classes of other packages that were made from the originals."""
    pending: list[type] = [original for original in originals if isinstance(original, type)]
    while pending:
        kinds: list[type] = type.__subclasses__(pending.pop())
        for kind in kinds:
            if not _is_defined_in(kind, "hf_compat") and kin_of(kind) is None:
                pending.append(kind)
                if not _is_defined_in(kind, "transformers"):
                    yield f"{kind.__module__}.{kind.__qualname__}"
