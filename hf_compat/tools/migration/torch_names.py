"""Rewrite or list names, keywords and forms that torch itself has dropped."""

from __future__ import annotations

import libcst as cst

from hf_compat.tools.migration.elements import Edit, edit_call
from hf_compat.tools.migration.gone_names import GONE_OF_TORCH
from hf_compat.tools.migration.imports import is_guarded
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted, is_super_call, keyword

_SCHEDULERS = "torch.optim.lr_scheduler."
_VERBOSE = "torch's schedulers have no `verbose`"
# Bases whose constructor takes no more than so many arguments beside `self`, with the reason.
_BASES = {
    "Sampler": (0, "torch's Sampler takes no arguments"),
    "LRScheduler": (2, _VERBOSE),
    "_LRScheduler": (2, _VERBOSE),
}
_MASKED = ("masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select")
_NO_MASKS = ("byte", "long", "int", "float")


def list_gone_of_torch(source: Source) -> None:
    """List the names of torch that are gone, or that only raise."""
    for node in source.of(cst.ImportFrom):
        module = dotted(node.module)
        for alias in () if node.relative or isinstance(node.names, cst.ImportStar) else node.names:
            _list_gone(node, f"{module}.{dotted(alias.name)}", f"from {module} import {dotted(alias.name)}", source)
    for alias in source.of(cst.ImportAlias):
        if isinstance(source.parent(alias), cst.Import):
            _list_gone(alias, dotted(alias.name), f"import {dotted(alias.name)}", source)
    for use in source.of(cst.Attribute):
        path, outer = source.imported(use), source.parent(use)
        if path in GONE_OF_TORCH and not isinstance(outer, (cst.AssignTarget, cst.ImportAlias, cst.ImportFrom)):
            _list_gone(use, path, source.code(use), source)


def _list_gone(node: cst.CSTNode, path: str, what: str, source: Source) -> None:
    gone = next((one for one in GONE_OF_TORCH if f"{path}.".startswith(f"{one}.")), None)
    if gone is not None and not is_guarded(node, source):
        source.list(node, what, f"gone from torch: {GONE_OF_TORCH[gone]}", Effect.FAILS)


def rewrite_schedulers(source: Source) -> None:
    """Take `verbose=` out of calls that make a scheduler of torch."""
    for call in source.of(cst.Call):
        path = source.imported(call.func)
        places = [place for place, one in enumerate(call.args) if keyword(one) == "verbose"]
        if path.startswith(_SCHEDULERS) and places:
            edit_call(source, call, {places[0]: Edit(drop=True)})
            source.mend(call.args[places[0]], f"{path.rpartition('.')[2]}(verbose=…)", _VERBOSE)


def list_former_calls(source: Source) -> None:
    """List calls that torch refuses today: constructors of its bases, masks that are numbers, spectra of pairs."""
    for call in source.of(cst.Call):
        base = _base_of(call, source)
        if base in _BASES:
            most, reason = _BASES[base]
            given = call.args if is_super_call(call, "__init__") else call.args[1:]
            if len(given) > most or any(keyword(one) == "verbose" for one in given):
                source.list(call, source.code(call.func), reason, Effect.FAILS)
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value in _MASKED and call.args:
            mask = call.args[0].value
            made = mask.func if isinstance(mask, cst.Call) else None
            if isinstance(made, cst.Attribute) and made.attr.value in _NO_MASKS:
                reason = "torch takes masks of bool alone"
                source.list(mask, source.code(call.func), reason, Effect.FAILS)
        elif source.imported(call.func) == "torch.stft" and not any(
            one.star or keyword(one) == "return_complex" for one in call.args
        ):
            source.list(call, "stft", "torch asks for `return_complex=`", Effect.FAILS)


def _base_of(call: cst.Call, source: Source) -> str:
    """The class of torch whose constructor a call of `super().__init__` or `Base.__init__` runs. Empty for another."""
    owner = next((one for one in source.above(call) if isinstance(one, cst.ClassDef)), None)
    is_init = isinstance(call.func, cst.Attribute) and call.func.attr.value == "__init__"
    if owner is None or not is_init or any(one.star for one in call.args):
        return ""
    bases = [source.imported(one.value) for one in owner.bases]
    return bases[0].rpartition(".")[2] if len(bases) == 1 and bases[0].startswith("torch.") else ""
