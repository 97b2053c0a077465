"""Our classes in place of those in `transformers`, for scripts that are not to be changed. HF words only."""

from __future__ import annotations

import importlib

from hf_compat.errors import UnsupportedArgument
from hf_compat.runtime.text import need

# Where transformers has each name besides its top level.
_HOMES = {
    "Trainer": "transformers.trainer",
    "TrainingArguments": "transformers.training_args",
    "HfArgumentParser": "transformers.hf_argparser",
}
_NOT_YET = {
    "Seq2SeqTrainer": "transformers.trainer_seq2seq",
    "Seq2SeqTrainingArguments": "transformers.training_args_seq2seq",
}


def _refusing(name: str) -> type:
    class Refusing:
        """Stands in for a class that is not here yet, so that nothing trains elsewhere unnoticed."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            raise UnsupportedArgument(
                f"`{name}` is not supported by `hf-compat run` yet.\n\n"
                "Hint: use Trainer, or run the script with transformers itself."
            )

    Refusing.__name__ = Refusing.__qualname__ = name
    return Refusing


def patch_transformers(replacements: dict[str, type]) -> None:
    """Put classes of the same names in the place of transformers' own; scripts that import them later get these.

    Args:
        replacements: Name → class: `Trainer`, `TrainingArguments`, `HfArgumentParser`.

    Raises:
        MissingPackage: transformers is not installed.
    """
    need("transformers", "'hf-compat[transformers]'", "`hf-compat run`")
    # importing this one later would load the package again, and bring its own classes back
    importlib.import_module("transformers.processing_utils")
    transformers = importlib.import_module("transformers")
    stand_ins = {**replacements, **{name: _refusing(name) for name in _NOT_YET}}
    for name, home in {**_HOMES, **_NOT_YET}.items():
        if name in stand_ins:
            setattr(transformers, name, stand_ins[name])
            setattr(importlib.import_module(home), name, stand_ins[name])
