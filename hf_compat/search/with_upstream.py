"""Searches on ray and on wandb by transformers' own functions, which call this Trainer's methods."""

from __future__ import annotations

from collections.abc import Callable

from hf_compat.callbacks.trackers import TensorBoardCallback, WandbCallback
from hf_compat.errors import ArgumentError, SearchError, UnknownArgument
from hf_compat.hf.search import BestRun
from hf_compat.interop.releases import of_transformers
from hf_compat.interop.transformers_models import known_to_transformers
from hf_compat.runtime.text import brief, did_you_mean, shown
from hf_compat.search.trials import Directions, Options
from hf_compat.training_run.interface import TrainerApi

_OF_SWEEPS = ("sweep_id", "project", "name", "entity", "metric")


def search_ray(host: TrainerApi, n_trials: int | None, direction: Directions, options: Options) -> BestRun:
    """Search on ray, which trains copies of the Trainer in its own processes. `options` are those of `ray.tune.run`.

    The `run_summary` of the result is ray's analysis. The variable RAY_SCOPE chooses the result of a trial.
    """
    search = _upstream("ray", direction)
    board = host.pop_callback(TensorBoardCallback)  # an open file cannot be sent to another process
    # nor can a model, and each trial makes its own
    host.model_wrapped = host.callback_handler.model = None  # type: ignore[assignment]
    try:
        best = search(host, 1 if n_trials is None else n_trials, direction, **options)
    finally:
        if board is not None:
            host.add_callback(board)
    return BestRun(*best)


def search_wandb(host: TrainerApi, n_trials: int | None, direction: Directions, options: Options) -> BestRun:
    """Search as a sweep of Weights & Biases, whose server proposes the trials.

    `sweep_id` continues a sweep. `project`, `entity` and `name` are those of a new one. wandb compares `metric`
    (`eval/loss`). The `run_summary` of the result is the sweep's id.
    """
    for name, value in options.items():
        if name not in _OF_SWEEPS:
            hint = did_you_mean(name, _OF_SWEEPS, f"wandb takes {', '.join(_OF_SWEEPS)}.")
            raise UnknownArgument(f"The search got an unknown argument `{shown(name, value)}`.\n\nHint: {hint}")
        if value is not None and not (isinstance(value, str) and value):
            raise ArgumentError(f"`{shown(name, value)}` is not a text.\n\nHint: leave it out, or give a name.")
    if host.args.world_size > 1:
        raise ArgumentError(
            f"A sweep of wandb gives its hyperparameters to one process, and there are {host.args.world_size}.\n\n"
            "Hint: use `backend='optuna'`."
        )
    search = _upstream("wandb", direction)
    held = host.pop_callback(WandbCallback)
    kind = known_to_transformers(type(held) if isinstance(held, WandbCallback) else WandbCallback)
    host.add_callback(held if isinstance(held, kind) else kind())
    space = host.hp_space(None)
    space.setdefault("metric", {})
    host.hp_space = lambda trial: space
    given = {name: value for name, value in options.items() if value is not None}
    best = BestRun(*search(host, n_trials, direction, **given))
    if best.run_id is None:
        raise SearchError(f"No run of the sweep {best.run_summary} was completed.\n\nHint: read wandb's messages.")
    return best


def _upstream(backend: str, direction: Directions) -> Callable[..., BestRun]:
    """Find upstream's search. Its result has the fields of ours."""
    if not isinstance(direction, str):
        raise ArgumentError(f"`{shown('direction', direction)}`: {backend} takes one.\n\nHint: use `backend='optuna'`.")
    found: Callable[..., BestRun] = of_transformers(
        "integrations.integration_utils", f"run_hp_search_{backend}", f"`backend={brief(backend)}`"
    )
    return found
