"""Libraries that rewrite transformers' Trainer as text, with `inspect.getsource` and `exec`: detected, and refused.

axolotl and unsloth look for lines of transformers' own source, replace some, and put what they have compiled into the
class. Lightning's engine stands in their place here: the edit would be lost, or break a run in its middle.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType

from hf_compat.errors import OverrideError

# Packages that read the Trainer's source in order to rewrite it.
_EDITORS = frozenset({"axolotl", "unsloth", "unsloth_zoo"})
_INSTEAD = (
    "{} `{}` as text, in order to rewrite transformers' source; the engine is Lightning's here, and has no such lines."
    "\n\nHint: override the method in a subclass of Trainer, or run the script with transformers itself."
)

_getsource = inspect.getsource


def watch_readers() -> None:
    """Refuse, from now on, to show our Trainer's source to code that would edit it."""
    inspect.getsource = _getsource_for_readers  # type: ignore[assignment]  # takes anything, as that does


def let_readers_be() -> None:
    """Take that back, unless somebody else has replaced the function since."""
    if inspect.getsource is _getsource_for_readers:
        inspect.getsource = _getsource


def _getsource_for_readers(object: Callable[..., object]) -> str:
    """Return the text of an object's source, as `inspect.getsource` does.

    Raises:
        OverrideError: It is of the Trainer, and who asks is a script or a package that edits it.
    """
    caller = sys._getframe(1)
    # Whether something is one of our Trainers, a method of theirs, or the module
    home = str(getattr(object, "__module__", None) or getattr(object, "__name__", ""))
    is_other_class = isinstance(object, type) and not object.__name__.endswith("Trainer")
    if (home.startswith("hf_compat.") and "trainer" in home and not is_other_class) and _may_edit(caller):
        raise OverrideError(_INSTEAD.format(f"{caller.f_globals.get('__name__')} reads", _name_of(object)))
    return _getsource(object)


def _name_of(candidate: object) -> str:
    return str(getattr(candidate, "__qualname__", candidate))


def _may_edit(frame: FrameType) -> bool:
    """Return whether a caller is a script, or a package known for it; tools that show source are neither."""
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _EDITORS:
        return True
    file = frame.f_globals.get("__file__")  # what a notebook's cells do not have
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return isinstance(file, str) and not file.startswith(installed) and "site-packages" not in file


def refuse_edited_methods(kind: type) -> None:
    """Look for methods of our own classes that compiled text has replaced.

    Args:
        kind: The class of a Trainer that is being made.

    Raises:
        OverrideError: There is one; the message names it and who has put it there.
    """
    for base in kind.__mro__:
        if base.__module__.startswith("hf_compat."):
            for name, value in vars(base).items():
                code = getattr(value, "__code__", None)
                if (
                    code is not None
                    and code.co_filename == "<string>"
                    and not (sys.argv[:1] == ["-c"] and getattr(value, "__module__", None) == "__main__")
                ):
                    who = value.__globals__.get("__name__")
                    raise OverrideError(_INSTEAD.format(f"{who} has compiled", f"{kind.__name__}.{name}"))
