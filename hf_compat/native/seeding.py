"""Seed a native module as HF's Trainer seeds itself when it is made, with the seed of the arguments or of Lightning."""

from __future__ import annotations

from dataclasses import fields

from hf_compat.hf.arguments import TrainingArguments
from hf_compat.plan.argument_support import default_of
from hf_compat.runtime.seeding import enable_full_determinism, seed_of_lightning, set_seed


def seed_from(args: TrainingArguments) -> None:
    """Seed every generator with `args.seed`; where it is the default, with the seed of `seed_everything`.

    All ranks draw the same order of samples then, which is what they share out.

    Args:
        args: `seed` and `full_determinism`.
    """
    by_lightning = seed_of_lightning()
    default = {field.name: default_of(field) for field in fields(args)}["seed"]
    seed = by_lightning if by_lightning is not None and args.seed == default else args.seed
    if args.full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
