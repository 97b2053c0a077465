"""What every rank must have the same value of: arguments, the checkpoint, the number of updates.

Ranks that differ would wait for each other forever, so a difference is refused when a training begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_compat.checkpoint.run_lock import LONGEST_ID, Owner
from hf_compat.data.loader import last_shares
from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.rows import OWN_ROWS, ROWS
from hf_compat.plan.translate import RunCounts
from hf_compat.runtime.collectives import are_equal, as_numbers, as_text, bounds_of, gather_objects
from hf_compat.training_run.flags import FlagSources


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """List the values that differ between ranks, a line for each name: `max_steps` is 4 on rank 0, 6 on rank 1."""
    lines = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(name, "not set"), []).append(str(rank))
        if len(ranks) > 1:
            by_value = (f"{value} on rank{'s'[: len(on) - 1]} {', '.join(on)}" for value, on in ranks.items())
            lines.append(f"`{name}` is {'; '.join(by_value)}")
    return lines


def compare_updates(args: TrainingArguments, counts: RunCounts, loader: object, own: FlagSources) -> FlagSources:
    """Refuse data from which ranks get different numbers of updates. Return the sources of flags of all ranks."""
    if args.world_size == 1:
        return own
    hint, mine, shares = "pass the same data to every process.", repr(counts.max_updates), last_shares(loader)
    if shares and not shares[-1]:
        hint = "set `dataloader_drop_last=True`, or leave `even_batches` of `accelerator_config` at True."
        # the length of a split batch's parts counts the last round on every rank, as Accelerate's does
        if (
            AcceleratorConfig.from_any(args.accelerator_config).split_batches
            and args.max_steps <= 0 < counts.max_updates >= counts.updates_per_epoch
        ):
            own_share = shares[args.process_index * len(shares) // args.world_size]
            mine += f", with {own_share} samples in the last one of an epoch"
    sources = list(map(int, own))
    refuse_differences({"updates that the training data give": mine}, "training data", hint, sources)
    return FlagSources(*map(bool, sources))


@dataclass(slots=True)
class StartFacts:
    """What the ranks tell each other when a training begins. Afterwards it is what holds for all."""

    owner: Owner = field(default_factory=Owner)  # of the run's locks: the first rank
    # From what the number of updates follows, beside the arguments. None if it is not known yet, or differs
    data: str | None = None
    sources: FlagSources = field(default_factory=FlagSources)


def compare_arguments(
    args: TrainingArguments,
    checkpoint: str | bool | None,
    facts: StartFacts | None = None,
    before: Callable[[], object] | None = None,
) -> None:
    """Refuse arguments and checkpoints that differ between ranks, before the ranks wait for each other.

    All learn the facts in the same exchange, and hear of an error of what a rank does `before`.
    """
    facts = facts or StartFacts()
    if args.world_size == 1:
        if before is not None:
            before()
        return
    wanted = repr(os.path.basename(checkpoint) if isinstance(checkpoint, str) else checkpoint)
    rows, values = ROWS | OWN_ROWS, args.to_dict()
    mine = {name: repr(value) for name, value in values.items() if name in rows and not rows[name].per_rank}
    numbers = [facts.data is None, *bounds_of(facts.data or ""), *map(int, facts.sources)]
    numbers += as_numbers(facts.owner.id if args.process_index == 0 else None, LONGEST_ID)
    refuse_differences({**mine, "resume_from_checkpoint": wanted}, "arguments", numbers=numbers, before=before)
    is_unknown, highest, lowest, in_updates, in_windows, in_epochs, *of_owner = numbers
    facts.data = None if is_unknown or highest != -lowest else facts.data
    facts.sources = FlagSources(bool(in_updates), bool(in_windows), bool(in_epochs))
    facts.owner = Owner.of_id(as_text(of_owner)) or facts.owner


def refuse_differences(
    mine: dict[str, str],
    what: str,
    hint: str = "pass the same values to every process.",
    numbers: list[int] | None = None,
    before: Callable[[], object] | None = None,
) -> None:
    """Refuse values that differ between ranks. They are given as text. `what` is their name in the message."""
    if are_equal(repr(mine), numbers, before):
        return
    found = differences(gather_objects(mine))
    if found:
        raise ArgumentError(
            f"The processes of this run have different {what}. They would wait for each other forever, or not train on "
            "the same model and data.\n" + "\n".join(f"  {line}" for line in found) + f"\n\nHint: {hint}"
        )
