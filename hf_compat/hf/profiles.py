"""Defaults of another generation of transformers: what an argument is where nobody has set it.

A profile changes defaults and nothing else: a value that somebody gives counts in each of them. While our names stand
in the place of the installed release's (`patch()`, `hf-compat run`), a script's arguments have that release's defaults.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hf_compat.hf.argument_values import COMPAT, ArgumentCheck, ArgumentValue, read_as
from hf_compat.hf.legacy import Translation

VARIABLE = "HF_COMPAT_PROFILE"
NEWEST = "5"
# Generation → the defaults of its last release, where they are not the same in all of them. `use_cache=None` leaves the
# model's own, as 4.x, which had no such argument. `python tests/hf/defaults_of_4_57.py` compares with the release.
PROFILES: dict[str, Translation] = {
    "4": {"report_to": "all", "trackio_space_id": "trackio", "use_cache": None},
    NEWEST: {"report_to": "none", "trackio_space_id": None, "use_cache": False},
}
# The releases that a generation's defaults are of, for people.
RELEASES = {"4": "4.57", NEWEST: "5.23"}
# What None meant where it was written: 4.x took it for the default.
_NONE_IS_DEFAULT = ("report_to",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """The release that ours stands in for.

    Args:
        release: Its version.
        defaults: What its arguments are where nobody has set them, and ours are not.
    """

    release: str
    defaults: Translation

    @property
    def generation(self) -> str:
        """The generation that it is of, of those that are known."""
        generation = self.release.partition(".")[0]
        return generation if generation in PROFILES else NEWEST


_guests: list[Guest] = []  # at most one


def follow(guest: Guest | None) -> None:
    """Take a release's defaults for those of its generation, and that one for the usual; None takes it back."""
    _guests[:] = [] if guest is None else [guest]


def followed() -> Guest | None:
    """Return the release that ours stands in for."""
    return _guests[0] if _guests else None


def release_of(profile: str) -> str:
    """Return the release whose defaults a profile has, for people."""
    return next((one.release for one in _guests if one.generation == profile), RELEASES[profile])


def generation_beside() -> str | None:
    """Return the generation of the transformers that is loaded, else installed; None where there is none."""
    release: object = getattr(sys.modules.get("transformers"), "__version__", None) or _installed_release()
    return None if release is None else str(release).partition(".")[0]


@functools.cache
def _installed_release() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_profile(
    named: object,
    given: Mapping[str, ArgumentValue],
    known: Collection[str],
    checks: Mapping[str, ArgumentCheck],
    ours: Mapping[str, ArgumentCheck],
) -> tuple[str, Translation]:
    """Return a profile, and its defaults of the arguments that are not given.

    Args:
        named: What the argument `compat`, or the variable HF_COMPAT_PROFILE, says.
        given: What was given, by today's names.
        known: Names that the class takes.
        checks: What its arguments may be; a default of a subclass's own stays.
        ours: The same of the class of ours that it is, or comes of.

    Raises:
        ArgumentError: There is no such profile.
    """
    profile = str(read_as(VARIABLE, COMPAT, named))
    of_guest = (one.defaults for one in _guests if one.generation == profile)
    return profile, {
        name: default
        for name, default in next(of_guest, {} if profile == NEWEST else PROFILES[profile]).items()
        if name in known and not _is_given(name, given) and checks[name].default == ours[name].default
    }


def _is_given(name: str, given: Mapping[str, ArgumentValue]) -> bool:
    return name in given and not (given[name] is None and name in _NONE_IS_DEFAULT)
