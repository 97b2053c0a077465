"""The names of transformers that this package has, by module, and the module that has a name today.

`tests/migration/test_names.py` compares the tables with the packages.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_compat.interop import mirrors
from hf_compat.interop.former_names import MOVED, MOVED_MODULES, RENAMED
from hf_compat.tools.migration.gone_names import GONE, is_gone
from hf_compat.tools.migration.installed_names import InstalledNames, installed_names
from hf_compat.tools.migration.report import Target

# At the top level of both packages, in some release.
TOP_LEVEL = frozenset(
    {
        "DefaultFlowCallback", "EarlyStoppingCallback", "EvalPrediction", "HfArgumentParser", "IntervalStrategy",
        "PrinterCallback", "ProgressCallback", "SchedulerType", "Seq2SeqTrainer", "Seq2SeqTrainingArguments",
        "Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments", "default_data_collator",
        "enable_full_determinism", "get_scheduler", "set_seed",
    }
)  # fmt: skip

# Names at the top level of this package that transformers has in a module of its own.
_IN_MODULES = frozenset(
    {
        "CallbackHandler", "EvalLoopOutput", "PredictionOutput", "SaveStrategy", "TensorBoardCallback", "TrainOutput",
        "WandbCallback", "get_last_checkpoint", "speed_metrics",
    }
)  # fmt: skip
PUBLIC = TOP_LEVEL | _IN_MODULES

# Modules of the same name in both packages → the names that are ours; any other name there is transformers' own.
MIRRORS: dict[str, frozenset[str]] = {
    module: frozenset(names) - RENAMED.keys()
    for module, names in mirrors.MIRRORS.items()
    if module.partition(".")[0] not in ("data", "integrations")  # of which names come from the top level
} | {"trainer_seq2seq": frozenset({"Seq2SeqTrainer", "Trainer"})}

ADAMW_DIFFERS = (
    "is torch's AdamW now, with the defaults of transformers' (eps=1e-6, weight_decay=0.0); torch adds eps after the "
    "bias correction, so the numbers differ slightly"
)


def renamed(name: str) -> str:
    """The current name of a name of transformers."""
    return RENAMED.get(name, name)


def home(module: str, name: str, *, ours: bool) -> str:
    """The module that has a name today."""
    mirror = module.removeprefix("transformers.")
    if ours and name in MIRRORS.get(mirror, ()):
        return "hf_compat" if name == "Seq2SeqTrainer" else f"hf_compat.{mirror}"
    if ours and name in (TOP_LEVEL if module == "transformers" else PUBLIC):
        return "hf_compat"
    return MOVED.get(f"{module}.{name}") or MOVED_MODULES.get(module, module)


def bound_by_star(module: str) -> set[str]:
    """The names of this package that a star import of a module binds: as far as is known without transformers."""
    theirs = installed_names("transformers")
    names = {name for name in PUBLIC if theirs is not None and theirs.exports(module, name)}
    names |= MIRRORS.get(module.removeprefix("transformers."), frozenset())
    names |= TOP_LEVEL if module == "transformers" else frozenset()
    return names | {old for old, today in RENAMED.items() if today in names}


class Found(NamedTuple):
    """The place of a name of transformers today. `reason` says why it cannot be imported, as far as is known."""

    module: str
    name: str
    reason: str | None = None


def is_beside_older(target: Target) -> bool:
    """Whether the result is for an installed release of 4.x, which has the names that transformers 5 lacks."""
    names = looked_up_in(target)
    return names is not None and names.version.startswith("4.")


def looked_up_in(target: Target) -> InstalledNames | None:
    """The names of the installed transformers. None if the result is for another generation."""
    names = installed_names("transformers")
    is_older = names is not None and names.version.startswith("4.")
    return None if target is Target.TRANSFORMERS_5 and is_older else names


def find(module: str, name: str, target: Target) -> Found:
    """Look up a name in a module of transformers. A name that has moved is found in its new place."""
    names = looked_up_in(target)
    if names is None or (names.version.startswith("4.") and name in GONE):
        return Found(module, name, is_gone(name))
    if names.can_import(f"{module}.{name}"):
        return Found(module, name)
    reason = is_gone(name)
    images = name.removesuffix("FeatureExtractor") + "ImageProcessor"
    if reason is None and name.endswith("FeatureExtractor") and names.has(f"transformers.{images}"):
        return Found("transformers", images)
    homes = () if name == "logger" else names.homes(name)  # each module may have its own
    if reason is None and len(homes) == 1:
        return Found(homes[0], name)
    nearby = f"; it is in {' and '.join(homes)}" if homes else ""
    return Found(module, name, reason or f"transformers {names.version} has no such name{nearby}")


def moved_path(path: str) -> str:
    """A dotted path with the current name of its module."""
    for old, today in MOVED_MODULES.items():
        if path == old or path.startswith(f"{old}."):
            return today + path.removeprefix(old)
    return path
