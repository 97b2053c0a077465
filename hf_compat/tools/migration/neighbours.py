"""What a source imports from the packages beside transformers, looked up in their installed releases."""

from __future__ import annotations

import libcst as cst

from hf_compat.tools.migration.imports import is_guarded
from hf_compat.tools.migration.installed_names import installed_names
from hf_compat.tools.migration.report import Effect
from hf_compat.tools.migration.source import Source, dotted

_PACKAGES = ("accelerate", "datasets", "evaluate", "peft", "trl")
_WAYS_OUT = {
    "datasets.load_metric": "`evaluate.load` of the package evaluate has taken its place",
    "peft.prepare_model_for_int8_training": "`prepare_model_for_kbit_training` has taken its place",
}


def list_missing(source: Source) -> None:
    """List names that a source imports from these packages, and that the installed release does not have."""
    for node in source.of(cst.ImportFrom):
        module = dotted(node.module)
        package = module.partition(".")[0]
        names = installed_names(package) if package in _PACKAGES and not node.relative else None
        if names is None or isinstance(node.names, cst.ImportStar) or is_guarded(node, source):
            continue
        release = f"{package} {names.version}".strip()
        for alias in node.names:
            path = f"{module}.{dotted(alias.name)}"
            if not names.has(path):
                what = "name" if names.is_module(module) else "module"
                way_out = f": {_WAYS_OUT[path]}" if path in _WAYS_OUT else ""
                text = f"from {module} import {dotted(alias.name)}"
                source.list(node, text, f"{release} has no such {what}{way_out}", Effect.FAILS)
