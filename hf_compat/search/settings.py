"""What a search checks before it begins, and what it sets before a trial."""

from __future__ import annotations

from enum import Enum

from hf_compat.errors import ArgumentError, OverrideError, SearchError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.search import HPSearchBackend, Space, Trial
from hf_compat.runtime.shared_logger import SharedLogger
from hf_compat.runtime.text import did_you_mean, shown
from hf_compat.search.backends import Directions
from hf_compat.search.trials import SearchHost

logger = SharedLogger(__name__, "transformers.trainer")

_DIRECTIONS = ("minimize", "maximize")
# Fields that the constructor has read: a trial's value comes too late, upstream as here.
_READ_BY_CONSTRUCTOR = ("disable_tqdm", "label_names", "label_smoothing_factor", "log_level", "report_to")


def check_search(model_init: object, n_trials: int | None, direction: Directions, **functions: object) -> None:
    """Refuse a search that cannot be run.

    Raises:
        SearchError: There is no `model_init`.
        ArgumentError: A setting that no search can follow.
    """
    if model_init is None:
        raise SearchError(
            "A search needs a new model for each trial, and this Trainer has no `model_init`.\n\n"
            "Hint: pass `model_init=` to the Trainer in place of `model=`."
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ArgumentError(f"`{shown(name, function)}` cannot be called.\n\nHint: pass a function.")
    is_count = isinstance(n_trials, int) and not isinstance(n_trials, bool) and n_trials >= 0
    if n_trials is not None and not is_count:
        raise ArgumentError(f"`{shown('n_trials', n_trials)}` is no number of trials.\n\nHint: `n_trials=20`, say.")
    wrong = [d for d in _as_sequence(direction) if isinstance(d, str) and d not in _DIRECTIONS]
    if wrong or not _as_sequence(direction):
        raise ArgumentError(
            f"`{shown('direction', direction)}` is not known.\n\nHint: 'minimize', 'maximize', or a list of these."
        )


def space_of(trainer: SearchHost, backend: HPSearchBackend, trial: Trial) -> Space:
    """Return names and values that a trial sets.

    Raises:
        OverrideError: `hp_space` gives no dict.
    """
    if backend == HPSearchBackend.OPTUNA:
        space = trainer.hp_space(trial)
        if not isinstance(space, dict):
            raise OverrideError(
                f"`{shown('hp_space', space)}` is no dict.\n\nHint: return the names and values of a trial."
            )
        return space
    if backend == HPSearchBackend.RAY:
        trial.pop("wandb", None)
    return dict(trial)


def set_from_trial(args: TrainingArguments, name: str, value: object) -> None:
    """Set an argument to a trial's value.

    Raises:
        ArgumentError: It cannot have that value.
    """
    if not hasattr(args, name):
        close = did_you_mean(name, vars(args), "`model_init(trial)` may read it.")
        logger.warning(f"The trial sets {shown(name, value)}, which is no field of the training arguments. {close}")
        return
    old = getattr(args, name)
    try:
        # A value in the type that the argument has: ray draws a seed of 17.3. Texts for truth values, lists and
        # dicts are left to the argument itself, which reads them.
        reads_itself = isinstance(old, (bool, list, tuple, dict)) and isinstance(value, str)
        if not (old is None or value is None or reads_itself or isinstance(old, Enum)):
            value = type(old)(value)
        setattr(args, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"The trial sets `{shown(name, value)}`, which cannot be set: {error}") from error
    if name in _READ_BY_CONSTRUCTOR and value != old:
        logger.warning(f"The trial sets {name}, which the Trainer has read before the search: it stays as it was.")


def _as_sequence(direction: Directions) -> list[str]:
    return list(direction) if isinstance(direction, (list, tuple)) else [direction]


def as_list(direction: Directions) -> Directions:
    """Return several directions as a list, which is how a search knows that there are several."""
    return list(direction) if isinstance(direction, (list, tuple)) else direction
