"""Replace the names of `transformers` by ours, and restore them.

Scripts that import from transformers then train on Lightning without a change. `patch()` also serves names of releases
before 5, pickles of replaced classes, and assignments to the globals that transformers' Trainer reads.
"""

from __future__ import annotations

import copyreg
import importlib
import inspect
import operator
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from types import FunctionType, ModuleType

from hf_compat.errors import OverrideError, warn_once
from hf_compat.hf.arguments_rules import follow
from hf_compat.interop.former_names import add_former_names, take_former_names_back
from hf_compat.interop.mirrors import MIRRORS, acknowledge, subclasses_of, upstream_class_of
from hf_compat.interop.releases import NEWEST, REPLACED, modules_there, need_names, replaced_release
from hf_compat.interop.transformers_models import GLOBALS_BEFORE, is_same_global
from hf_compat.runtime.console import log_as_transformers
from hf_compat.runtime.inspection import package_of
from hf_compat.runtime.text import need

# Packages that rewrite the Trainer's source
_EDITORS = frozenset({"axolotl", "unsloth", "unsloth_zoo"})
_INSTEAD = (
    "{} `{}` as text, in order to rewrite transformers' source. The engine here is Lightning's and has no such lines."
    "\n\nHint: override the method in a subclass of Trainer, or run the script with transformers itself."
)

_getsource = inspect.getsource


def _getsource_for_readers(object: Callable[..., object]) -> str:
    """Read an object's source, as `inspect.getsource` does, but refuse the Trainer's to code that edits it.

    axolotl and unsloth search this text for lines, and skip their edit with at most a log line if none is found. The
    setting behind the edit would then have no effect, so the function is replaced while the patch is in force. Tools
    and notebooks that show source get it. See `tests/interop/test_edited_source.py`.

    Raises:
        OverrideError: A script or one of these packages asks for the source of our Trainer.
    """
    home = str(getattr(object, "__module__", None) or getattr(object, "__name__", ""))
    is_other_class = isinstance(object, type) and not object.__name__.endswith("Trainer")
    if home.startswith("hf_compat.") and "trainer" in home and not is_other_class:
        caller = sys._getframe(1).f_globals
        name, file = str(caller.get("__name__", "")), caller.get("__file__")  # a notebook's cells have no file
        installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
        is_script = isinstance(file, str) and not file.startswith(installed) and "site-packages" not in file
        if is_script or name.partition(".")[0] in _EDITORS:
            raise OverrideError(_INSTEAD.format(f"{name} reads", getattr(object, "__qualname__", object)))
    return _getsource(object)


def refuse_edited_methods(kind: type) -> None:
    """Refuse a Trainer of which compiled text has replaced one of this package's methods."""
    for base in kind.__mro__:
        if not base.__module__.startswith("hf_compat."):
            continue
        for name, value in vars(base).items():
            if not isinstance(value, FunctionType) or value.__code__.co_filename != "<string>":
                continue
            # `python -c` compiles a script's own functions under this name, too
            if not (sys.argv[:1] == ["-c"] and value.__module__ == "__main__"):
                who = value.__globals__.get("__name__")
                raise OverrideError(_INSTEAD.format(f"{who} has compiled", f"{kind.__name__}.{name}"))


# Modules whose globals transformers' Trainer reads when it trains
_WATCHED = (
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "transformers.trainer_optimizer",
    "transformers.optimization",
)
# Names that our Trainer reads there as well, and names that scripts import from there instead of the Trainer
_READ_OR_IMPORTED = ("DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "get_scheduler", "Trainer", "Seq2SeqTrainer")


def tell_of_unread_globals() -> None:
    """Warn of globals that a script has replaced and that transformers' Trainer reads, but ours does not."""
    found = []
    for module, names in GLOBALS_BEFORE.items():
        for name, before in names.items():
            here = vars(sys.modules[module]).get(name)
            # a second `patch()`, or transformers itself, puts such values there
            is_own = package_of(here) in ("transformers", "hf_compat")
            is_internal = name.startswith("__") or isinstance(before, ModuleType) or name in _READ_OR_IMPORTED
            if not (is_internal or is_own or is_same_global(before, here)):
                found.append(f"`{module}.{name}`")
    if found:
        warn_once(
            f"The script has replaced {', '.join(sorted(found))}, which transformers' Trainer would use. Lightning's "
            "engine does not.\n\nHint: override the method of Trainer that uses it in a subclass, or run the script "
            "with transformers itself."
        )


def tell_of_newer_names(kind: type, ours: type, name: str | None = None, others: Collection[str] = ()) -> None:
    """Warn of methods of a user's class that the installed transformers calls, and that this package does not know.

    A release newer than this package has such names. Nothing is imported for this. Without a patch, transformers' class
    is found if its Trainer is loaded.

    Args:
        kind: The user's class.
        ours: Our class for it, a Trainer or TrainerCallback.
        name: The name of transformers' class. None takes that of ours.
        others: Further names that are known.
    """
    name = ours.__name__ if name is None else name
    homes = [sys.modules.get(f"transformers.{name}") for name in ("trainer", "trainer_seq2seq")]
    loaded = next((vars(home)[name] for home in homes if home and name in vars(home)), None)
    theirs, _ = REPLACED.get(name, (loaded, None))
    known = {own for base in ours.__mro__ if base.__module__.startswith("hf_compat.") for own in vars(base)}
    packages = ("builtins", "hf_compat", "transformers")
    for base in (base for base in kind.__mro__ if package_of(base) not in packages):
        unknown = vars(base).keys() - known - {*others}
        newer = sorted(own for own in unknown if not own.startswith("__") and hasattr(theirs, own))
        if newer:
            release = sys.modules["transformers"].__version__
            warn_once(
                f"{base.__qualname__} has {', '.join(f'`{name}`' for name in newer)}, which transformers {release} "
                f"calls. This version of hf_compat is written for {NEWEST} and never calls it.\n\n"
                "Hint: update hf-compat, or run the script with transformers itself."
            )


_originals: dict[str, type] = {}  # `module:qualified name` → a replaced class


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _reduced(value: object) -> tuple[object, ...]:
    """Reduce an object of a replaced class, because pickle would find our class under its name."""
    found = value.__reduce_ex__(2)
    if isinstance(found, str):
        return found  # type: ignore[return-value]  # pickle accepts a global's name, too
    function, arguments, *rest = found
    cls = type(value)
    if function is cls:
        function, arguments = operator.call, (cls, *arguments)
    if arguments and arguments[0] is cls:  # `copyreg.__newobj__`, and `getattr` for members of an enum
        return (with_class, (function, _name_of(cls), *arguments[1:]), *rest)
    return (function, arguments, *rest)


def with_class(function: Callable[..., object], name: str, *arguments: object) -> object:
    """Call a function with transformers' own class. Pickles name this function."""
    return function(_originals.get(name) or pkgutil.resolve_name(name), *arguments)


# The modules that define replaced names. All are imported before anything is replaced, so that transformers' own
# classes inherit from its own.
HOMES = tuple(
    f"transformers.{name}"
    for name in (*MIRRORS, "data.data_collator", "hf_argparser", "trainer", "trainer_jit_checkpoint")
)
# Helpers that stay transformers' own, as its code calls them
_KEPT = (
    "DebugOption", "RemoveColumnsCollator", "find_batch_size", "has_length", "nested_detach", "nested_numpify",
    "number_of_arguments",
)  # fmt: skip
# A module that has imported or subclassed one of these before trains, or parses arguments, with transformers' own
_TELLTALES = ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments", "HfArgumentParser")
# A release without these is refused
_NEEDED = ("Trainer", "TrainingArguments", "TrainerCallback", "TrainerState", "HfArgumentParser")
_ADVICE = (
    "These were imported from transformers, or made from what was, before `hf_compat.patch()`: {}. They stay "
    "transformers' own: trainers among them train there, as far as they do beside ours.\n\n"
    "Hint: call `hf_compat.patch()` before anything imports them, or start the script by `hf-compat run`; in a "
    "notebook restart the kernel, and patch in its first cell."
)


_not_loaded: list[tuple[ModuleType, str]] = []  # those that transformers' lazy top level had not loaded before


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
    need("transformers", "[transformers]", "`hf_compat.patch()`")
    if REPLACED:
        top_levels = _top_levels()
    else:
        top_levels = _begin()
        log_as_transformers(True)
    inspect.getsource = _getsource_for_readers  # type: ignore[assignment]  # takes anything, as that does
    for cls, _ in REPLACED.values():
        if isinstance(cls, type) and cls not in copyreg.dispatch_table:  # a class with a reducer of its own keeps it
            copyreg.dispatch_table[cls] = _reduced  # type: ignore[assignment]  # tuples of three lengths
            _originals[_name_of(cls)] = cls
    _exchange({id(theirs): ours for theirs, ours in REPLACED.values()}, top_levels)
    for module, name in _not_loaded:
        setattr(module, name, REPLACED[name][1])
    add_former_names(top_levels)
    for watched in _WATCHED:  # note the value of each name that has none noted yet
        if watched in sys.modules:
            known = GLOBALS_BEFORE.setdefault(watched, {})
            for name, value in vars(sys.modules[watched]).items():
                # scripts change lists and dicts in place
                known.setdefault(name, value.copy() if type(value) in (list, dict) else value)
    theirs, _ = REPLACED["TrainingArguments"]
    assert isinstance(theirs, type)  # that name is a class on either side
    follow(replaced_release(theirs))
    holders = sorted(set(_holders([REPLACED[name][0] for name in _TELLTALES if name in REPLACED])))
    if holders:
        warn_once(_ADVICE.format(", ".join(holders)))


def unpatch() -> None:
    """Restore transformers' own names. Without an earlier `patch()`, do nothing."""
    if not REPLACED:
        return
    if inspect.getsource is _getsource_for_readers:  # other code may have replaced it since
        inspect.getsource = _getsource
    log_as_transformers(False)
    for cls in _originals.values():
        copyreg.dispatch_table.pop(cls, None)
    _originals.clear()
    GLOBALS_BEFORE.clear()
    follow(None)
    take_former_names_back()
    _exchange({id(ours): theirs for theirs, ours in REPLACED.values()}, _top_levels())
    for module, name in _not_loaded:
        vars(module).pop(name, None)
    REPLACED.clear()
    _not_loaded.clear()


def _begin() -> list[ModuleType]:
    """Import the modules whose names are replaced, and pair the names that both sides have. Return the top levels."""
    # importing this one later would load the package again, and bring its own classes back
    modules_there(("transformers.processing_utils",))
    top_levels = _top_levels()
    loaded_before = [(module, set(vars(module))) for module in top_levels]
    homes = modules_there(HOMES)
    names = dict.fromkeys(importlib.import_module("hf_compat").__all__, "hf_compat")
    for mirrored in MIRRORS.values():
        names.update({name: f"hf_compat.{home}" for name, home in mirrored.items()})
    pairs: dict[str, tuple[object, object]] = {}
    for name, home in names.items():
        ours = pkgutil.resolve_name(f"{home}:{name}")
        held = (vars(module).get(name) for module in homes)
        theirs = next((value for value in held if _is_defined_in(value, "transformers")), None)
        if theirs is not None and name not in _KEPT and _is_defined_in(ours, "hf_compat"):
            pairs[name] = theirs, ours
    need_names(pairs, _NEEDED, "`hf_compat.patch()`")
    theirs, ours = pairs["TrainerCallback"]
    assert isinstance(theirs, type) and isinstance(ours, type)  # that name is a class on either side
    REPLACED.update({**dict(subclasses_of(theirs, ours, pairs)), **pairs})
    public = REPLACED.keys() & set(sys.modules["transformers"].__all__)
    _not_loaded.extend((module, name) for module, names in loaded_before for name in public - names)
    for theirs, ours in REPLACED.values():
        acknowledge(ours, theirs)
    return top_levels


def _is_defined_in(value: object, package: str) -> bool:
    return (isinstance(value, type) or inspect.isfunction(value)) and package_of(value) == package


def _top_levels() -> list[ModuleType]:
    """List the modules `transformers` that code holds. The package replaces itself while it loads."""
    kind = type(sys.modules["transformers"])
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    held = (value for module in modules for value in list(vars(module).values()) if type(value) is kind)
    known = {id(one): one for one in (*modules, *held) if type(one) is kind and one.__name__ == "transformers"}
    return list(known.values())


def _exchange(replacements: dict[int, object], top_levels: list[ModuleType]) -> None:
    """Replace values in transformers' modules, under a name or within a list or dict that has a name."""
    inner = (module for name, module in list(sys.modules.items()) if name.startswith("transformers."))
    for module in (*top_levels, *inner):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in replacements:
                names[name] = replacements[id(value)]
            elif type(value) is list and any(id(item) in replacements for item in value):
                value[:] = [replacements.get(id(item), item) for item in value]
            elif type(value) is dict and not name.startswith("__"):
                value.update({key: replacements[id(item)] for key, item in value.items() if id(item) in replacements})


def _holders(originals: list[object]) -> Iterator[str]:
    """Yield where other packages hold an original class or function: the names of their globals, and of subclasses."""
    identities = {id(original) for original in originals}
    for name, module in list(sys.modules.items()):
        is_own = name.partition(".")[0] in ("transformers", "hf_compat")
        if isinstance(module, ModuleType) and not is_own and name != "__mp_main__":  # `__main__` under a second name
            yield from (f"{name}.{key}" for key, value in list(vars(module).items()) if id(value) in identities)
    pending: list[type] = [original for original in originals if isinstance(original, type)]
    while pending:
        kinds: list[type] = type.__subclasses__(pending.pop())
        for kind in kinds:
            if not _is_defined_in(kind, "hf_compat") and upstream_class_of(kind) is None:
                pending.append(kind)
                if not _is_defined_in(kind, "transformers"):
                    yield f"{kind.__module__}.{kind.__qualname__}"
