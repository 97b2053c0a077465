"""`Row` is the only place of an argument: no other table or list of the package names three or more of them."""

from __future__ import annotations

import ast
from dataclasses import fields

import hf_compat
from hf_compat.hf.rows import OWN_ARGUMENTS
from house import counts

ARGUMENTS = {field.name for field in fields(hf_compat.Seq2SeqTrainingArguments)} | OWN_ARGUMENTS.keys()
# Tables that may name arguments, and why.
EXEMPT = {
    "hf/fields.py": "the rows, and a class attribute of upstream",
    "hf/arguments_rules.py": "the defaults of transformers 4.x that differ",
    "plan/deepspeed.py": "DeepSpeed's keys, some of which have such a name",
    "tools/migration/old_arguments.py": "what names and values of earlier releases become",
}


def named_arguments(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """The collections of a module that name three or more arguments, by line.

    A dict within a function gives values to arguments, as the keywords of a call do. So it is left out.
    """
    within = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            case ast.Dict(keys=keys) if node not in within:
                texts = [key.value for key in keys if isinstance(key, ast.Constant)]
            case ast.Constant(value=str(text)) if ARGUMENTS.issuperset(text.split()):
                texts = text.split()
            case _:
                continue
        named = [text for text in texts if isinstance(text, str) and text in ARGUMENTS]
        if len(named) >= 3:
            found.append((node.lineno, named))
    return found


def test_a_list_of_arguments_is_a_column_of_their_rows():
    package = counts.ROOT / "hf_compat"
    found = {
        f"{file.relative_to(package)}:{line}: {', '.join(named)}"
        for file in sorted(package.rglob("*.py"))
        if str(file.relative_to(package)) not in EXEMPT
        for line, named in named_arguments(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert not found, "add a column to `Row` in hf/rows.py, or ask `without_effect` for them"


def test_an_exempt_file_has_such_a_table():
    package = counts.ROOT / "hf_compat"
    assert [name for name in EXEMPT if not named_arguments(ast.parse((package / name).read_text("utf-8")))] == []


def test_each_form_of_a_list_is_found():
    forms = {
        "a tuple": 'X = ("seed", "optim", "bf16")',
        "a list within": 'def f(args):\n    return [args[one] for one in ["seed", "optim", "bf16"]]',
        "a set": 'X = frozenset({"seed", "optim", "bf16", "no argument"})',
        "keys": 'X = {"seed": 1, "optim": 2, "bf16": 3}',
        "words": 'X = "seed optim bf16".split()',
    }
    assert [name for name, source in forms.items() if not named_arguments(ast.parse(source))] == []
    others = ['X = ("seed", "optim")', 'def f():\n    return {"seed": 1, "optim": 2, "bf16": 3}', "X = 'a seed, optim'"]
    assert [source for source in others if named_arguments(ast.parse(source))] == []
