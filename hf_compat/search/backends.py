"""What a search runs on: which packages there are, what they are called in errors, and the names of their trials.

A backend's own file is imported when a search runs on it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
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
from hf_compat.runtime.text import brief, is_installed, need
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
        home: The module of ours that runs a search on it, and its function.
        default_space: The space where none is given.
        needs_transformers: The search is transformers' own.
    """

    module: str
    install: str
    home: tuple[str, str]
    default_space: Callable[..., Space]
    needs_transformers: bool = True

    def search(self) -> Search:
        """Return what runs a search on it."""
        module, name = self.home
        run: Search = getattr(importlib.import_module(f"hf_compat.search.{module}"), name)
        return run

    def missing(self) -> tuple[str, str] | None:
        """Return what is not installed of what a search needs, and what `pip install` takes."""
        guest = [("transformers", "'hf-compat[transformers]'")] if self.needs_transformers else []
        return next((one for one in [(self.module, self.install), *guest] if not is_installed(one[0])), None)


PACKAGES = {
    HPSearchBackend.OPTUNA: SearchPackage(
        module="optuna",
        install="'hf-compat[search]'",
        home=("with_optuna", "search"),
        default_space=default_hp_space_optuna,
        needs_transformers=False,
    ),
    HPSearchBackend.RAY: SearchPackage(
        module="ray.tune",
        install="'ray[tune]'",
        home=("with_upstream", "search_ray"),
        default_space=default_hp_space_ray,
    ),
    HPSearchBackend.WANDB: SearchPackage(
        module="wandb",
        install="'hf-compat[wandb]'",
        home=("with_upstream", "search_wandb"),
        default_space=default_hp_space_wandb,
    ),
}


def chosen_backend(wanted: str | HPSearchBackend | None) -> HPSearchBackend:
    """Return the backend of a search: the one that is asked for, else the first that is installed.

    Raises:
        ArgumentError: There is no backend of this name.
        MissingSearchBackend: Its package is not installed, or none is.
    """
    if wanted is None:
        found = [backend for backend, package in PACKAGES.items() if package.missing() is None]
        if not found:
            ways = "\n".join(f"  pip install {package.install}" for package in PACKAGES.values())
            raise MissingSearchBackend(
                f"No package that can search is installed.\n\nHint: install one of these:\n{ways}"
            )
        if len(found) > 1:
            logger.info("The search runs on %s; `backend=…` chooses another.", found[0].value)
        return found[0]
    backend = HPSearchBackend(wanted)
    missing = PACKAGES[backend].missing()
    if missing is not None:
        raise MissingSearchBackend(
            f"`backend={backend.value!r}` needs the package {missing[0]}, which is not installed.\n\n"
            f"Hint: pip install {missing[1]}"
        )
    return backend


def name_of_trial(backend: HPSearchBackend, trial: Trial, hp_name: Callable[..., str] | None) -> str:
    """Return the name of a trial's folder: what `hp_name` says, else `run-` and the trial's id.

    Raises:
        ArgumentError: `hp_name` gives no text.
    """
    if hp_name is not None:
        name = hp_name(trial)
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`hp_name` has returned {brief(name)}.\n\nHint: return the trial's name.")
        return name
    if backend == HPSearchBackend.OPTUNA:
        return f"run-{trial.number}"
    if backend == HPSearchBackend.RAY:
        return f"run-{need('ray.tune', PACKAGES[backend].install, '`backend=ray`').get_context().get_trial_id()}"
    return f"run-{need('wandb', PACKAGES[backend].install, '`backend=wandb`').run.id}"
