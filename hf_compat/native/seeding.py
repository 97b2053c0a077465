"""Seed a native module as HF's Trainer seeds itself when it is made, unless Lightning's `seed_everything` has."""

from __future__ import annotations

import warnings
from dataclasses import fields

from hf_compat.errors import HfCompatWarning
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.seeding import enable_full_determinism, seed_of_lightning, set_seed


def seed_from(args: TrainingArguments) -> None:
    """Seed every generator with `args.seed`; a seed of Lightning's holds where the arguments name none.

    All ranks draw the same order of samples then, which is what they share out.

    Args:
        args: `seed` and `full_determinism`.
    """
    by_lightning = seed_of_lightning()
    default = {field.name: default_of(field) for field in fields(args)}["seed"]
    if by_lightning is not None and args.seed == default:
        if args.full_determinism:
            enable_full_determinism(by_lightning)
        return
    if by_lightning is not None and by_lightning != args.seed:
        warnings.warn(
            f"`seed={args.seed}` of the arguments replaces the seed {by_lightning} of `seed_everything`.\n\n"
            "Hint: set one of them, or both to the same number.",
            HfCompatWarning,
            stacklevel=4,
        )
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)
