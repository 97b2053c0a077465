"""Find out what an expression is, as far as its source says: a trainer, arguments, a callback, or their class."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import libcst as cst
from libcst.metadata import BaseAssignment

from hf_compat.tools.migration.names import bound_by_star
from hf_compat.tools.migration.source import Source, binding_node, dotted, import_statement, is_super_call


class Thing(StrEnum):
    """The kinds of expressions that the rules know."""

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
    **{f"{name}Callback": Thing.CALLBACK_CLASS for name in ("Trainer", "DefaultFlow", "EarlyStopping", "Printer")},
    **{f"{name}Callback": Thing.CALLBACK_CLASS for name in ("Progress", "TensorBoard", "Wandb")},
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


class _Annotated(NamedTuple):
    """A declaration without a value: `args: TrainingArguments`."""

    annotation: cst.BaseExpression


class _Part(NamedTuple):
    whole: cst.BaseExpression
    place: int


_Value: TypeAlias = cst.BaseExpression | _Annotated | _Part


class ExpressionTypes:
    """Tells what the expressions of one source are."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # Each name that a statement or a walrus binds, with its value
        self._values: dict[cst.CSTNode, _Value] = {}
        for node in source.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._values.update(_unpacked(target.target, node.value))
            elif isinstance(node, cst.AnnAssign):
                annotation = node.annotation.annotation
                self._values[node.target] = _Annotated(annotation) if node.value is None else node.value
            elif isinstance(node, cst.NamedExpr):
                self._values[node.target] = node.value
        self._asked: set[cst.CSTNode] = set()
        # Names that only a star import of transformers binds
        stars = (one for one in source.of(cst.ImportFrom) if isinstance(one.names, cst.ImportStar) and not one.relative)
        self._of_stars = frozenset(name for one in stars for name in bound_by_star(dotted(one.module)))
        self.local_classes = {
            node: thing for node in source.of(cst.ClassDef) if (thing := self.of_class(node)) is not None
        }

    def of_class(self, node: cst.ClassDef) -> Thing | None:
        found = (self.of(base.value) for base in node.bases if base.keyword is None)
        return next((thing for thing in found if thing in _INSTANCES), None)

    def of(self, node: cst.BaseExpression) -> Thing | None:
        """The kind of an expression. None if the source does not say it for certain."""
        # Bound by itself, `args = args or …`, or at the end of a longer chain of names than anyone writes
        if node in self._asked or len(self._asked) > _LONGEST_CHAIN:
            return None
        self._asked.add(node)
        try:
            return self._of(node)
        finally:
            self._asked.discard(node)

    def _of(self, node: cst.BaseExpression) -> Thing | None:
        if isinstance(node, (cst.Name, cst.Attribute)) and (name := self._source.imported(node)):
            return self._of_import(name)
        if isinstance(node, cst.Name):
            bindings = self._source.assignments(node)
            if not bindings and node.value in self._of_stars:
                return thing_of_import(f"transformers.{node.value}")
            # A name bound to None or `object`, say after a failed import, or to itself changed, says nothing
            values = {one: self._value(one) for one in bindings}
            none = {one for one in values.values() if isinstance(one, cst.Name) and one.value in ("None", "object")}
            found = {self._of_assignment(one) for one, value in values.items() if value not in self._asked | none}
            return found.pop() if len(found) == 1 else None
        if isinstance(node, cst.Attribute):
            return Thing.ARGUMENTS if node.attr.value == "args" and self.of(node.value) is Thing.TRAINER else None
        if isinstance(node, cst.Call):
            if self._source.imported(node.func) in (*_COPIES, "functools.partial") and node.args:
                return self.of(node.args[0].value)
            called = self.of(node.func)
            return self._returned_by(node.func) if called is None else _INSTANCES.get(called)
        if isinstance(node, cst.NamedExpr):
            return self.of(node.value)
        if isinstance(node, cst.Subscript):
            # A part of a parser's results: `parser.parse_args_into_dataclasses()[0]`
            parts, index = self._parsed(node.value) or [], node.slice[0].slice
            place = index.value if isinstance(index, cst.Index) else None
            return dict(enumerate(parts)).get(int(place.value)) if isinstance(place, cst.Integer) else None
        return None

    def _of_import(self, name: str) -> Thing | None:
        """The kind of an imported name: transformers', or a class of another file that leads to one."""
        ancestry = self._source.graph.ancestry(name)
        return thing_of_import(name if ancestry is None else ancestry.name)

    def _of_assignment(self, assignment: BaseAssignment) -> Thing | None:
        node = binding_node(assignment)
        if import_statement(assignment) is not None:
            names = (one.name for one in assignment.get_qualified_names_for(assignment.name))
            return next((self._of_import(name) for name in names), None)
        if isinstance(node, cst.ClassDef):
            return self.of_class(node)
        value = None if node is None else self._values.get(node)
        if isinstance(node, cst.Param) and node.annotation is not None:
            value = _Annotated(node.annotation.annotation)
        if isinstance(value, _Annotated):
            return self._of_annotation(value.annotation)
        if isinstance(value, _Part):
            return dict(enumerate(self._parsed(value.whole) or [])).get(value.place)
        if not isinstance(node, cst.Param):
            return None if value is None else self.of(value)
        # A parameter without annotation has its place in a method
        function = next((one for one in self._source.above(node) if isinstance(one, cst.FunctionDef)), None)
        if function is None or node not in function.params.params or is_static(function):
            return None
        owner = self._source.parent(self._source.parent(function))
        thing = self.of_class(owner) if isinstance(owner, cst.ClassDef) else None
        place = list(function.params.params).index(node)
        is_event = thing is Thing.CALLBACK_CLASS and function.name.value.startswith("on_")
        return instance_of(thing) if place == 0 else Thing.ARGUMENTS if is_event and place == 1 else None

    def made_by(self, call: cst.Call) -> Thing | None:
        """The kind of a call's result. For `super().__init__(…)` in a class it is the kind of its instances."""
        if self._source.imported(call.func) == "functools.partial" and call.args:
            return instance_of(self.of(call.args[0].value))
        function = self._source.bound(call.func, cst.FunctionDef)
        if function is not None:
            # A function that gives its `**keywords` to a class of training arguments makes some
            bindings = self._source.bindings_of(function.params.star_kwarg)
            for argument in (self._source.parent(read) for one in bindings for read in self._source.reads(one)):
                outer = (
                    self._source.parent(argument) if isinstance(argument, cst.Arg) and argument.star == "**" else None
                )
                if isinstance(outer, cst.Call) and self.of(outer.func) is Thing.ARGUMENTS_CLASS:
                    return Thing.ARGUMENTS
            return None
        made = self.of(call)
        if made is None and is_super_call(call, "__init__"):
            owner = next((one for one in self._source.above(call) if isinstance(one, cst.ClassDef)), None)
            return None if owner is None else instance_of(self.local_classes.get(owner))
        return made

    def is_something_else(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is certainly of no known kind: argparse's namespace, or a class of the script."""
        if not isinstance(node, cst.Name) or self.of(node) is not None:
            return False
        return any(self._is_of_others(self._value(one)) for one in self._source.assignments(node))

    def _is_of_others(self, value: _Value | None) -> bool:
        if isinstance(value, _Part):
            return self._parsed(value.whole) is not None or self._is_of_others(value.whole)
        if not isinstance(value, cst.Call):
            return False
        if isinstance(value.func, cst.Attribute):
            return value.func.attr.value in ("parse_args", "parse_known_args")
        nodes = map(binding_node, self._source.assignments(value.func))
        return any(isinstance(one, cst.ClassDef) and one not in self.local_classes for one in nodes)

    def _returned_by(self, func: cst.BaseExpression) -> Thing | None:
        """The kind of a function's result, by its annotation or by all that it returns."""
        nodes = map(binding_node, self._source.assignments(func))
        functions = [one for one in nodes if isinstance(one, cst.FunctionDef)]
        if len(functions) != 1 or functions[0].asynchronous is not None:
            return None
        if functions[0].returns is not None:
            return self._of_annotation(functions[0].returns.annotation)
        found = {self.of(one.value) for one in own_returns(functions[0].body) if one.value is not None}
        return found.pop() if len(found) == 1 else None

    def _parsed(self, node: cst.BaseExpression) -> list[Thing | None] | None:
        """The kinds of the results of a method of HfArgumentParser."""
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return None
        made: _Value | None = node.func.value
        if isinstance(made, cst.Name):
            bindings = self._source.assignments(made)
            made = self._value(bindings[0]) if len(bindings) == 1 else None
        if not node.func.attr.value.startswith("parse_") or not isinstance(made, cst.Call) or not made.args:
            return None
        if self.of(made.func) is not Thing.PARSER_CLASS:
            return None
        return [instance_of(self.of(one)) for one in elements_of(made.args[0].value)]

    def _value(self, assignment: BaseAssignment) -> _Value | None:
        node = binding_node(assignment)
        return None if node is None else self._values.get(node)

    def _of_annotation(self, node: cst.BaseExpression) -> Thing | None:
        """The kind of an annotated value: `TrainingArguments`, in quotes, with `| None`, `Optional[…]`."""
        found: set[Thing] = set()
        for one in _annotated(node):
            thing = self.of(one)
            scope = self._source.scope(one)
            text = one.evaluated_value if isinstance(one, cst.SimpleString) else None
            if scope is not None and isinstance(text, str):
                names = scope.get_qualified_names_for(text.rpartition(".")[2])
                things = {thing_of_import(name.name) for name in names}
                thing = things.pop() if len(things) == 1 else None
            found |= set() if thing is None else {thing}
        return _INSTANCES.get(found.pop()) if len(found) == 1 else None


def instance_of(thing: Thing | None) -> Thing | None:
    """The kind of a class's instances."""
    return None if thing is None else _INSTANCES.get(thing)


def thing_of_import(name: str) -> Thing | None:
    """The kind of an imported name of transformers or of this package."""
    package, *inner, last = name.split(".") if "." in name else (name, name)
    if package not in ("transformers", "hf_compat") or any(not part.islower() for part in inner):
        return None
    return None if last == "AdamW" and package == "hf_compat" else _CLASSES.get(last)


def elements_of(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """List the elements of a tuple or list display, or the expression alone."""
    return [one.value for one in node.elements] if isinstance(node, (cst.Tuple, cst.List)) else [node]


def own_returns(node: cst.CSTNode) -> Iterator[cst.Return]:
    """Yield the return statements of a body, without those of functions in it."""
    for child in node.children:
        if isinstance(child, cst.Return):
            yield child
        elif not isinstance(child, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            yield from own_returns(child)


def is_static(function: cst.FunctionDef) -> bool:
    """Whether a method has no `self`."""
    return any(dotted(one.decorator) == "staticmethod" for one in function.decorators)


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


def _unpacked(target: cst.BaseExpression, value: cst.BaseExpression) -> Iterator[tuple[cst.CSTNode, _Value]]:
    if not isinstance(target, (cst.Tuple, cst.List)):
        yield target, value
        return
    for index, element in enumerate(target.elements):
        if isinstance(element, cst.StarredElement):  # the position of the following elements is unknown
            return
        if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements):
            yield from _unpacked(element.value, value.elements[index].value)
        else:
            yield element.value, _Part(value, index)
