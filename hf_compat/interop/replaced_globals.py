"""What a script puts under a name of transformers' trainer modules after `patch()`.

transformers' Trainer looks these names up whenever it needs them, so that scripts change its ways by an assignment:
`transformers.trainer.DEFAULT_CALLBACKS.append(…)`. Lightning's engine reads a few of them; of the others it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from hf_compat.errors import warn_once

_TRAINER = "transformers.trainer"
# Modules whose globals transformers' Trainer reads when it trains.
_WATCHED = (_TRAINER, "transformers.trainer_seq2seq", "transformers.trainer_optimizer", "transformers.optimization")
# What our Trainer reads there, too; and what scripts import from there rather than the Trainer.
_READ = frozenset({"DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "get_scheduler"})
_IMPORTED = frozenset({"Trainer", "Seq2SeqTrainer"})

_before: dict[str, dict[str, object]] = {}  # module → name → what stood there when `patch()` was done


def remember_globals() -> None:
    """Note what stands under each name, where that is not noted yet."""
    for module in _WATCHED:
        if module in sys.modules:
            known = _before.setdefault(module, {})
            values = {name: _kept(value) for name, value in vars(sys.modules[module]).items()}
            known.update({name: value for name, value in values.items() if name not in known})


def forget_globals() -> None:
    """Look at these names no more."""
    _before.clear()


def global_of_trainer(name: str) -> object:
    """Return what a script has put under a name of `transformers.trainer`; None where it has put nothing there."""
    here = vars(sys.modules[_TRAINER]).get(name) if _TRAINER in _before else None
    return here if here is not None and not _same(_before[_TRAINER].get(name), here) else None


def tell_of_unread_globals() -> None:
    """Warn of what a script has put in places that transformers' Trainer reads, and ours does not."""
    found = sorted(_unread())
    if found:
        warn_once(
            f"The script has replaced {', '.join(f'`{name}`' for name in found)}, which transformers' Trainer would "
            "use; Lightning's engine does not.\n\nHint: override the method of Trainer that uses it in a subclass, or "
            "run the script with transformers itself."
        )


def _unread() -> Iterator[str]:
    for module, names in _before.items():
        for name, before in names.items():
            here = vars(sys.modules[module]).get(name)
            is_internal = name.startswith("__") or isinstance(before, ModuleType)
            if not is_internal and name not in _READ | _IMPORTED and not _same(before, here) and not _is_own(here):
                yield f"{module}.{name}"


def _kept(value: object) -> object:
    """Return a copy of what scripts change in place, and anything else itself."""
    return value.copy() if type(value) in (list, dict) else value  # type: ignore[attr-defined]  # both have it


def _same(before: object, here: object) -> bool:
    return before == here if type(here) in (list, dict) else before is here


def _is_own(value: object) -> bool:
    """Return whether it is transformers' or ours: a second `patch()`, or transformers itself, has put it there."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("transformers", "hf_compat")
