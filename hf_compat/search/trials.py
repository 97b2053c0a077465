"""The backends of a search, the checks before it begins, and what a trial sets and returns."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from enum import Enum

from hf_compat.errors import ArgumentError, MissingSearchBackend, OverrideError, SearchError, warn_once
from hf_compat.hf import search
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.metric_names import is_error, is_score
from hf_compat.hf.rows import ROWS
from hf_compat.hf.search import BestRun, HPSearchBackend, Metrics, Objective, Space, Trial
from hf_compat.interop.releases import of_transformers
from hf_compat.runtime.console import SharedLogger
from hf_compat.runtime.text import brief, check_callables, did_you_mean, is_installed, pip_install, shown
from hf_compat.training_run.interface import TrainerApi


def checked_objective(host: TrainerApi, metrics: Metrics) -> Objective:
    """Compute the objective of an evaluation."""
    if host.compute_objective is search.default_compute_objective:
        _tell_of_direction(host._search_direction, metrics)
    objective = host.compute_objective(metrics.copy())
    values = objective if isinstance(objective, Sequence) and not isinstance(objective, str) else [objective]
    # also one of NumPy's or torch's
    if values and all(hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1 for value in values):
        return objective
    known = ", ".join(metrics)
    raise OverrideError(
        f"`{shown('compute_objective', objective)}` is not a number. The evaluation gave {known}.\n\n"
        "Hint: return a number, or a list of numbers if the search has several directions."
    )


def _tell_of_direction(direction: str | list[str] | None, metrics: Metrics) -> None:
    """Warn of a default objective that a search moves away from what the names of its metrics say."""
    names = list(search.ranked_metrics(metrics)) or ["eval_loss"]
    wrong, kind = (is_score, "scores") if direction == "minimize" else (is_error, "errors")
    found = [name for name in names if wrong(name)]
    if found and isinstance(direction, str):
        other = "maximize" if direction == "minimize" else "minimize"
        warn_once(
            f"The search has {shown('direction', direction)}, and its objective is by default the sum of "
            f"{', '.join(names)}, of which {', '.join(found)} look like {kind}.\n\nHint: pass `direction='{other}'`, "
            "or a `compute_objective`."
        )


logger = SharedLogger(__name__, "transformers.trainer")

Directions = str | list[str]
Options = dict[str, object]
Search = Callable[[TrainerApi, int | None, Directions, Options], BestRun | list[BestRun] | None]


# Backend → the module that it needs, and an argument of `pip_install`.
PACKAGES = {
    HPSearchBackend.OPTUNA: ("optuna", "[search]"),
    HPSearchBackend.RAY: ("ray.tune", "'ray[tune]'"),
    HPSearchBackend.WANDB: ("wandb", "[wandb]"),
}


def search_of(backend: HPSearchBackend) -> tuple[Search, Callable[..., Space]]:
    """Import the function that runs a search on a backend, and the default space."""
    is_ours = backend == HPSearchBackend.OPTUNA  # the other searches, and their spaces, are transformers' own
    home = importlib.import_module(f"hf_compat.search.{'with_optuna' if is_ours else 'with_upstream'}")
    space = search.default_hp_space_optuna
    if not is_ours:
        space = of_transformers(
            "trainer_utils", f"default_hp_space_{backend.value}", f"`backend={brief(backend.value)}`"
        )
    return getattr(home, f"search_{backend.value}"), space


def missing_package_of(backend: HPSearchBackend) -> tuple[str, str] | None:
    """Name a missing package, and the argument of `pip_install`. None if nothing is missing."""
    guest = [] if backend == HPSearchBackend.OPTUNA else [("transformers", "[transformers]")]
    return next((one for one in [PACKAGES[backend], *guest] if not is_installed(one[0])), None)


def chosen_backend(wanted: str | HPSearchBackend | None) -> HPSearchBackend:
    """Choose the backend of a search, by default the first one that is installed."""
    if wanted is None:
        found = [backend for backend in PACKAGES if missing_package_of(backend) is None]
        if not found:
            ways = "\n".join(f"  {pip_install(install)}" for _, install in PACKAGES.values())
            raise MissingSearchBackend(
                f"No package that can search is installed.\n\nHint: install one of these:\n{ways}"
            )
        if len(found) > 1:
            logger.info(f"The search runs on {found[0].value}. `backend=…` chooses another.")
        return found[0]
    backend = HPSearchBackend(wanted)
    missing = missing_package_of(backend)
    if missing is not None:
        raise MissingSearchBackend(
            f"`backend={brief(backend.value)}` needs the package {missing[0]}, which is not installed.\n\n"
            f"Hint: {pip_install(missing[1])}"
        )
    return backend


def name_of_trial(backend: HPSearchBackend, trial: Trial, hp_name: Callable[..., str] | None) -> str:
    """Name a trial's folder, with `hp_name` or by the trial's id."""
    if hp_name is not None:
        name = hp_name(trial)
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`hp_name` has returned {brief(name)}.\n\nHint: return the trial's name.")
        return name
    if backend == HPSearchBackend.OPTUNA:
        return f"run-{trial.number}"
    if backend == HPSearchBackend.RAY:
        return f"run-{importlib.import_module('ray.tune').get_context().get_trial_id()}"
    return f"run-{importlib.import_module('wandb').run.id}"


_DIRECTIONS = ("minimize", "maximize")


def check_search(model_init: object, n_trials: int | None, direction: Directions, **functions: object) -> None:
    """Refuse a search that cannot be run."""
    if model_init is None:
        raise SearchError(
            "A search needs a new model for each trial, and this Trainer has no `model_init`.\n\n"
            "Hint: pass `model_init=` to the Trainer in place of `model=`."
        )
    check_callables(**functions)
    is_count = isinstance(n_trials, int) and not isinstance(n_trials, bool) and n_trials >= 0
    if n_trials is not None and not is_count:
        raise ArgumentError(f"`{shown('n_trials', n_trials)}` is not a number of trials.\n\nHint: `n_trials=20`, say.")
    directions = list(direction) if isinstance(direction, (list, tuple)) else [direction]
    if not directions or any(isinstance(one, str) and one not in _DIRECTIONS for one in directions):
        raise ArgumentError(
            f"`{shown('direction', direction)}` is not known.\n\nHint: 'minimize', 'maximize', or a list of these."
        )


def space_of(host: TrainerApi, backend: HPSearchBackend, trial: Trial) -> Space:
    """Choose the names and values that a trial sets."""
    if backend == HPSearchBackend.OPTUNA:
        space = host.hp_space(trial)
        if not isinstance(space, dict):
            raise OverrideError(
                f"`{shown('hp_space', space)}` is not a dict.\n\nHint: return the names and values of a trial."
            )
        return space
    if backend == HPSearchBackend.RAY:
        trial.pop("wandb", None)
    return dict(trial)


def set_from_trial(args: TrainingArguments, name: str, value: object) -> None:
    """Set an argument to a trial's value."""
    if not hasattr(args, name):
        close = did_you_mean(name, vars(args), "`model_init(trial)` may read it.")
        logger.warning(f"The trial sets {shown(name, value)}, which is not a field of the training arguments. {close}")
        return
    old = getattr(args, name)
    try:
        # Convert the value to the argument's type, as ray may draw a seed of 17.3. The argument itself reads texts
        # for truth values, lists and dicts.
        reads_itself = isinstance(old, (bool, list, tuple, dict)) and isinstance(value, str)
        if not (old is None or value is None or reads_itself or isinstance(old, Enum)):
            value = type(old)(value)
        setattr(args, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"The trial sets `{shown(name, value)}`, which cannot be set: {error}") from error
    row = ROWS.get(name)
    if row is not None and row.of_trainer and value != old:
        logger.warning(f"The trial sets {name}, which the Trainer has read before the search, so it does not change.")
