"""Arguments that are not ours: `transformers.TrainingArguments` and its subclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.argument_values import AcceleratorConfig, checks_of, default_of
from hf_compat.hf.arguments import AcceptOldNames, Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.arguments_views import ArgumentSetters, ArgumentViews
from hf_compat.hf.legacy import OLD_NAMES, remember, remembered
from hf_compat.hf.old_attributes import (
    OldAttributes,
    asked_by_declared,
    assign_old,
    declared_old_names,
    read_attribute,
)
from hf_compat.runtime.text import shown

# The fields that upstream resolves into objects of Accelerate and DeepSpeed. Ours are made from the fields.
_DERIVED = frozenset({"distributed_state", "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args", "device"})
_DUNDERS = frozenset({"__getattr__", "__setattr__", "__setstate__", "__str__", "__repr__", "__getstate__"})
# The classes of transformers that have one here, by name.
_OURS = {one.__name__: one for one in (Seq2SeqTrainingArguments, TrainingArguments)}


def as_our_arguments(args: object) -> TrainingArguments:
    """Return arguments as ours, to look at: ours as they are, a copy of `transformers`' own field by field.

    Raises:
        ArgumentError: An object that is neither.
    """
    if isinstance(args, TrainingArguments):
        return args
    kind = _our_class(type(args))
    names = [field.name for field in fields(kind)]
    if isinstance(args, type) or not is_dataclass(args) or not hasattr(args, "output_dir"):
        raise ArgumentError(f"`args` is a {type(args).__name__}.\n\nHint: pass `hf_compat.TrainingArguments(…)`.")
    unknown = unknown_arguments(args)
    if unknown:
        warn_once(
            f"{', '.join(f'`{shown(name, value)}`' for name, value in unknown.items())} has no effect: this release of "
            f"hf_compat does not know {'it' if len(unknown) == 1 else 'them'}, the installed transformers is newer."
        )
    declared = _declared_by_script(type(args))
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    defaults = {one.name: default_of(one) for one in fields(_class_of_transformers(type(args)) or kind)}
    values |= asked_by_declared(args, declared, defaults, checks_of(kind, kind))
    ours = kind(**values)
    passed_over = {*names, *declared, *_DERIVED, *_old_fields_left_alone(args), "compat"}
    for name, value in vars(args).items():  # fields of a subclass or of an older release, and values set by a script
        if name not in passed_over and not name.startswith("_"):
            setattr(ours, name, value)
    return ours


def unknown_arguments(args: object) -> dict[str, object]:
    """Return the arguments of a newer transformers that are set away from their defaults, with their values."""
    theirs = _class_of_transformers(type(args))
    if theirs is None:
        return {}
    known = {field.name for field in fields(_OURS[theirs.__name__])} | OLD_NAMES.keys() | _DERIVED
    new = [field for field in fields(theirs) if field.name not in known and hasattr(args, field.name)]
    defaults = {one.name: default_of(one) if one.default_factory is MISSING else one.default_factory() for one in new}
    return {name: getattr(args, name) for name, default in defaults.items() if getattr(args, name) != default}


def _declared_by_script(kind: type) -> Mapping[str, object]:
    """Return the old names that a script's own classes declare as fields, with their defaults."""
    theirs = _class_of_transformers(kind)
    own = kind.__mro__[: kind.__mro__.index(theirs)] if theirs is not None else ()
    declared = declared_old_names(kind)
    return {name: declared[name] for one in own for name in inspect.get_annotations(one) if name in declared}


def _old_fields_left_alone(args: object) -> Iterator[str]:
    """Yield the old names that an older release has as fields, where they hold its default: they ask for nothing."""
    for one in fields(args):  # type: ignore[arg-type]  # a dataclass of that release
        if one.name in OLD_NAMES and one.default is not MISSING and getattr(args, one.name, None) == one.default:
            yield one.name


def adopt_arguments(args: object) -> TrainingArguments:
    """Let a trainer run on the very object that a script gave: `trainer.args is args`, edits of it count.

    An object of `transformers.TrainingArguments`, or of a subclass, becomes one of ours too: its class is then a
    subclass of its own and of our TrainingArguments. What the script's own subclass adds or overrides stays as it is;
    what would be transformers' own answer (the device, the ranks, the dumps) is ours.

    Raises:
        ArgumentError: An object that is neither, or a value that cannot work; the object is not touched then.
    """
    ours = as_our_arguments(args)
    if ours is args or _class_of_transformers(type(args)) is None:
        return ours
    try:
        object.__setattr__(args, "__class__", _adopted_class(type(args)))  # type: ignore[arg-type]  # classes have a hash
    except TypeError as error:  # slots, or a metaclass of its own
        warn_once(f"The arguments are copied, later edits of them do not count: {error}.")
        return ours
    names = {field.name for field in fields(ours)} | {"mixed_precision"}
    vars(args).update({name: value for name, value in vars(ours).items() if name in names})
    for name in remembered(ours):  # a script has set them on transformers' own object
        vars(args).pop(name, None)
    remember(args, remembered(ours))
    assert isinstance(args, TrainingArguments)  # by its new class
    return args


def _our_class(kind: type) -> type[TrainingArguments]:
    """Return our class that replaces a class of arguments."""
    theirs = _class_of_transformers(kind)
    return TrainingArguments if theirs is None else _OURS[theirs.__name__]


def _class_of_transformers(kind: type) -> type | None:
    """Return the nearest of a class's bases that is transformers' own, and has one of ours beside it; None without."""
    named = (base for base in kind.__mro__ if base.__name__ in _OURS)
    return next((base for base in named if base.__module__.partition(".")[0] == "transformers"), None)


class _Adopted(AcceptOldNames):
    """Metaclass of adopted arguments: `dataclasses.replace` calls the class, and gets an object of the script's."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        plain = {n: value.to_dict() if isinstance(value, AcceleratorConfig) else value for n, value in kwargs.items()}
        return self.__mro__[1](*args, **plain)


@functools.cache
def _adopted_class(kind: type) -> type:
    theirs = _class_of_transformers(kind)
    assert theirs is not None  # every caller has checked
    own = kind.__mro__[: kind.__mro__.index(theirs)]  # the script's classes
    base = _our_class(kind)
    ours = {
        **vars(OldAttributes),
        **vars(ArgumentSetters),
        **vars(ArgumentViews),
        **vars(TrainingArguments),
        **vars(base),
    }
    content = {n: value for n, value in ours.items() if _is_ours(n, value) and not any(n in vars(c) for c in own)}
    # What each field may be: by our table, and by the script's classes for what they declare
    declared = {name for one in own for name in inspect.get_annotations(one)}
    of_script = {name: check for name, check in checks_of(kind, base).items() if name in declared}
    checks = {**checks_of(base, base), **of_script}
    # Properties for the old names that an older release declares: they follow their successors, as ours do
    declared = {name for kind in theirs.__mro__ for name in vars(kind) if name in OLD_NAMES}
    names = (name for name in declared if not hasattr(TrainingArguments, name))
    content.update({name: _old_attribute(name) for name in names if not any(name in vars(kind) for kind in own)})
    content.update(
        _checks=classmethod(lambda cls: checks),
        __reduce_ex__=_reduce,
        __module__=kind.__module__,
        __qualname__=kind.__qualname__,
        __doc__=kind.__doc__,
    )
    return _Adopted(kind.__name__, (kind, base), content)


def _old_attribute(name: str) -> property:
    def write(args: TrainingArguments, value: object) -> None:
        assign_old(args, name, value)

    return property(lambda args: read_attribute(args, name), write)


def _is_ours(name: str, value: object) -> bool:
    """Return whether a name of our class is a method or a property, which transformers' class may have as well."""
    is_code = callable(value) or isinstance(value, (property, functools.cached_property, classmethod))
    return is_code and (name in _DUNDERS or not name.startswith("__"))


def _reduce(args: TrainingArguments, protocol: int) -> tuple[object, ...]:
    """Say how to copy or pickle adopted arguments: their class cannot be found by its name."""
    return _adopted_again, (type(args).__mro__[1], args.__getstate__())


def _adopted_again(kind: type, values: dict[str, object]) -> object:
    """Make a copy of adopted arguments, or read them back."""
    args: object = object.__new__(kind)
    vars(args).update(values)
    object.__setattr__(args, "__class__", _adopted_class(kind))
    return args
