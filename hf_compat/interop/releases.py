"""Differences between releases of `transformers`, read from the installed one.

No version is compared. If a name is absent, the code does the same as that release does without it. If the name is
needed, the error names the releases that have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_compat.errors import ArgumentError, MissingPackage
from hf_compat.hf.argument_values import checks_of
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import PROFILES, ReplacedRelease
from hf_compat.runtime.text import is_installed, need

if TYPE_CHECKING:
    from torch import nn

# The oldest release that was tested. Older ones work as far as they have the names.
OLDEST = "4.40.2"
NEWEST = "5.24"


def replaced_release(theirs: type) -> ReplacedRelease:
    """Describe the installed release by the defaults of its `TrainingArguments` that differ from ours."""
    release = str(importlib.import_module("transformers").__version__)
    checks = checks_of(TrainingArguments, TrainingArguments)
    held = {one.name: one.default for one in dataclasses.fields(theirs) if one.default is not dataclasses.MISSING}
    # its meaning of None, and arguments that it has no field for
    table = PROFILES.get(release.partition(".")[0], {})
    defaults = {name: value for name, value in table.items() if held.get(name) is None}
    for name in held.keys() & checks.keys() - {*defaults, "gradient_checkpointing"}:  # False where ours has None
        with contextlib.suppress(ArgumentError):  # another form of our value
            defaults[name] = checks[name].read(held[name])
    if any(one.name == "fsdp" and "list" in str(one.type).lower() for one in dataclasses.fields(theirs)):
        defaults["fsdp"] = []  # scripts use its length
    return ReplacedRelease(
        release=release,
        defaults={name: value for name, value in sorted(defaults.items()) if value != checks[name].default},
    )


def check_quantization(model: nn.Module, has_adapters: bool = False) -> None:
    """Refuse a quantized model that cannot be trained.

    Mirrors:
        `transformers.trainer_utils.validate_quantization_for_training`. Up to 5.2, the Trainer's constructor.
    """
    theirs = of_installed("trainer_utils", "validate_quantization_for_training")
    if theirs is not None:
        theirs(model)
        return
    if not getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        return
    quantizer, wrong = getattr(model, "hf_quantizer", None), ""
    if hasattr(model, "_orig_mod"):
        wrong = (
            "quantized and compiled, and adapters cannot be trained on a compiled model.\n\n"
            "Hint: pass the model before `torch.compile`."
        )
    elif not has_adapters and not getattr(quantizer, "is_qat_trainable", False):
        wrong = (
            "quantized and has no adapters, and quantized weights cannot be trained.\n\n"
            "Hint: give it adapters, `peft.get_peft_model(model, config)`."
        )
    elif not getattr(quantizer, "is_trainable", False):
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "its method")
        wrong = f"quantized by {method}, which cannot be trained.\n\nHint: use another one."
    if wrong:
        raise ArgumentError(f"`model` is {wrong}")


def modules_there(names: tuple[str, ...]) -> list[ModuleType]:
    """Import those of the modules that the installed release has."""
    found: list[ModuleType] = []
    for name in names:
        try:
            # a release makes some of its former modules without a spec
            is_there = sys.modules[name] is not None if name in sys.modules else bool(importlib.util.find_spec(name))
        except ModuleNotFoundError as error:  # a folder of modules today was one module then, or did not exist
            if not str(error.name).startswith("transformers"):
                raise
            is_there = False
        if is_there:
            found.append(importlib.import_module(name))
    return found


def need_names(there: Collection[str], names: Iterable[str], for_what: str) -> None:
    """Refuse a release that lacks needed names."""
    lacking = [name for name in names if name not in there]
    if lacking:
        version = importlib.import_module("transformers").__version__
        raise MissingPackage(
            f"{for_what} needs {', '.join(lacking)} of transformers, and the one that is installed ({version}) has no "
            f"such name: it is too old, or too new. Releases {OLDEST} to {NEWEST} were run.\n\n"
            f"Hint: pip install 'transformers>={OLDEST}'",
            name="transformers",
        )


# Of the names that `patch()` replaces: name → transformers' own object and ours. Empty without a patch.
REPLACED: dict[str, tuple[object, object]] = {}


def of_installed(module: str, name: str) -> Any:
    """Transformers' own object, also while `patch()` has replaced it. Our code looks up every such name here.

    Otherwise ours, which hands its work on, would find itself.

    Args:
        module: The module within `transformers`.
        name: The name there.

    Returns:
        None if transformers is not installed, or if the installed release has no such name.
    """
    if not is_installed("transformers"):
        return None
    theirs, _ = REPLACED.get(name, (None, None))
    return getattr(importlib.import_module(f"transformers.{module}"), name, None) if theirs is None else theirs


def of_transformers(module: str, name: str, for_what: str) -> Any:
    """Like `of_installed`, for a name without which a feature cannot work.

    Raises:
        MissingPackage: transformers is not installed, or the installed release has no such name.
    """
    theirs = need(f"transformers.{module}", "[transformers]", for_what)
    need_names(dir(theirs), (name,), for_what)
    return of_installed(module, name)


def name_of_cache() -> str:
    """The output that holds the cache of a generation: `cache` since 5.24, `past_key_values` before."""
    generic = sys.modules.get("transformers.utils.generic")
    return "cache" if hasattr(getattr(generic, "ModelOutput", None), "cache_params") else "past_key_values"
