"""Rewrite imports of transformers: names of this package come from it, moved names from their current module.

`libcst.codemod`'s visitors for imports know only the top of a module, so `import_blocks.py` places them.
"""

from __future__ import annotations

import builtins
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import libcst as cst
from libcst.metadata import ImportAssignment

from hf_compat.interop.former_names import MOVED, MOVED_MODULES, RENAMED, is_restored
from hf_compat.tools.migration.elements import EQUAL, Edit, edit_call
from hf_compat.tools.migration.expression_types import elements_of
from hf_compat.tools.migration.import_blocks import (
    FromImport,
    ImportBlocks,
    Imported,
    bound_name,
    sorted_as,
)
from hf_compat.tools.migration.installed_names import InstalledNames, installed_names
from hf_compat.tools.migration.names import (
    ADAMW_DIFFERS,
    MIRRORS,
    PUBLIC,
    bound_by_star,
    find,
    home,
    looked_up_in,
    moved_path,
    renamed,
)
from hf_compat.tools.migration.old_arguments import read_constant
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.tools.migration.source import (
    Source,
    binding_node,
    dotted,
    import_statement,
    keyword,
    name_or_dotted,
    walk,
)

_OURS = ("transformers", "hf_compat")
# Functions that do nothing today. Their calls have no result.
_WITHOUT_EFFECT = ("send_example_telemetry",)
# Modules that both packages have. `import … as` of ours also gives transformers' own names.
_MIRRORED = tuple(f"transformers.{name}" for name in MIRRORS if name != "trainer_seq2seq")
_FALSE_AT_RUN_TIME = ("typing.TYPE_CHECKING", "typing_extensions.TYPE_CHECKING")
_OF_IMPORTS = ("ImportError", "ModuleNotFoundError", "AttributeError")
# Packages beside transformers whose installed names are looked up, and known replacements.
NEIGHBOURS = ("accelerate", "datasets", "evaluate", "numpy", "peft", "trl")
_WAYS_OUT = {
    **{f"numpy.{one}": f"`{one}` is what it was" for one in ("complex", "float", "int", "object", "str")},
    "numpy.float_": "`numpy.float64`",
    "numpy.Inf": "`numpy.inf`",
    "numpy.NaN": "`numpy.nan`",
    "numpy.NAN": "`numpy.nan`",
    "numpy.product": "`numpy.prod`",
    "datasets.load_metric": "`evaluate.load` of the package evaluate has taken its place",
    "peft.prepare_model_for_int8_training": "`prepare_model_for_kbit_training` has taken its place",
    "trl.DataCollatorForCompletionOnlyLM": "`SFTConfig(completion_only_loss=True)`, or `assistant_only_loss=True` for "
    "conversations, has taken its place",
    "trl.ConstantLengthDataset": "`SFTConfig(packing=True)` has taken its place",
    "trl.get_kbit_device_map": '`device_map={"": PartialState().local_process_index}` is what it gave on a GPU',
}
# What has taken the place of keywords that the installed release refuses.
_KEYWORDS_TODAY = {
    **{
        f"accelerate.Accelerator.{one}": f"`dataloader_config=DataLoaderConfiguration({one}=…)`"
        for one in ("dispatch_batches", "even_batches", "use_seedable_sampler")
    },
    "accelerate.Accelerator.fp16": '`mixed_precision="fp16"`',
    "accelerate.Accelerator.logging_dir": "`project_dir`",
    "trl.SFTTrainer.dataset_text_field": "`SFTConfig` has it",
    "trl.SFTTrainer.max_seq_length": "`SFTConfig(max_length=…)`",
    "trl.SFTTrainer.packing": "`SFTConfig` has it",
}


def rewrite_from_imports(source: Source, blocks: ImportBlocks) -> None:
    """Import each name from the module that has it today."""
    for node, module in _from_transformers(source):
        if isinstance(node.names, cst.ImportStar):
            source.list(node, f"from {module} import *", "star import: import the names that are used")
            continue
        before = FromImport.of(node, module, source.parent(node))
        homes: dict[str, list[Imported]] = {}
        for name in before.names:
            if name.name in _WITHOUT_EFFECT and _drop_calls(node, name, source, blocks):
                _mend(node, f"{module}.{name.name}", f"from {module} import {name.name}", "", source)
                continue
            place, today = _place_of(node, module, name, source)
            homes.setdefault(place, []).append(today)
        if list(homes) == [module] and homes[module] == list(before.names):
            continue
        rest = homes.pop(module, None)
        new = [replace(before, module=place, names=sorted_as(names, before.names)) for place, names in homes.items()]
        blocks.replace(node, new, None if rest is None else replace(before, names=sorted_as(rest, before.names)))


def import_below_stars(source: Source, blocks: ImportBlocks) -> None:
    """Import the used names of ours below a star import, and the names that it no longer brings along."""
    lost = {node.value for node in _unbound(source)}
    for node, module in _from_transformers(source):
        if not isinstance(node.names, cst.ImportStar):
            continue
        homes = _used_of_ours(node, module, source) if source.moves_here else {}
        for name in sorted(lost):
            if (found := _home_of(name, module, source)) is not None:
                homes.setdefault(found[0], []).append(found[1])
                lost.remove(name)
        if homes:
            new = [FromImport(module=place, names=sorted_as(names, ())) for place, names in sorted(homes.items())]
            blocks.replace(node, new, "")


def _home_of(name: str, module: str, source: Source) -> tuple[str, Imported] | None:
    """The module from which a name can be imported that a star import of a module of 4.x brought along."""
    today = renamed(name)
    imported = Imported(today, None if today == name else name)
    if name in typing.__all__:
        return "typing", imported
    if source.moves_here and today in PUBLIC:
        return home(module, today, ours=True), imported
    found = find(module, today, source.target)
    place = MOVED.get(f"{module}.{name}", found.module)
    names = looked_up_in(source.target)
    return (place, imported) if names is not None and names.has(f"{place}.{today}") else None


def _used_of_ours(node: cst.ImportFrom, module: str, source: Source) -> dict[str, list[Imported]]:
    """The used names of a star import that this package has, by their module here."""
    # Names that the source reads, binds, or has as a text: an annotation in quotes, `__all__`
    others: set[cst.CSTNode | None] = {one.attr for one in source.of(cst.Attribute)}
    others |= {one.keyword for one in source.of(cst.Arg)}
    others |= {one.name for one in source.of(cst.ImportAlias) if one.asname is not None}
    named = {one.value for one in source.of(cst.Name) if one not in others}
    named |= {str(one.evaluated_value) for one in source.of(cst.SimpleString)}
    tries = [one for one in source.above(node) if isinstance(one, cst.Try)]
    homes: dict[str, list[Imported]] = {}
    for name in sorted(bound_by_star(module) & named):
        # The same `try` statement, or an import further below, may take the name from this package already
        ours = [one for one in map(import_statement, source.assignments(node, name)) if one and _is_ours(one)]
        if any(source.line(one) >= source.line(node) or not set(tries).isdisjoint(source.above(one)) for one in ours):
            continue
        imported = Imported(renamed(name), None if renamed(name) == name else name)
        homes.setdefault(home(module, imported.name, ours=True), []).append(imported)
    return homes


def _from_transformers(source: Source) -> Iterator[tuple[cst.ImportFrom, str]]:
    """Yield the imports of names from transformers, with their modules."""
    for node in source.of(cst.ImportFrom):
        module = dotted(node.module)
        if module.partition(".")[0] == "transformers" and not node.relative:
            yield node, module


def _is_ours(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.ImportFrom) and dotted(node.module).split(".")[0] == "hf_compat"


def _place_of(node: cst.ImportFrom, module: str, name: Imported, source: Source) -> tuple[str, Imported]:
    path, written = f"{module}.{name.name}", f"from {module} import {name.name}"
    if any(_is_ours(import_statement(one)) for one in source.assignments(node, name.bound)):
        return module, name  # one of the two imports is the fallback for an absent package
    moved = MOVED_MODULES.get(path)
    if moved is not None:
        place, _, last = moved.rpartition(".")
        _mend(node, path, written, moved, source)
        return place, name if last == name.name else replace(name, name=last, alias=name.bound)
    today = renamed(name.name)
    place = home(module, today, ours=source.moves_here)
    if path in _MIRRORED and source.moves_here:
        place = "hf_compat"
    if name.name == "AdamW" and place == "torch.optim":
        source.list(node, "AdamW", ADAMW_DIFFERS)
    reason = None
    if place.partition(".")[0] == "transformers":
        place, today, reason = find(place, today, source.target)
    if not is_guarded(node, source):
        if reason is not None:
            source.list(node, written, reason, Effect.LOOK if _is_restored(path, source) else Effect.FAILS)
        elif f"{place}.{today}" != path:
            _mend(node, path, written, f"{place}.{today}", source)
    return place, name if today == name.name else _renamed_import(node, name, today, source)


def _renamed_import(node: cst.ImportFrom, name: Imported, today: str, source: Source) -> Imported:
    """Import a name by its current name. The script's uses follow unless the old name may be used elsewhere."""
    if name.alias is not None:
        return replace(name, name=today)
    bindings = source.assignments(node, name.name)
    uses = [use for one in bindings if import_statement(one) is node for use in source.reads(one)]
    plain = [use for use in uses if isinstance(use, cst.Name)]
    is_text = f'"{name.name}"' in source.text or f"'{name.name}'" in source.text
    if len(plain) != len(uses) or len(bindings) != 1 or is_text:
        return replace(name, name=today, alias=name.name)
    for use in plain:
        source.rename(use, today)
    return replace(name, name=today)


def rewrite_dotted_names(source: Source) -> None:
    """Rewrite `transformers.….name` if the name or a module before it has moved. List a name that is absent."""
    inside = (cst.Attribute, cst.ImportAlias, cst.ImportFrom)
    for node in (one for one in source.of(cst.Attribute) if not isinstance(source.parent(one), inside)):
        chain = [node]
        while isinstance(chain[-1].value, cst.Attribute):
            chain.append(chain[-1].value)
        # `from … import x`: x may be a class or a function, so it is not looked for among the modules
        first = source.assignments(chain[-1].value)
        is_from = any(isinstance(import_statement(one), cst.ImportFrom) for one in first)
        for inner in reversed(chain):
            path = source.imported(inner)
            module, _, last = path.rpartition(".")
            if path.partition(".")[0] != "transformers" or not module:
                continue
            if path in MOVED_MODULES and not is_from:
                rest = MOVED_MODULES[path].removeprefix(f"{module}.")
                source.change(inner, partial(_with_path, path=f"{{}}.{rest}"))
            elif last in RENAMED and not is_from:
                source.rename(inner.attr, RENAMED[last])
            elif not source.is_changed(inner) and _look_up_use(inner, path, is_from, source):
                break


def _look_up_use(node: cst.Attribute, path: str, is_from: bool, source: Source) -> bool:
    """Move a dotted name to its current module, or list it. False if it can stay."""
    before, _, name = path.rpartition(".")
    module = moved_path(before)
    names = looked_up_in(source.target)
    # Only a name in a module can be looked up, not a member of a class
    if not (module == "transformers" if names is None else names.is_module(module)):
        return False
    found = find(module, name, source.target)
    today = f"{found.module}.{found.name}"
    if found.reason is not None and not is_guarded(node, source):
        effect = Effect.LOOK if _is_restored(path, source) else Effect.FAILS
        source.list(node, source.code(node), found.reason, effect)
    elif today == moved_path(path):
        return False
    elif dotted(node).partition(".")[0] == "transformers" and not is_from:
        source.change(node, partial(_with_path, path=today))
    else:
        source.list(node, source.code(node), f"is {today} today")
    return True


def _with_path(node: cst.Attribute, path: str) -> cst.BaseExpression:
    """Replace a dotted name. `{}` in the path stands for all but the name's last part."""
    before = cst.Module([]).code_for_node(node.value)
    return name_or_dotted(path.format(before)).with_changes(lpar=node.lpar, rpar=node.rpar)


def rewrite_tpu_calls(source: Source) -> None:
    """Keep the meaning of `is_torch_tpu_available`'s argument in the call of `is_torch_xla_available`."""
    for call in source.of(cst.Call):
        is_old = source.imported(call.func).rpartition(".")[2] == "is_torch_tpu_available"
        for argument in call.args[:1] if is_old else ():
            value = read_constant(argument.value)
            edit = Edit(drop=True) if value is not None and not value.value else Edit(name="check_is_tpu")
            if argument.keyword is None and not edit.drop:
                source.change(argument, lambda node: node.with_changes(equal=EQUAL))
            edit_call(source, call, {0: edit})


def _is_restored(path: str, source: Source) -> bool:
    if source.target is not Target.HF_COMPAT:
        return False
    module, _, name = path.rpartition(".")
    names = looked_up_in(source.target)
    is_there = module in MOVED_MODULES and (names is None or names.has(f"{MOVED_MODULES[module]}.{name}"))
    return is_there or is_restored(path)


def _mend(node: cst.CSTNode, path: str, what: str, today: str, source: Source) -> None:
    """Record an import that fails as it is in the installed release."""
    names = looked_up_in(source.target)
    is_there = names is None or names.can_import(path) or names.is_module(path)
    if names is not None and not is_there and not _is_restored(path, source):
        where = f": it is {today} today" if today else ", and nothing takes its place"
        source.mend(node, what, f"transformers {names.version} has no such name{where}")


def is_guarded(node: cst.CSTNode, source: Source, failures: Sequence[str] = _OF_IMPORTS) -> bool:
    """Whether a node is in a `try` that catches its failure, or in an `if TYPE_CHECKING`, which is false."""
    inner = node
    for outer in source.above(node):
        if isinstance(outer, cst.If) and inner is outer.body and source.imported(outer.test) in _FALSE_AT_RUN_TIME:
            return True
        if isinstance(outer, cst.Try) and inner is outer.body:
            kinds = [kind for one in outer.handlers for kind in (elements_of(one.type) if one.type else [None])]
            caught = set(map(dotted, kinds))
            if caught & {"", *failures, "Exception", "BaseException"}:
                return True
        inner = outer
    return False


def _drop_calls(node: cst.ImportFrom, name: Imported, source: Source, blocks: ImportBlocks) -> bool:
    """Remove the calls of a function without effect. False if one of its uses is not a statement."""
    bindings = [one for one in source.assignments(node, name.bound) if import_statement(one) is node]
    uses = [use for one in bindings for use in source.reads(one)]
    calls = [(use, source.parent(use)) for use in uses]
    lines = [source.parent(call) if isinstance(call, cst.Call) and call.func is use else None for use, call in calls]
    statements = [one for one in lines if isinstance(one, cst.Expr) and blocks.is_alone(one)]
    if len(statements) < len(lines) or not blocks.is_alone(node):
        return False
    for line in statements:
        blocks.replace(line, [], None)
    return True


def rewrite_module_imports(source: Source, blocks: ImportBlocks) -> None:
    """Import each module of transformers by its current name, or this package instead if its names are used."""
    for node in source.of(cst.Import):
        if not source.moves_here:
            for alias in node.names:
                _look_up_module(alias, source)
            continue
        kept: list[cst.ImportAlias] = []
        ours = False
        for alias in node.names:
            module = dotted(alias.name)
            path = f"hf_compat.{module.removeprefix('transformers.')}"
            if module in _MIRRORED and alias.asname is not None:
                if len(node.names) == 1:
                    blocks.replace(node, [f"import {path} as {bound_name(alias.asname)}"], None)
                    break
                source.put(alias.name, name_or_dotted(path))
                kept.append(alias)
            elif module.split(".")[0] == "transformers":
                _look_up_module(alias, source)
                moved, stays = _move_uses(node, alias, source)
                ours = ours or moved
                kept += [alias] if stays or not moved else []
            else:
                kept.append(alias)
        if ours:
            paths = [(moved_path(dotted(one.name)), one.asname) for one in kept]
            rest = ", ".join(path if name is None else f"{path} as {bound_name(name)}" for path, name in paths)
            blocks.replace(
                node, ["hf_compat"], "" if len(kept) == len(node.names) else f"import {rest}" if kept else None
            )


def _look_up_module(alias: cst.ImportAlias, source: Source) -> None:
    module = dotted(alias.name)
    if module.partition(".")[0] != "transformers":
        return
    today = moved_path(module)
    names = looked_up_in(source.target)
    if names is not None and not names.is_module(today) and not is_guarded(alias, source):
        source.list(alias, f"import {module}", f"transformers {names.version} has no such module", Effect.FAILS)
    if today != module:
        source.put(alias.name, name_or_dotted(today))
        _mend(alias, module, f"import {module}", today, source)


def _move_uses(node: cst.Import, alias: cst.ImportAlias, source: Source) -> tuple[bool, bool]:
    """Take the used names of ours from this package. Returns whether there are some, and other uses."""
    moved = stays = False
    scope = source.scope(node)
    bound = alias.name if alias.asname is None else alias.asname.name
    for assignment in [] if scope is None else list(scope.assignments):
        if not isinstance(assignment, ImportAssignment) or assignment.as_name is not bound:
            continue
        for read in source.reads(assignment) if binding_node(assignment) is node else ():
            # The dotted name of an imported object: `transformers.Trainer`, not `….Trainer.train`
            dots = itertools.takewhile(lambda one: isinstance(one, (cst.Attribute, cst.Name)), source.above(read))
            uses = [one for one in (read, *dots) if isinstance(one, cst.Attribute) and _name_of_ours(one, source)]
            if not uses:
                stays = True
            elif not source.is_changed(uses[-1]):
                path = f"hf_compat.{_name_of_ours(uses[-1], source)}"
                source.change(uses[-1], partial(_with_path, path=path))
            moved = moved or bool(uses)
    return moved, stays


def _name_of_ours(node: cst.Attribute, source: Source) -> str:
    """The current name of a name of transformers that this package has. Empty for any other."""
    module, _, last = source.imported(node).rpartition(".")
    is_module = module.split(".")[0] == "transformers" and all(part.islower() for part in module.split("."))
    return renamed(last) if is_module and renamed(last) in PUBLIC else ""


def list_missing(source: Source) -> None:
    """List names of the packages beside transformers, imported or in a module, that the installed release lacks."""
    for node in source.of(cst.ImportFrom):
        module = dotted(node.module)
        if node.relative or isinstance(node.names, cst.ImportStar) or is_guarded(node, source):
            continue
        for alias in node.names:
            name = dotted(alias.name)
            reason = _missing_beside(module, name, source)
            if reason:
                source.list(node, f"from {module} import {name}", reason, Effect.FAILS)
    for use in source.of(cst.Attribute):
        module, _, name = source.imported(use).rpartition(".")
        names = _names_beside(module, source)
        is_tried = f'"{name}"' in source.text or f"'{name}'" in source.text  # `hasattr(datasets, "name")`
        if names is None or not names.is_module(module) or is_tried or is_guarded(use, source):
            continue
        first = next(one for one in walk(use) if isinstance(one, cst.Name))
        if not all(map(import_statement, source.assignments(first))):  # a variable has the module's name, too
            continue
        reason = _missing_beside(module, name, source)
        if reason and not isinstance(source.parent(use), (cst.AssignTarget, cst.ImportAlias, cst.ImportFrom)):
            source.list(use, source.code(use), reason, Effect.FAILS)


def _names_beside(module: str, source: Source) -> InstalledNames | None:
    package = module.partition(".")[0]
    is_known = package in NEIGHBOURS and not source.graph.has_beside(package)
    return installed_names(package) if is_known else None


def list_refused_keywords(source: Source) -> None:
    """List keywords that the installed release of a package beside transformers refuses.

    NumPy's are left alone: most of its functions are C, and their namesakes in Python take other keywords.
    """
    for call in source.of(cst.Call):
        path = source.imported(call.func)
        names = None if path.startswith("numpy.") else _names_beside(path, source)
        known = None if names is None or not names.has(path) else names.keywords_of(path)
        if names is None or known is None:
            continue
        package, kind = path.partition(".")[0], path.rpartition(".")[2]
        for argument, name in ((one, keyword(one)) for one in call.args if keyword(one)):
            if name not in known and not is_guarded(call, source, ("TypeError",)):
                at = "processing_class" if name == "tokenizer" and "processing_class" in known else ""
                way_out = _KEYWORDS_TODAY.get(f"{package}.{kind}.{name}", f"it is {at} today" if at else "")
                reason = f"{package} {names.version} has no such keyword{f': {way_out}' if way_out else ''}"
                source.list(argument, f"{kind}({name}=…)", reason, Effect.FAILS)


def _missing_beside(module: str, name: str, source: Source) -> str:
    """Why a name cannot be imported from a module of a package beside transformers. Empty if it can."""
    names = _names_beside(module, source)
    if names is None or names.can_import(f"{module}.{name}"):
        return ""
    package = module.partition(".")[0]
    what = "name" if names.is_module(module) else "module"
    home = names.outermost_home(name)
    way_out = _WAYS_OUT.get(f"{package}.{name}", f"it is {home}.{name} today" if home else "")
    return f"{f'{package} {names.version}'.strip()} has no such {what}{f': {way_out}' if way_out else ''}"


def list_unbound(source: Source) -> None:
    """List names that only a star import of transformers bound, in a release that is not installed."""
    modules = [module for node, module in _from_transformers(source) if isinstance(node.names, cst.ImportStar)]
    names = looked_up_in(source.target)
    told: set[str] = set()
    for node in _unbound(source):
        name = node.value
        if name in told or names is None:
            continue
        told.add(name)
        found = next((one for module in modules if (one := _home_of(name, module, source)) is not None), None)
        if found is None:
            reason = f"no import binds it, as transformers {names.version} does not: an error where it is reached"
            source.list(node, name, reason)
        elif source.target is not Target.HF_COMPAT or not any(is_restored(f"{one}.{name}") for one in modules):
            way = f"from {found[0]} import {found[1].code}"
            source.mend(node, name, f"no import binds it: `{way}` does, as transformers {names.version} does not")


def _unbound(source: Source) -> Iterator[cst.Name]:
    """Yield the names that nothing binds, in a source whose only star imports are of transformers."""
    stars = [one for one in source.of(cst.ImportFrom) if isinstance(one.names, cst.ImportStar)]
    modules = [dotted(one.module) for one in stars if not one.relative]
    names = looked_up_in(source.target)
    is_known = names is not None and len(modules) == len(stars) and all(one.split(".")[0] in _OURS for one in modules)
    if names is None or not stars or not is_known:
        return
    bound = {name for module in modules for name in bound_by_star(module)}
    bound |= set(dir(builtins)) | set(dir(types.ModuleType("")))
    for node in source.of(cst.Name):
        is_import = any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in source.above(node))
        if node.value in bound or is_import or not _is_read(node, source) or source.assignments(node):
            continue
        if not any(names.exports(module, node.value) for module in modules):
            yield node


def _is_read(node: cst.Name, source: Source) -> bool:
    """Whether a name stands for a value, and is not a part of a longer name, a keyword or what is bound."""
    match source.parent(node):
        case cst.Attribute(attr=word) | cst.Arg(keyword=word) | cst.Param(name=word):
            return word is not node
        case cst.FunctionDef(name=word) | cst.ClassDef(name=word):
            return word is not node
        case cst.AsName() | cst.NameItem() | cst.MatchKeywordElement():
            return False
    return True
