"""Names that the installed transformers has and an older release has not: what a stand-in for that release hides.

python tests/sweeps/releases/names.py FILE       # write the names of the transformers that is installed
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

ABSENT = Path(__file__).with_name("absent_names.json")
HOMES = (
    "transformers.trainer_utils", "transformers.trainer_pt_utils", "transformers.training_args",
    "transformers.trainer_callback", "transformers.optimization", "transformers.data.data_collator",
    "transformers.integrations.integration_utils", "transformers.trainer_jit_checkpoint", "transformers.trainer",
    "transformers.training_args_seq2seq", "transformers.trainer_seq2seq", "transformers.hf_argparser",
    "transformers.loss.loss_utils", "transformers.modelcard",
)  # fmt: skip
TRAINER = "transformers.trainer:Trainer"


def names_here() -> dict[str, list[str] | None]:
    """Return what each module of the installed transformers defines; None for a module that it has not."""
    found: dict[str, list[str] | None] = {}
    for home in HOMES:
        try:
            module = importlib.import_module(home)
        except ImportError:
            found[home] = None
            continue
        found[home] = sorted(n for n, value in vars(module).items() if getattr(value, "__module__", None) == home)
    found[TRAINER] = sorted(vars(importlib.import_module("transformers.trainer").Trainer))
    return found


def absent_from(old: dict[str, list[str] | None], new: dict[str, list[str] | None]) -> dict[str, list[str] | None]:
    """Return the names of `new` that `old` has not; None for a whole module."""
    lacking = {home: None if old[home] is None else sorted(set(new[home] or ()) - set(old[home])) for home in new}
    return {home: names for home, names in lacking.items() if names is None or names}


def hide(release: str) -> None:
    """Take from the transformers of this process what a release has not. Its own trainers are no use after it."""
    for home, names in json.loads(ABSENT.read_text())[release].items():
        if names is None:
            sys.modules[home] = None  # an import of it fails
            continue
        module, _, attribute = home.partition(":")
        place = importlib.import_module(module)
        for name in names:
            delattr(getattr(place, attribute) if attribute else place, name)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(names_here()))
