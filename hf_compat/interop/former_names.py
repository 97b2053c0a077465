"""Names of earlier releases of `transformers` that scripts import on their first lines, while we are patched in.

A script of 4.2x to 4.57 imports them beside the Trainer, and would end there under a release that has dropped them.
What they did is done by what took their place; telemetry is not sent. HF words only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from hf_compat.hf.enums import IntervalStrategy


def send_example_telemetry(example_name: str, *example_args: object, framework: str = "pytorch") -> None:
    """Send nothing: 5.0 dropped what told Hugging Face which example script was started.

    Mirrors:
        `transformers.utils.send_example_telemetry`, 4.21 to 4.57.
    """


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Return whether torch_xla finds a TPU.

    Mirrors:
        `transformers.is_torch_tpu_available`, until 4.49; `is_torch_xla_available(check_is_tpu=True)` took its place.
    """
    utils = importlib.import_module("transformers.utils")
    return bool(utils.is_torch_xla_available(check_is_tpu=check_device))


def is_offline_mode() -> bool:
    """Return whether nothing may be downloaded (`HF_HUB_OFFLINE=1`).

    Mirrors:
        `transformers.utils.is_offline_mode`, until 4.57; `huggingface_hub` has it now.
    """
    return bool(importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE)


def get_full_repo_name(model_id: str, organization: str | None = None, token: str | None = None) -> str:
    """Return a repository's name with its owner: the organization, or who the token belongs to.

    Mirrors:
        `transformers.utils.get_full_repo_name`, until 4.57; `huggingface_hub.HfApi` has it now.
    """
    hub = importlib.import_module("huggingface_hub")
    return str(hub.HfApi(token=token).get_full_repo_name(model_id=model_id, organization=organization))


_HUB: tuple[Callable[..., object], ...] = (send_example_telemetry, is_offline_mode, get_full_repo_name)
_FORMER: dict[str, dict[str, object]] = {
    "transformers": {"is_torch_tpu_available": is_torch_tpu_available},
    "transformers.file_utils": {one.__name__: one for one in (*_HUB, is_torch_tpu_available)},
    "transformers.trainer": {"is_torch_tpu_available": is_torch_tpu_available},
    "transformers.trainer_utils": {
        "EvaluationStrategy": IntervalStrategy,
        "is_torch_tpu_available": is_torch_tpu_available,
    },
    "transformers.utils": {one.__name__: one for one in (*_HUB, is_torch_tpu_available)},
    "transformers.utils.hub": {one.__name__: one for one in _HUB},
}

_added: list[tuple[ModuleType, str, object]] = []


def add_former_names(top_levels: list[ModuleType]) -> None:
    """Give modules of transformers the names that this release no longer has.

    Args:
        top_levels: `transformers`, and what code holds under that name.
    """
    for place, names in _FORMER.items():
        inner = importlib.import_module(place)
        for module in top_levels if place == "transformers" else [inner]:
            _add(module, names)


def _add(module: ModuleType, names: dict[str, object]) -> None:
    for name, value in names.items():
        if name not in dir(module):  # asking for it would load it
            setattr(module, name, value)
            _added.append((module, name, value))


def take_former_names_back() -> None:
    """Leave the modules as they were; what a script has put under such a name since stays."""
    while _added:
        module, name, value = _added.pop()
        if vars(module).get(name) is value:
            delattr(module, name)
