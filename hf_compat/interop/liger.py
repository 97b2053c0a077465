"""Liger's kernels in the place of a model's layers: `use_liger_kernel`. HF words only; users bring the package."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from torch import nn

from hf_compat.errors import ArgumentError, MissingPackage, warn_once
from hf_compat.interop.transformers_models import is_transformers_model, unwrap_peft
from hf_compat.runtime.text import did_you_mean, is_installed, missing_package, shown

Config = Mapping[str, bool]


class _Liger(Protocol):
    _apply_liger_kernel_to_instance: Callable[..., None]


def check_liger(model: nn.Module | None, config: object) -> None:
    """Refuse, before anything is trained, what Liger could not do.

    Args:
        model: The model; None where there is none yet.
        config: Which kernels are used: `liger_kernel_config`.

    Raises:
        ArgumentError: The configuration names a kernel that the model's architecture has not, or is contradictory.
        MissingPackage: liger-kernel is not installed, or does not load here.
    """
    _package()
    chosen = _as_config(config)
    known = None if model is None else _kernels_of(unwrap_peft(model))
    unknown = next((name for name in chosen if known is not None and name not in known), None)
    if unknown is not None:
        assert known is not None  # a name is unknown to something
        hint = did_you_mean(unknown, known, f"there are {', '.join(known)}.")
        told = shown("liger_kernel_config", dict(chosen))
        raise ArgumentError(f"`{told}`: Liger has no kernel {unknown!r} for this model.\n\nHint: {hint}")


def apply_liger(model: nn.Module, config: object) -> None:
    """Put Liger's kernels into a model, in place.

    Args:
        model: A model of transformers, also within a wrapper of PEFT; another one is left alone, with a warning.
        config: Which kernels are used.

    Mirrors:
        `transformers.integrations.liger.apply_liger_kernel`, 5.23.
    """
    inner = unwrap_peft(model)
    if is_transformers_model(inner):
        _package()._apply_liger_kernel_to_instance(model=inner, **_as_config(config))
    else:
        warn_once(
            f"`use_liger_kernel=True` has no effect: {type(inner).__name__} is no `PreTrainedModel` of transformers."
        )


def _package() -> _Liger:
    if "liger_kernel" not in sys.modules and not is_installed("liger_kernel"):
        raise missing_package("liger_kernel", "liger-kernel", "`use_liger_kernel=True`")
    try:
        return cast(_Liger, importlib.import_module("liger_kernel.transformers"))
    except ImportError as error:
        raise MissingPackage(
            f"`use_liger_kernel=True` needs liger-kernel, which does not load here: {error}.\n\n"
            "Hint: pip install liger-kernel triton; its kernels need a GPU."
        ) from error


def _as_config(config: object) -> Config:
    """Return the configuration as the keywords that it is made of.

    Raises:
        ArgumentError: A value is no truth value, or two kernels for the same layer are chosen.
    """
    chosen: dict[str, bool] = dict(config) if isinstance(config, Mapping) else {}
    name = next((name for name, value in chosen.items() if not isinstance(value, bool)), None)
    if name is not None:
        raise ArgumentError(
            f"`{shown('liger_kernel_config', chosen)}`: {name} is no truth value.\n\nHint: write true or false."
        )
    if chosen.get("cross_entropy") and chosen.get("fused_linear_cross_entropy"):
        raise ArgumentError(
            f"`{shown('liger_kernel_config', chosen)}` chooses two kernels of the loss.\n\n"
            "Hint: `cross_entropy` or `fused_linear_cross_entropy`."
        )
    return chosen


def _kernels_of(model: nn.Module) -> list[str] | None:
    """Return the names of the kernels that Liger has for a model; None where it does not tell."""
    functions = getattr(sys.modules.get("liger_kernel.transformers.monkey_patch"), "MODEL_TYPE_TO_APPLY_LIGER_FN", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(functions, Mapping) or kind is None:
        return None
    if kind not in functions:
        warn_once(f"`use_liger_kernel=True` has no effect: Liger has no kernels for models of the type {kind!r}.")
        return None
    return [name for name in inspect.signature(functions[kind]).parameters if name != "model"]
