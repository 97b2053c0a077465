"""Find constant arguments that `TrainingArguments` refuses. Its own checks decide, and no arguments are made."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import libcst as cst

from hf_compat.errors import HfCompatError
from hf_compat.hf.argument_values import ACCELERATOR_CONFIG, FILE_OR_NONE, checks_of
from hf_compat.hf.arguments import Seq2SeqTrainingArguments, further_problems
from hf_compat.hf.legacy import OLD_NAMES, translate_legacy
from hf_compat.hf.rows import ROWS
from hf_compat.tools.migration.calls import ancestries, display_of, entries_of, lineage_of
from hf_compat.tools.migration.expression_types import ExpressionTypes, Thing
from hf_compat.tools.migration.old_arguments import Constant, read_constant
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import Source, dotted, fields_of, is_super_call, keyword, methods_of

_CHECKS = checks_of(Seq2SeqTrainingArguments, Seq2SeqTrainingArguments)
_PLACES = tuple(one.name for one in fields(Seq2SeqTrainingArguments) if one.init)
# Their text may name a file, which lies where the script runs
_READ_FILES = {name for name, row in ROWS.items() if row.kind in (ACCELERATOR_CONFIG, FILE_OR_NONE)}
# What depends on the machine
_OF_MACHINE = frozenset({"device"})


class _Expression:
    """Any other value than a constant, in messages."""

    def __repr__(self) -> str:
        return "…"


@dataclass(slots=True)
class _Written:
    """What the source says of the arguments of one call."""

    constants: dict[str, tuple[object, cst.CSTNode]] = field(default_factory=dict)  # values, and where they stand
    unknown: set[str] = field(default_factory=set)
    is_whole: bool = True  # whether no other argument can be given

    def note(self, name: str, constant: Constant | None, node: cst.CSTNode) -> None:
        is_text = constant is not None and isinstance(constant.value, str)
        if constant is None or (is_text and name in _READ_FILES and "{" not in str(constant.value)):
            self.unknown.add(name)
        else:
            self.constants[name] = constant.value, node


def list_refused(source: Source, things: ExpressionTypes) -> None:
    """List the constants in calls that make arguments, and that are refused alone or together."""
    calls = (one for one in source.of(cst.Call) if things.made_by(one) is Thing.ARGUMENTS)
    with warnings.catch_warnings(action="ignore"):  # of arguments that are accepted
        for call in calls if source.target is Target.HF_COMPAT else ():
            _check_call(source, call)


def _check_call(source: Source, call: cst.Call) -> None:
    lineage = list(lineage_of(call.func, source))
    function = source.bound(call.func, cst.FunctionDef)
    makers = [method for one in lineage for method in methods_of(one) if method.name.value == "__init__"]
    takers = makers if function is None else [*makers, function]
    is_copy = source.imported(call.func).partition(".")[0] in ("functools", "dataclasses", "copy")
    written = _read_call(source, call)
    of_other_files = list(ancestries(call.func, source))
    written.is_whole &= not (takers or of_other_files or is_copy or is_super_call(call, "__init__"))
    # What a class or function of the source, or a class of another file, declares has the meaning that it gives it
    own = {one.name.value for taker in takers for one in (*taker.params.params, *taker.params.kwonly_params)}
    own = own.union(*(one.own_parameters | one.own_fields for one in of_other_files))
    for name, constant, node in (one for kind in lineage for one in _defaults(kind, source)):
        own.add(name)
        if name not in written.constants and name not in written.unknown:
            written.note(name, constant, node)
    is_closed = written.is_whole and not any(len(one.bases) > 1 for one in lineage)
    for name in written.unknown.difference(own, _CHECKS, OLD_NAMES) if is_closed else ():
        _try(source, call, name, functools.partial(_read, name, _Expression()))
    given: dict[str, object] = {}
    for name, (value, node) in written.constants.items():
        if name in own:
            with contextlib.suppress(HfCompatError):
                if name in _CHECKS:
                    given[name] = _read(name, value)
            written.unknown |= {name} - given.keys()
        elif name in _CHECKS or name in OLD_NAMES:
            if _try(source, node, name, functools.partial(_read, name, value)):
                given[name] = value
        elif is_closed:
            _try(source, node, name, functools.partial(_read, name, value))
    _check_together(source, call, given, written)


def _check_together(source: Source, call: cst.Call, given: dict[str, object], written: _Written) -> None:
    """Check the rules over several arguments, as far as they read known values."""
    current: dict[str, object] = {}

    def translate() -> None:
        current.update(translate_legacy(given, _CHECKS, _CHECKS)[0])

    name = source.code(call.func)
    if not _try(source, call, name, translate):
        return
    unknown = written.unknown & _CHECKS.keys() | _OF_MACHINE
    if not written.is_whole or any(one in OLD_NAMES for one in written.unknown):
        unknown |= _CHECKS.keys() - current.keys()
    if "logging_steps" in unknown and "eval_steps" not in current:
        unknown |= {"eval_steps"}  # the same number by default
    for problem in further_problems(current, unknown):
        source.list(call, name, _flat(problem), Effect.FAILS)


def _read_call(source: Source, call: cst.Call) -> _Written:
    written = _Written()
    for place, argument in enumerate(call.args):
        if argument.star:
            display = display_of(argument, source) if argument.star == "**" else None
            count = 0
            for item in {} if display is None else entries_of(display).values():
                count += 1
                written.note(item.name, constant_of(item.value, source), item.value)
            parts = () if display is None else display.args if isinstance(display, cst.Call) else display.elements
            written.is_whole &= display is not None and count == len(parts)
        elif argument.keyword is not None:
            written.note(keyword(argument), constant_of(argument.value, source), argument)
        elif place == 0:  # earlier releases had other arguments at the places after it
            written.note(_PLACES[0], constant_of(argument.value, source), argument)
        else:
            written.is_whole = False
    return written


def _defaults(node: cst.ClassDef, source: Source) -> Iterator[tuple[str, Constant | None, cst.CSTNode]]:
    """Yield the fields of a class with their defaults."""
    for declared, name in fields_of(node):
        value = declared.value
        if isinstance(value, cst.Call) and dotted(value.func).rpartition(".")[2] == "field":
            value = next((one.value for one in value.args if keyword(one) == "default"), None)
        yield name.value, None if value is None else constant_of(value, source), declared


def constant_of(node: cst.BaseExpression, source: Source) -> Constant | None:
    """The value of a literal, or of a name that one statement binds to a literal."""
    found = read_constant(node)
    bindings = source.assignments(node) if found is None else ()
    if len(bindings) != 1:
        return found
    statement = source.parent(getattr(bindings[0], "node", None))
    statement = source.parent(statement) if isinstance(statement, cst.AssignTarget) else statement
    return read_constant(statement.value) if isinstance(statement, (cst.Assign, cst.AnnAssign)) else None


def _read(name: str, value: object) -> object:
    """Read a value as the constructor does.

    Raises:
        HfCompatError: It is refused, or no release has had the name.
    """
    return _CHECKS[name].read(value) if name in _CHECKS else translate_legacy({name: value}, _CHECKS, _CHECKS)


def _try(source: Source, node: cst.CSTNode, what: str, check: Callable[[], object]) -> bool:
    """Run a check, and list what it refuses."""
    try:
        check()
    except HfCompatError as error:
        source.list(node, what, _flat(str(error)), Effect.FAILS)
        return False
    return True


def _flat(message: str) -> str:
    return " ".join(message.split())
