"""What an expression is, as far as its source says: a trainer, training arguments, a callback, or their class.

Knows names of transformers and of this package. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import libcst as cst
from libcst.metadata import BaseAssignment

from hf_compat.tools.migration.names import bound_by_star
from hf_compat.tools.migration.source import Source, binding_node, dotted, import_statement


class Thing(StrEnum):
    """What an expression may be."""

    TRAINER_CLASS = "class of trainers"
    ARGUMENTS_CLASS = "class of training arguments"
    CALLBACK_CLASS = "class of callbacks"
    PARSER_CLASS = "HfArgumentParser"
    ADAMW = "transformers' AdamW"
    TRAINER = "trainer"
    ARGUMENTS = "training arguments"
    CALLBACK = "callback"
    PARSER = "parser"


_CLASSES = {
    "Trainer": Thing.TRAINER_CLASS,
    "Seq2SeqTrainer": Thing.TRAINER_CLASS,
    "TrainingArguments": Thing.ARGUMENTS_CLASS,
    "Seq2SeqTrainingArguments": Thing.ARGUMENTS_CLASS,
    "TrainerCallback": Thing.CALLBACK_CLASS,
    "DefaultFlowCallback": Thing.CALLBACK_CLASS,
    "EarlyStoppingCallback": Thing.CALLBACK_CLASS,
    "PrinterCallback": Thing.CALLBACK_CLASS,
    "ProgressCallback": Thing.CALLBACK_CLASS,
    "TensorBoardCallback": Thing.CALLBACK_CLASS,
    "WandbCallback": Thing.CALLBACK_CLASS,
    "HfArgumentParser": Thing.PARSER_CLASS,
    "AdamW": Thing.ADAMW,
}
_INSTANCES = {
    Thing.TRAINER_CLASS: Thing.TRAINER,
    Thing.ARGUMENTS_CLASS: Thing.ARGUMENTS,
    Thing.CALLBACK_CLASS: Thing.CALLBACK,
    Thing.PARSER_CLASS: Thing.PARSER,
}
_LONGEST_CHAIN = 50
_COPIES = ("dataclasses.replace", "copy.copy", "copy.deepcopy")
_WRAPPERS = ("Optional", "Union", "Annotated", "Final", "ClassVar")


@dataclass(frozen=True, slots=True)
class _Annotated:
    """A declaration without a value: `args: TrainingArguments`."""

    annotation: cst.BaseExpression


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the values that are unpacked."""

    whole: cst.BaseExpression
    index: int


_Value: TypeAlias = cst.BaseExpression | _Annotated | _Part


class Things:
    """Says what the expressions of one source are."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._values = dict(_bound_values(source))
        self._asked: set[cst.CSTNode] = set()
        # What nothing binds by its name, and a star import of transformers does
        stars = (one for one in source.of(cst.ImportFrom) if isinstance(one.names, cst.ImportStar) and not one.relative)
        self._of_stars = frozenset(name for one in stars for name in bound_by_star(dotted(one.module)))
        self.local_classes = {
            node: thing for node in source.of(cst.ClassDef) if (thing := self.of_class(node)) is not None
        }

    def of_class(self, node: cst.ClassDef) -> Thing | None:
        """Return what a class makes, by its bases."""
        found = (self.of(base.value) for base in node.bases if base.keyword is None)
        return next((thing for thing in found if thing in _INSTANCES), None)

    def of(self, node: cst.BaseExpression) -> Thing | None:
        """Return what an expression is; None where the source does not say so for certain."""
        # Bound by itself, `args = args or …`, or at the end of a chain of names that nobody writes by hand
        if node in self._asked or len(self._asked) > _LONGEST_CHAIN:
            return None
        self._asked.add(node)
        try:
            return self._of(node)
        finally:
            self._asked.discard(node)

    def _of_name(self, node: cst.Name) -> Thing | None:
        bindings = self._source.assignments(node)
        if not bindings and node.value in self._of_stars:
            return thing_of_import(f"transformers.{node.value}")
        found = {self._of_assignment(one) for one in bindings if not self._is_passed(one)}
        return found.pop() if len(found) == 1 else None

    def _of(self, node: cst.BaseExpression) -> Thing | None:
        if isinstance(node, (cst.Name, cst.Attribute)) and (name := self._source.imported(node)) is not None:
            return thing_of_import(name)
        if isinstance(node, cst.Name):
            return self._of_name(node)
        if isinstance(node, cst.Attribute):
            return Thing.ARGUMENTS if node.attr.value == "args" and self.of(node.value) is Thing.TRAINER else None
        if isinstance(node, cst.Call):
            name = self._source.imported(node.func)
            if name in _COPIES and node.args:
                return self.of(node.args[0].value)
            if name == "functools.partial" and node.args:
                return self.of(node.args[0].value)
            called = self.of(node.func)
            return self._returned_by(node.func) if called is None else _INSTANCES.get(called)
        if isinstance(node, cst.NamedExpr):
            return self.of(node.value)
        if isinstance(node, cst.Subscript):
            # The part of what a parser gives: `parser.parse_args_into_dataclasses()[0]`
            parts = self._parsed(node.value)
            index = node.slice[0].slice
            if parts is None or not isinstance(index, cst.Index) or not isinstance(index.value, cst.Integer):
                return None
            place = int(index.value.value)
            return parts[place] if place < len(parts) else None
        return None

    def _is_passed(self, assignment: BaseAssignment) -> bool:
        """Return whether a name is bound to None or `object`, where an import has failed, say, or to itself changed."""
        value = self._value(assignment)
        if isinstance(value, cst.BaseExpression) and value in self._asked:
            return True
        return isinstance(value, cst.Name) and value.value in ("None", "object")

    def _of_assignment(self, assignment: BaseAssignment) -> Thing | None:
        node = binding_node(assignment)
        if import_statement(assignment) is not None:
            names = (one.name for one in assignment.get_qualified_names_for(assignment.name))
            return next((thing_of_import(name) for name in names), None)
        if isinstance(node, cst.ClassDef):
            return self.of_class(node)
        if isinstance(node, cst.Param):
            if node.annotation is not None:
                return self._of_annotation(node.annotation.annotation)
            method = self.method_of(node)
            if method is None:
                return None
            owner, place = method
            if place == 0:
                return _INSTANCES.get(owner)
            function = next(one for one in self._source.above(node) if isinstance(one, cst.FunctionDef))
            is_event = owner is Thing.CALLBACK_CLASS and function.name.value.startswith("on_")
            return Thing.ARGUMENTS if is_event and place == 1 else None
        value = self._value(assignment)
        if isinstance(value, _Annotated):
            return self._of_annotation(value.annotation)
        if isinstance(value, _Part):
            parts = self._parsed(value.whole)
            return parts[value.index] if parts is not None and value.index < len(parts) else None
        return None if value is None else self.of(value)

    def is_something_else(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is certainly none of these: a namespace of argparse, a class of the script's."""
        if not isinstance(node, cst.Name) or self.of(node) is not None:
            return False
        values = [self._value(one) for one in self._source.assignments(node)]
        return any(self._is_of_others(value) for value in values)

    def _is_of_others(self, value: _Value | None) -> bool:
        if isinstance(value, _Part):
            return self._parsed(value.whole) is not None or self._is_of_others(value.whole)
        if not isinstance(value, cst.Call):
            return False
        if isinstance(value.func, cst.Attribute):
            return value.func.attr.value in ("parse_args", "parse_known_args")
        nodes = (
            [binding_node(one) for one in self._source.assignments(value.func)]
            if isinstance(value.func, cst.Name)
            else []
        )
        return any(isinstance(one, cst.ClassDef) and one not in self.local_classes for one in nodes)

    def _returned_by(self, func: cst.BaseExpression) -> Thing | None:
        """Return what a function of this source gives, by its annotation or by all that it returns."""
        functions = [one for one in self._source.bound_nodes(func) if isinstance(one, cst.FunctionDef)]
        if len(functions) != 1 or functions[0].asynchronous is not None:
            return None
        if functions[0].returns is not None:
            return self._of_annotation(functions[0].returns.annotation)
        found = {self.of(one.value) for one in own_returns(functions[0].body) if one.value is not None}
        return found.pop() if len(found) == 1 else None

    def _parsed(self, node: cst.BaseExpression) -> list[Thing | None] | None:
        """Return what a call of HfArgumentParser's methods gives, part by part."""
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return None
        if not node.func.attr.value.startswith("parse_"):
            return None
        made = self._made_by(node.func.value)
        if made is None or self.of(made.func) is not Thing.PARSER_CLASS or not made.args:
            return None
        given = made.args[0].value
        classes = [e.value for e in given.elements] if isinstance(given, (cst.Tuple, cst.List)) else [given]
        things = [self.of(one) for one in classes]
        return [None if thing is None else _INSTANCES.get(thing) for thing in things]

    def _made_by(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return the call that has made what a name holds."""
        if isinstance(node, cst.Call):
            return node
        if not isinstance(node, cst.Name):
            return None
        values = [self._value(one) for one in self._source.assignments(node)]
        (value,) = values if len(values) == 1 else (None,)
        return value if isinstance(value, cst.Call) else None

    def _value(self, assignment: BaseAssignment) -> _Value | None:
        """Return the expression whose value a name is bound to."""
        node = binding_node(assignment)
        return None if node is None else self._values.get(node)

    def method_of(self, node: cst.Param) -> tuple[Thing, int] | None:
        """Return, for a parameter of a method, what its class makes and the parameter's place."""
        function = next((one for one in self._source.above(node) if isinstance(one, cst.FunctionDef)), None)
        if function is None or node not in function.params.params or is_static(function):
            return None
        block = self._source.parent(function)
        owner = None if block is None else self._source.parent(block)
        thing = self.of_class(owner) if isinstance(owner, cst.ClassDef) else None
        return None if thing is None else (thing, list(function.params.params).index(node))

    def _of_annotation(self, node: cst.BaseExpression) -> Thing | None:
        """Return what is annotated so: `TrainingArguments`, the name in quotes, with `| None`, `Optional[…]`."""
        found = {thing for one in _annotated(node) if (thing := self._class_named(one)) is not None}
        return _INSTANCES.get(found.pop()) if len(found) == 1 else None

    def _class_named(self, node: cst.BaseExpression) -> Thing | None:
        if not isinstance(node, cst.SimpleString):
            return self.of(node)
        text = node.evaluated_value
        scope = self._source.scope(node)
        if scope is None or not isinstance(text, str):
            return None
        things = {thing_of_import(one.name) for one in scope.get_qualified_names_for(text.rpartition(".")[2])}
        return things.pop() if len(things) == 1 else None


def instance_of(thing: Thing | None) -> Thing | None:
    """Return what a class makes."""
    return None if thing is None else _INSTANCES.get(thing)


def thing_of_import(name: str) -> Thing | None:
    """Return what an imported name of transformers, or of this package, is."""
    package, *inner, last = name.split(".") if "." in name else (name, name)
    if package not in ("transformers", "hf_compat") or any(not part.islower() for part in inner):
        return None
    if last == "AdamW" and package == "hf_compat":
        return None
    return _CLASSES.get(last)


def own_returns(node: cst.CSTNode) -> Iterator[cst.Return]:
    """Yield the return statements of a body, without those of functions in it."""
    for child in node.children:
        if isinstance(child, cst.Return):
            yield child
        elif not isinstance(child, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            yield from own_returns(child)


def is_static(function: cst.FunctionDef) -> bool:
    """Return whether a method has no `self`."""
    return any(
        isinstance(one.decorator, cst.Name) and one.decorator.value == "staticmethod" for one in function.decorators
    )


def _annotated(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation):
        yield from _annotated(node.left)
        yield from _annotated(node.right)
    elif isinstance(node, cst.Subscript) and isinstance(node.value, (cst.Name, cst.Attribute)):
        name = node.value.value if isinstance(node.value, cst.Name) else node.value.attr.value
        for element in node.slice if name in _WRAPPERS else ():
            if isinstance(element.slice, cst.Index):
                yield from _annotated(element.slice.value)
    else:
        yield node


def _bound_values(source: Source) -> Iterator[tuple[cst.CSTNode, _Value]]:
    """Yield each name that a statement or a walrus binds, with what it is bound to."""
    for node in source.nodes:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                yield from _unpacked(target.target, node.value)
        elif isinstance(node, cst.AnnAssign):
            yield node.target, _Annotated(node.annotation.annotation) if node.value is None else node.value
        elif isinstance(node, cst.NamedExpr):
            yield node.target, node.value


def _unpacked(target: cst.BaseExpression, value: cst.BaseExpression) -> Iterator[tuple[cst.CSTNode, _Value]]:
    if not isinstance(target, (cst.Tuple, cst.List)):
        yield target, value
        return
    for index, element in enumerate(target.elements):
        if isinstance(element, cst.StarredElement):  # what follows has no certain place
            return
        if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements):
            yield from _unpacked(element.value, value.elements[index].value)
        else:
            yield element.value, _Part(value, index)
