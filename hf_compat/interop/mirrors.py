"""Modules that replace those of `transformers`, with our names where we have them and its own otherwise.

Objects of our classes are instances of the `transformers` classes that they replace.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Container, Iterator

from hf_compat.runtime.inspection import package_of
from hf_compat.runtime.text import Absent, as_import_error, brief, need

# Modules that replace those of `transformers` → our modules → the names there. Other names are transformers' own.
_HOMES: dict[str, dict[str, str]] = {
    "data": {"data.collators": "default_data_collator"},
    "debug_utils": {"hf.enums": "DebugOption"},
    "integrations": {"callbacks.trackers": "TensorBoardCallback WandbCallback"},
    "integrations.integration_utils": {"callbacks.trackers": "TensorBoardCallback WandbCallback"},
    "optimization": {"optim.lr_schedulers": "get_scheduler"},
    "trainer_callback": {
        "hf.callbacks": "CallbackHandler DefaultFlowCallback EarlyStoppingCallback PrinterCallback ProgressCallback "
        "TrainerCallback",
        "hf.state": "ExportableState TrainerControl TrainerState",
    },
    "trainer_pt_utils": {
        "runtime.nested": "find_batch_size nested_detach nested_numpify",
        "hf.argument_values": "AcceleratorConfig",
        "hf.metrics": "metrics_format",
        "optim.label_smoothing": "LabelSmoother",
        "optim.stepping": "LayerWiseDummyOptimizer LayerWiseDummyScheduler",
    },
    "trainer_seq2seq": {"trainer": "Trainer"},
    "trainer_utils": {
        "checkpoint.layout": "PREFIX_CHECKPOINT_DIR",
        "checkpoint.choice": "get_last_checkpoint",
        "data.collators": "RemoveColumnsCollator",
        "hf.enums": "EvaluationStrategy HubStrategy IntervalStrategy SaveStrategy SchedulerType",
        "hf.metrics": "EvalLoopOutput EvalPrediction PredictionOutput TrainOutput denumpify_detensorize speed_metrics",
        "hf.search": "BestRun HPSearchBackend default_compute_objective default_hp_space_optuna",
        "runtime.inspection": "has_length number_of_arguments",
        "runtime.seeding": "enable_full_determinism seed_worker set_seed",
    },
    "training_args": {"hf.arguments": "TrainingArguments", "hf.enums": "OptimizerNames ParallelMode"},
    "training_args_seq2seq": {"hf.arguments": "Seq2SeqTrainingArguments TrainingArguments"},
}
# Module → name → our module that has it
MIRRORS = {
    module: {name: home for home, names in homes.items() for name in names.split()} for module, homes in _HOMES.items()
}


def mirror(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a module that replaces one of `transformers`.

    Args:
        module: The module's full name. Names that are not ours are loaded from transformers when needed.
    """
    name_within = module.removeprefix("hf_compat.")
    ours, upstream = MIRRORS[name_within], f"transformers.{name_within}"

    def lookup(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {brief(module)} has no attribute {brief(name)}")
        with as_import_error(name, module):
            if name in ours:
                return pkgutil.resolve_name(f"hf_compat.{ours[name]}:{name}")
            need("transformers", "[transformers]", f"`{module}.{name}`")
            theirs = importlib.import_module(upstream)
            if name in dir(theirs):
                return getattr(theirs, name)
        raise AttributeError(f"neither {brief(module)} nor {brief(upstream)} has {brief(name)}")

    return lookup, lambda: sorted(ours)


# Libraries test for these classes with `isinstance`. Arguments are adopted instead (`arguments.py`), and callbacks
# that a Trainer adds by itself have both classes (`transformers_models.py`).
_ASKED_FOR = frozenset({"Trainer", "Seq2SeqTrainer"})


_WAY_OUT = "override or call a method that `hf_compat.Trainer` has, or run the script with transformers itself"


def acknowledge(ours: object, theirs: object) -> None:
    """Make our class a subclass of transformers' own, and inherit only its name.

    A library that has imported transformers' class before `patch()` then finds our objects to be instances of it.
    """
    if not (isinstance(ours, type) and isinstance(theirs, type)) or ours.__name__ not in _ASKED_FOR:
        return
    if not issubclass(ours, theirs):
        hidden = {name: Absent(name, _WAY_OUT) for name in set(dir(theirs)) - set(dir(ours))}
        ours.__bases__ = (
            *ours.__bases__,
            type(theirs.__name__, (theirs,), {**hidden, "__module__": theirs.__module__, "_stands_for": theirs}),
        )


def upstream_class_of(kind: type) -> type | None:
    """The class of transformers that a class made by `acknowledge` replaces, or None."""
    return vars(kind).get("_stands_for")


def subclasses_of(theirs: type, ours: type, known: Container[str]) -> Iterator[tuple[str, tuple[type, type]]]:
    """Pair transformers' subclasses of a class that ours replaces with classes that are subclasses of ours, too.

    Objects of transformers that we lack (a tracker's callback) then are instances of our class.
    """
    subclasses: list[type] = type.__subclasses__(theirs)
    for kind in subclasses:
        if package_of(kind) == "transformers" and not issubclass(kind, ours):
            if kind.__name__ not in known:
                yield kind.__name__, (kind, heir_of(kind, ours))  # type: ignore[arg-type]  # classes have a hash
            yield from subclasses_of(kind, ours, known)


@functools.cache
def heir_of(kind: type, ours: type) -> type:
    """Make a subclass of both, once for each pair."""
    content = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, ours), content)


def rebuilt_with_base(join: Callable[[type], type], kind: type, attributes: dict[str, object]) -> object:
    """Copy or unpickle an object of a class that `join` makes from `kind`. That class cannot be found by its name."""
    made: object = object.__new__(join(kind))
    vars(made).update(attributes)
    return made
