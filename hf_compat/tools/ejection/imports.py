"""The imports at the head of a generated file: those that its body needs, sorted and joined."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from hf_compat.tools.ejection.sources import Import

# Where the names of the templates come from.
_KNOWN = {
    name: Import(module, None if module == name else name, name)
    for module, names in {
        "math": "math",
        "torch": "torch",
        "collections.abc": "Iterable Iterator",
        "itertools": "islice",
        "typing": "Any",
        "pathlib": "Path",
        "lightning.pytorch.cli": "LightningCLI",
        "lightning.pytorch.callbacks": "ModelCheckpoint",
        "safetensors.torch": "save_model",
        "module": "TrainingModule",
        "hf_events": "ARGUMENTS HFEvents TrainerControl TrainerState",
        "dataclasses": "dataclass field",
        "types": "SimpleNamespace",
        "contextlib": "contextlib",
        "lightning.pytorch": "Callback LightningDataModule LightningModule Trainer seed_everything",
        "lightning.pytorch.core.optimizer": "LightningOptimizer",
        "lightning.pytorch.utilities.types": "OptimizerLRSchedulerConfig",
        "torch.optim": "Optimizer",
        "torch.optim.lr_scheduler": "LRScheduler",
        "torch.utils.data": "DataLoader Dataset Sampler",
        "torch.nn.functional": "pad",
        "evaluation": "EvalPrediction join",
        "model": "build_model",
        "random_state": "load_random_state",
    }.items()
    for name in names.split()
} | {"DataModule": Import("data", "DataModule", "DataModule"), "nn": Import("torch", "nn", "nn")}
# Files of the project itself, which stand last.
_OWN = frozenset(
    (
        "evaluation",
        "model",
        "module",
        "data",
        "callbacks",
        "user_code",
        "hf_events",
        "hf_trainer",
        "random_state",
        "restoring",
    )
)


def import_block(body: str, more: Iterable[Import] = ()) -> str:
    """Return the import statements of a file: those of the names that its body mentions, and what was asked for."""
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", body)
    wanted = {known for name, known in _KNOWN.items() if re.search(rf"(?<![\w.]){name}\b", code)}
    wanted = {one for one in wanted if not re.search(rf"^((class|def) )?{one.known_as}\b", code, re.MULTILINE)}
    wanted |= {one for one in more if re.search(rf"(?<![\w.]){re.escape(one.known_as)}\b", code)}
    groups: list[list[str]] = [[], [], []]
    for module in sorted({one.module for one in wanted}, key=str.lower):
        groups[_group(module)] += _statements(module, [one for one in wanted if one.module == module])
    return "\n\n".join("\n".join(sorted(group, key=_order)) for group in groups if group)


def _group(module: str) -> int:
    top = module.partition(".")[0]
    return 2 if top in _OWN else 0 if top in sys.stdlib_module_names else 1


def _order(statement: str) -> tuple[bool, str]:
    return statement.startswith("from"), statement.lower()


def _statements(module: str, wanted: list[Import]) -> list[str]:
    plain = [str(one) for one in wanted if one.name is None]
    named = sorted(str(one).partition(" import ")[2] for one in wanted if one.name is not None)
    return plain + ([f"from {module} import {', '.join(named)}"] if named else [])
