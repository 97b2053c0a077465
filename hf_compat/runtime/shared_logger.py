"""Loggers under whose names transformers logs the same, where our classes stand in the place of its own."""

from __future__ import annotations

import logging

_in_place_of_transformers: list[bool] = []  # at most one


def log_as_transformers(wanted: bool) -> None:
    """Log under transformers' names from now on, or under ours again."""
    _in_place_of_transformers[:] = [True] if wanted else []


class SharedLogger:
    """Logs what transformers logs too: on its logger in a patched process, where scripts listen; else on ours.

    Args:
        ours: The name of our logger.
        theirs: The name of transformers' logger.
    """

    def __init__(self, ours: str, theirs: str) -> None:
        self._ours = logging.getLogger(ours)
        self._theirs = logging.getLogger(theirs)
        self._told: set[str] = set()

    def warning(self, text: str) -> None:
        """Log a warning."""
        self._logger.warning(text, stacklevel=2)

    def warning_once(self, text: str) -> None:
        """Log a warning that a step gives rise to: the first time in this process."""
        if text not in self._told:
            self._told.add(text)
            self._logger.warning(text, stacklevel=2)

    def info(self, text: str) -> None:
        """Log a line of information."""
        self._logger.info(text, stacklevel=2)

    @property
    def _logger(self) -> logging.Logger:
        return self._theirs if _in_place_of_transformers else self._ours
