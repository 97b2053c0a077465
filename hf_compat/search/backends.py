"""What a search runs on: which packages there are, what they are called in errors, and the names of their trials.

A backend's own file is imported when a search runs on it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_compat.errors import ArgumentError, MissingSearchBackend
from hf_compat.hf.search import (
    BestRun,
    HPSearchBackend,
    Space,
    Trial,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
)
from hf_compat.runtime.text import brief, is_installed, need, shown
from hf_compat.search.trials import SearchHost

logger = logging.getLogger(__name__)

Directions = str | list[str]
Options = dict[str, object]
Search = Callable[[SearchHost, int | None, Directions, Options], BestRun | list[BestRun] | None]


@dataclass(frozen=True, kw_only=True)
class SearchPackage:
    """A package that proposes trials.

    Args:
        module: The module that a search needs.
        install: What `pip install` takes.
        home: The module of ours that runs a search on it, in its function `search`.
        default_space: The space where none is given.
    """

    module: str
    install: str
    home: str
    default_space: Callable[..., Space]

    def search(self) -> Search:
        """Return what runs a search on it."""
        run: Search = importlib.import_module(f"hf_compat.search.{self.home}").search
        return run


PACKAGES = {
    HPSearchBackend.OPTUNA: SearchPackage(
        module="optuna",
        install="'hf-compat[search]'",
        home="with_optuna",
        default_space=default_hp_space_optuna,
    ),
    HPSearchBackend.RAY: SearchPackage(
        module="ray.tune", install="'ray[tune]'", home="with_ray", default_space=default_hp_space_ray
    ),
    HPSearchBackend.WANDB: SearchPackage(
        module="wandb", install="'hf-compat[wandb]'", home="with_wandb", default_space=default_hp_space_wandb
    ),
}


def chosen_backend(wanted: str | HPSearchBackend | None) -> HPSearchBackend:
    """Return the backend of a search: the one that is asked for, else the first that is installed.

    Raises:
        ArgumentError: There is no backend of this name.
        MissingSearchBackend: Its package is not installed, or none is.
    """
    if wanted is None:
        found = [backend for backend, package in PACKAGES.items() if is_installed(package.module)]
        if not found:
            ways = "\n".join(f"  pip install {package.install}" for package in PACKAGES.values())
            raise MissingSearchBackend(
                f"No package that can search is installed.\n\nHint: install one of these:\n{ways}"
            )
        if len(found) > 1:
            logger.info("The search runs on %s; `backend=…` chooses another.", found[0].value)
        return found[0]
    backend = HPSearchBackend(wanted)
    package = PACKAGES[backend]
    if not is_installed(package.module):
        raise MissingSearchBackend(
            f"`backend={backend.value!r}` needs the package {package.module}, which is not installed.\n\n"
            f"Hint: pip install {package.install}"
        )
    return backend


def name_of_trial(backend: HPSearchBackend, trial: Trial, hp_name: Callable[..., str] | None) -> str:
    """Return the name of a trial's folder: what `hp_name` says, else `run-` and the trial's id.

    Raises:
        ArgumentError: `hp_name` gives no text.
    """
    if hp_name is None:
        return f"run-{_IDS[backend](trial)}"
    name = hp_name(trial)
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"`hp_name` has returned {brief(name)}.\n\nHint: return the trial's name.")
    return name


def _id_of_optuna(trial: Trial) -> object:
    return trial.number


def _id_of_ray(trial: Trial) -> object:
    return need("ray.tune", "'ray[tune]'", "`backend='ray'`").get_context().get_trial_id()


def _id_of_wandb(trial: Trial) -> object:
    return need("wandb", "'hf-compat[wandb]'", "`backend='wandb'`").run.id


_IDS: Mapping[HPSearchBackend, Callable[[Trial], object]] = {
    HPSearchBackend.OPTUNA: _id_of_optuna,
    HPSearchBackend.RAY: _id_of_ray,
    HPSearchBackend.WANDB: _id_of_wandb,
}


def text_of(options: Options, name: str) -> str | None:
    """Return an option that is a text; None where it is not given.

    Raises:
        ArgumentError: It is something else.
    """
    value = options.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise ArgumentError(f"`{shown(name, value)}` is no text.\n\nHint: leave it out, or give a name.")
