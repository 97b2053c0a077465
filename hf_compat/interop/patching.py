"""Our names in place of those in `transformers`, for code that is not to be changed; and back again.

Names that transformers had before 5, and classes that were pickled under them, are served too.

`patch()` at the first import of transformers' trainers, for Pythons that a patched script starts.

A Python that never imports them pays nothing: this file imports the standard library alone.

Libraries that rewrite transformers' Trainer as text, with `inspect.getsource` and `exec`: detected, and refused.

axolotl and unsloth look for lines of transformers' own source, replace some, and put what they have compiled into the
class. Lightning's engine stands in their place here: the edit would be lost, or break a run in its middle.

What a script puts under a name of transformers' trainer modules after `patch()`.

transformers' Trainer looks these names up whenever it needs them, so that scripts change its ways by an assignment:
`transformers.trainer.DEFAULT_CALLBACKS.append(…)`. Lightning's engine reads a few of them; of the others it is told.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType

from hf_compat.errors import OverrideError, warn_once
from hf_compat.hf.arguments_rules import follow
from hf_compat.interop.former_names import add_former_names, take_former_names_back
from hf_compat.interop.mirrors import acknowledge, heirs, kin_of
from hf_compat.interop.releases import guest_of, modules_there, need_names
from hf_compat.runtime.console import log_as_transformers
from hf_compat.runtime.text import need

# What a script, or the lazy top level for it, imports when it asks for a Trainer, its arguments or callbacks.
_TRAINER_MODULES = frozenset(
    f"transformers.{name}"
    for name in (
        "trainer", "trainer_seq2seq", "training_args", "training_args_seq2seq", "trainer_callback", "hf_argparser",
    )
)  # fmt: skip


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python does, and patches when the outermost of them is loaded."""

    def __init__(self) -> None:
        self._loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a watched module, whose loader patches; None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in _TRAINER_MODULES else None
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: importlib.abc.Loader) -> None:
        load = loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            self._loading += 1
            try:
                load(module)
            finally:
                self._loading -= 1
            if not self._loading:
                self._patch()

        loader.exec_module = load_and_patch  # type: ignore[method-assign]  # the loader is of this one module

    def _patch(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            importlib.import_module("hf_compat.interop.patching").patch()


def patch_when_imported() -> None:
    """Patch as soon as somebody imports one of transformers' trainer modules."""
    sys.meta_path.insert(0, _PatchAfterImport())


# Packages that read the Trainer's source in order to rewrite it.
_EDITORS = frozenset({"axolotl", "unsloth", "unsloth_zoo"})
_INSTEAD = (
    "{} `{}` as text, in order to rewrite transformers' source; the engine is Lightning's here, and has no such lines."
    "\n\nHint: override the method in a subclass of Trainer, or run the script with transformers itself."
)

_getsource = inspect.getsource


def watch_readers() -> None:
    """Refuse, from now on, to show our Trainer's source to code that would edit it."""
    inspect.getsource = _getsource_for_readers  # type: ignore[assignment]  # takes anything, as that does


def let_readers_be() -> None:
    """Take that back, unless somebody else has replaced the function since."""
    if inspect.getsource is _getsource_for_readers:
        inspect.getsource = _getsource


def _getsource_for_readers(object: Callable[..., object]) -> str:
    """Return the text of an object's source, as `inspect.getsource` does.

    Raises:
        OverrideError: It is of the Trainer, and who asks is a script or a package that edits it.
    """
    caller = sys._getframe(1)
    # Whether something is one of our Trainers, a method of theirs, or the module
    home = str(getattr(object, "__module__", None) or getattr(object, "__name__", ""))
    is_other_class = isinstance(object, type) and not object.__name__.endswith("Trainer")
    if (home.startswith("hf_compat.") and "trainer" in home and not is_other_class) and _may_edit(caller):
        raise OverrideError(_INSTEAD.format(f"{caller.f_globals.get('__name__')} reads", _written_name(object)))
    return _getsource(object)


def _written_name(candidate: object) -> str:
    return str(getattr(candidate, "__qualname__", candidate))


def _may_edit(frame: FrameType) -> bool:
    """Return whether a caller is a script, or a package known for it; tools that show source are neither."""
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _EDITORS:
        return True
    file = frame.f_globals.get("__file__")  # what a notebook's cells do not have
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return isinstance(file, str) and not file.startswith(installed) and "site-packages" not in file


def refuse_edited_methods(kind: type) -> None:
    """Look for methods of our own classes that compiled text has replaced.

    Args:
        kind: The class of a Trainer that is being made.

    Raises:
        OverrideError: There is one; the message names it and who has put it there.
    """
    for base in kind.__mro__:
        if base.__module__.startswith("hf_compat."):
            for name, value in vars(base).items():
                code = getattr(value, "__code__", None)
                if (
                    code is not None
                    and code.co_filename == "<string>"
                    and not (sys.argv[:1] == ["-c"] and getattr(value, "__module__", None) == "__main__")
                ):
                    who = value.__globals__.get("__name__")
                    raise OverrideError(_INSTEAD.format(f"{who} has compiled", f"{kind.__name__}.{name}"))


_TRAINER = "transformers.trainer"
# Modules whose globals transformers' Trainer reads when it trains.
_WATCHED = (_TRAINER, "transformers.trainer_seq2seq", "transformers.trainer_optimizer", "transformers.optimization")
# What our Trainer reads there, too; and what scripts import from there rather than the Trainer.
_READ = frozenset({"DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "get_scheduler"})
_IMPORTED = frozenset({"Trainer", "Seq2SeqTrainer"})

_before: dict[str, dict[str, object]] = {}  # module → name → what stood there when `patch()` was done


def remember_globals() -> None:
    """Note what stands under each name, where that is not noted yet."""
    for module in _WATCHED:
        if module in sys.modules:
            known = _before.setdefault(module, {})
            values = {name: _kept(value) for name, value in vars(sys.modules[module]).items()}
            known.update({name: value for name, value in values.items() if name not in known})


def forget_globals() -> None:
    """Look at these names no more."""
    _before.clear()


def global_of_trainer(name: str) -> object:
    """Return what a script has put under a name of `transformers.trainer`; None where it has put nothing there."""
    here = vars(sys.modules[_TRAINER]).get(name) if _TRAINER in _before else None
    return here if here is not None and not _same(_before[_TRAINER].get(name), here) else None


def tell_of_unread_globals() -> None:
    """Warn of what a script has put in places that transformers' Trainer reads, and ours does not."""
    found = sorted(_unread())
    if found:
        warn_once(
            f"The script has replaced {', '.join(f'`{name}`' for name in found)}, which transformers' Trainer would "
            "use; Lightning's engine does not.\n\nHint: override the method of Trainer that uses it in a subclass, or "
            "run the script with transformers itself."
        )


def _unread() -> Iterator[str]:
    for module, names in _before.items():
        for name, before in names.items():
            here = vars(sys.modules[module]).get(name)
            is_internal = name.startswith("__") or isinstance(before, ModuleType)
            if not is_internal and name not in _READ | _IMPORTED and not _same(before, here) and not _is_own(here):
                yield f"{module}.{name}"


def _kept(value: object) -> object:
    """Return a copy of what scripts change in place, and anything else itself."""
    return value.copy() if type(value) in (list, dict) else value  # type: ignore[attr-defined]  # both have it


def _same(before: object, here: object) -> bool:
    return before == here if type(here) in (list, dict) else before is here


def _is_own(value: object) -> bool:
    """Return whether it is transformers' or ours: a second `patch()`, or transformers itself, has put it there."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("transformers", "hf_compat")


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
