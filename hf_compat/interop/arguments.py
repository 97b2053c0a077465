"""Adopt arguments of `transformers.TrainingArguments` and its subclasses."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, is_dataclass

from hf_compat.errors import ArgumentError, warn_once
from hf_compat.hf.argument_values import AcceleratorConfig, checks_of, default_of
from hf_compat.hf.arguments import AcceptOldNames, Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.hf.arguments_views import ArgumentViews
from hf_compat.hf.fields import TrainingFields
from hf_compat.hf.legacy import (
    OLD_NAMES,
    OldAttributes,
    asked_by_declared,
    assign_old,
    declared_old_names,
    read_attribute,
    remember,
    remembered,
)
from hf_compat.hf.process_place import ProcessPlace
from hf_compat.interop.mirrors import rebuilt_with_base
from hf_compat.runtime.text import shown

# The fields that upstream resolves into objects of Accelerate and DeepSpeed. Ours are made from the fields.
_DERIVED = frozenset({"distributed_state", "deepspeed_plugin", "hf_deepspeed_config", "fsdp_plugin_args", "device"})
_DUNDERS = frozenset({"__getattr__", "__setattr__", "__setstate__", "__str__", "__repr__", "__getstate__"})
# The classes of transformers that have one here, by name.
_OURS = {one.__name__: one for one in (Seq2SeqTrainingArguments, TrainingArguments)}


def as_our_arguments(args: object) -> TrainingArguments:
    """Convert arguments of `transformers` to ours, field by field. Ours are not copied.

    Raises:
        ArgumentError: The object is neither.
    """
    if isinstance(args, TrainingArguments):
        return args
    given: type = type(args)
    theirs = _class_of_transformers(given)
    kind = TrainingArguments if theirs is None else _OURS[theirs.__name__]
    names = [field.name for field in fields(kind)]
    if isinstance(args, type) or not is_dataclass(args) or not hasattr(args, "output_dir"):
        raise ArgumentError(f"`args` is a {type(args).__name__}.\n\nHint: pass `hf_compat.TrainingArguments(…)`.")
    unknown = unknown_arguments(args)
    if unknown:
        warn_once(
            f"{', '.join(f'`{shown(name, value)}`' for name, value in unknown.items())} has no effect: this release of "
            f"hf_compat does not know {'it' if len(unknown) == 1 else 'them'}, the installed transformers is newer."
        )
    old_fields = declared_old_names(given)
    own = given.__mro__[: given.__mro__.index(theirs)] if theirs is not None else ()  # the script's classes
    declared = {name: old_fields[name] for one in own for name in inspect.get_annotations(one) if name in old_fields}
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    defaults = {one.name: default_of(one) for one in fields(theirs or kind)}
    values |= asked_by_declared(args, declared, defaults, checks_of(kind, kind))
    older = {one.name: one.default for one in fields(args) if one.name in OLD_NAMES and one.name not in declared}
    unset = set()
    for name, default in older.items():
        value = getattr(args, name, None)
        if value == default:
            unset.add(name)
        elif OLD_NAMES[name].translate(value).keys() - values.keys():
            values[name] = value  # an older release has the old name alone: other values are checked with it
    ours = kind(**values)
    skipped = {*names, *values, *declared, *_DERIVED, *unset, "compat"}
    for name, value in vars(args).items():  # fields of a subclass or of an older release, and values set by a script
        if name not in skipped and not name.startswith("_"):
            setattr(ours, name, value)
    return ours


def unknown_arguments(args: object) -> dict[str, object]:
    """The arguments of a newer transformers that differ from their defaults, with their values."""
    theirs = _class_of_transformers(type(args))
    if theirs is None:
        return {}
    known = {field.name for field in fields(_OURS[theirs.__name__])} | OLD_NAMES.keys() | _DERIVED
    defaults = {one.name: default_of(one) for one in fields(theirs) if one.name not in known}
    values = {name: getattr(args, name, default) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value != defaults[name]}


def adopt_arguments(args: object) -> TrainingArguments:
    """Make the script's own object one of ours, so that `trainer.args is args` and later edits count.

    The class of the object becomes a subclass of its own class and of our TrainingArguments. Names that the script's
    subclass adds or overrides stay. Transformers' own methods and properties (device, ranks, dumps) become ours.

    Raises:
        ArgumentError: The object is not training arguments, or has a value that cannot work. It is unchanged then.
    """
    ours = as_our_arguments(args)
    if ours is args or _class_of_transformers(type(args)) is None:
        return ours
    try:
        object.__setattr__(args, "__class__", _adopted_class(type(args)))  # type: ignore[arg-type]  # classes have a hash
    except TypeError as error:  # slots, or a metaclass of its own
        warn_once(f"The arguments are copied, later edits of them do not count: {error}.")
        return ours
    names = {field.name for field in fields(ours)} | {"mixed_precision", "output_store"}
    vars(args).update({name: value for name, value in vars(ours).items() if name in names})
    for name in remembered(ours):  # a script has set them on transformers' own object
        vars(args).pop(name, None)
    assert isinstance(args, TrainingArguments)  # by its new class
    remember(args, remembered(ours))
    return args


def _class_of_transformers(kind: type) -> type | None:
    """The nearest base of transformers that has a class of ours, or None."""
    named = (base for base in kind.__mro__ if base.__name__ in _OURS)
    return next((base for base in named if base.__module__.partition(".")[0] == "transformers"), None)


class _Adopted(AcceptOldNames):
    """Metaclass of adopted arguments. `dataclasses.replace` calls the class, and gets an object of the script's."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        plain = {n: value.to_dict() if isinstance(value, AcceleratorConfig) else value for n, value in kwargs.items()}
        return self.__mro__[1](*args, **plain)


@functools.cache
def _adopted_class(kind: type) -> type:
    theirs = _class_of_transformers(kind)
    assert theirs is not None  # every caller has checked
    own = kind.__mro__[: kind.__mro__.index(theirs)]  # the script's classes
    base = _OURS[theirs.__name__]
    of_script = {name for one in own for name in vars(one)}
    content: dict[str, object] = {}  # our methods and properties that the script's classes do not override
    for home in (OldAttributes, ProcessPlace, TrainingFields, ArgumentViews, TrainingArguments, base):
        for name, value in vars(home).items():
            is_code = callable(value) or isinstance(value, (property, functools.cached_property, classmethod))
            is_wanted = is_code and (name in _DUNDERS or not name.startswith("__"))
            if is_wanted and name not in of_script:
                content[name] = value
    # our checks of the fields, or those of the script's classes for fields that they declare
    declared = {name for one in own for name in inspect.get_annotations(one)}
    their_checks = {name: check for name, check in checks_of(kind, base).items() if name in declared}
    checks = {**checks_of(base, base), **their_checks}
    # old names that an older release declares follow their successors, as ours do
    for name in {name for one in theirs.__mro__ for name in vars(one) if name in OLD_NAMES}:
        if not hasattr(TrainingArguments, name) and name not in of_script:
            content[name] = property(
                functools.partial(read_attribute, name=name), functools.partial(assign_old, name=name)
            )
    content.update(
        _checks=classmethod(lambda cls: checks),
        __reduce_ex__=lambda args, _: (rebuilt_with_base, (_adopted_class, type(args).__mro__[1], args.__getstate__())),
        __module__=kind.__module__,
        __qualname__=kind.__qualname__,
        __doc__=kind.__doc__,
    )
    return _Adopted(kind.__name__, (kind, base), content)
