"""Models that `from_pretrained(device_map=…)` has put onto devices: their placement stays. torch and HF words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_compat.errors import UnsupportedArgument

Place = int | str | torch.device  # a number counts accelerators
_OFFLOADED = ("cpu", "disk")


def is_model_parallel(model: nn.Module, device: torch.device) -> bool:
    """Return whether a model stands on several accelerators, or on another one than the run's.

    Mirrors:
        `transformers.Trainer.is_model_parallel`, 5.23.
    """
    places = {place for place in _placement(model).values() if place not in _OFFLOADED}
    return len(places) > 1 or not all(_is_same(place, device) for place in places)


def check_placement(model: nn.Module, device: torch.device, world_size: int) -> None:
    """Refuse a placement with which no run can train.

    Raises:
        UnsupportedArgument: The model is spread out and there are several processes; or it is quantized and is not
            where the run trains.

    Mirrors:
        `accelerate.Accelerator.prepare_model`, 1.13.
    """
    if world_size > 1 and any(len(_placement(module)) > 1 for module in model.modules()):
        raise UnsupportedArgument(
            f"The model is spread over devices (`device_map`), and there are {world_size} processes: each of them "
            "needs the whole model on its own device.\n\n"
            "Hint: run one process; or load it without `device_map='auto'`, and let `fsdp` or `deepspeed` shard it."
        )
    is_quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (8, 4))
    if is_quantized and _placement(model):
        _check_quantized(set(_placement(model).values()), device)


def _check_quantized(places: set[Place], device: torch.device) -> None:
    offloaded = [str(place) for place in places if place == "disk" or (str(place) == "cpu" and device.type != "cpu")]
    if offloaded:
        raise UnsupportedArgument(
            f"The model is loaded in 8 or 4 bits and parts of it are offloaded ({', '.join(sorted(offloaded))}): such "
            "parts cannot be trained.\n\nHint: load it with `device_map={'': torch.cuda.current_device()}`."
        )
    elsewhere = len(places) == 1 and not any(_is_same(place, device) for place in places)
    if elsewhere:
        raise UnsupportedArgument(
            f"The model is loaded in 8 or 4 bits on {next(iter(places))}, and this process trains on {device}: "
            "quantized weights cannot be moved.\n\nHint: load it with `device_map={'': torch.cuda.current_device()}`."
        )


def _is_same(place: Place, device: torch.device) -> bool:
    named = torch.device("cuda" if device.type == "cpu" else device.type, place) if isinstance(place, int) else place
    found = torch.device(named)
    return found.type == device.type and (found.index or 0) == (device.index or 0)


def _placement(model: nn.Module) -> Mapping[str, Place]:
    found = getattr(model, "hf_device_map", None)
    return found if isinstance(found, Mapping) else {}
