"""Whether what a source takes from transformers is there, in the release that is installed; and where it has gone."""

from __future__ import annotations

from dataclasses import dataclass

from hf_compat.interop.former_names import GONE, MOVED_MODULES, is_gone
from hf_compat.tools.migration.installed_names import InstalledNames, installed_names
from hf_compat.tools.migration.report import Target

_PACKAGE = "transformers"
_FEATURES, _IMAGES = "FeatureExtractor", "ImageProcessor"
# Of any module; nobody means to import another module's
_OF_ITS_OWN = ("logger",)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a name of transformers is today.

    Args:
        module: The module that has it.
        name: What it is called there.
        reason: Why it cannot be imported; None where it can, or where that cannot be looked up.
    """

    module: str
    name: str
    reason: str | None = None


def is_beside_older(target: Target) -> bool:
    """Return whether the result is for an installed release of 4.x, which has what transformers 5 lacks."""
    names = looked_up_in(target)
    return names is not None and names.version.startswith("4.")


def looked_up_in(target: Target) -> InstalledNames | None:
    """Return the names to look in; None where no release that the result is for is installed."""
    names = installed_names(_PACKAGE)
    is_older = names is not None and names.version.startswith("4.")
    return None if target is Target.TRANSFORMERS_5 and is_older else names


def find(module: str, name: str, target: Target) -> Found:
    """Look a name up in a module of transformers; one that has moved is found where it is.

    Args:
        module: Its module, after all that the tables say.
        name: What it is called today.
        target: What the result is for.
    """
    names = looked_up_in(target)
    if names is None or (names.version.startswith("4.") and name in GONE):
        return Found(module, name, is_gone(name))
    if names.has(f"{module}.{name}"):
        return Found(module, name)
    reason = is_gone(name)
    images = name.removesuffix(_FEATURES) + _IMAGES
    if reason is None and name.endswith(_FEATURES) and names.has(f"{_PACKAGE}.{images}"):
        return Found(_PACKAGE, images)
    homes = () if name in _OF_ITS_OWN else names.homes(name)
    if reason is None and len(homes) == 1:
        return Found(homes[0], name)
    nearby = f"; it is in {' and '.join(homes)}" if homes else ""
    return Found(module, name, reason or f"transformers {names.version} has no such name{nearby}")


def moved_path(path: str) -> str:
    """Return a dotted path with its module as it is called today."""
    for old, today in MOVED_MODULES.items():
        if path == old or path.startswith(f"{old}."):
            return today + path.removeprefix(old)
    return path
