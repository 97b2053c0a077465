"""Room on the disk for the checkpoints of a run, and in memory."""

from __future__ import annotations

import math
import os
import shutil

from hf_compat.hf.enums import SaveStrategy
from hf_compat.tools.isolation.plan import real_path
from hf_compat.tools.preflight.plan_checks import intervals
from hf_compat.tools.preflight.session import Session
from hf_compat.tools.preflight.subject import existing_parent, weights_in_bytes

CHECK = "disk space"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_words(size: float) -> str:
    """Return a number of bytes for people."""
    place = min(int(math.log(size, 1024)), len(_UNITS) - 1) if size >= 1 else 0
    return f"{size / 1024**place:.{0 if place == 0 else 1}f} {_UNITS[place]}"


def free_memory() -> int | None:
    """Return the bytes of memory that are free; None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def check_space(session: Session) -> None:
    """Compare the checkpoints that the run will keep with the room for them, and look whether anybody may write."""
    place = existing_parent(session.output_dir)
    # The checkpoints that the run writes
    args, counts = session.trainer.args, session.counts
    strategy = SaveStrategy(args.save_strategy)
    if counts is None or strategy == SaveStrategy.NO or counts.max_updates <= 0:
        saves = 0
    else:
        if strategy == SaveStrategy.EPOCH:
            saves = 1 if counts.is_endless else counts.num_train_epochs
        else:
            steps = intervals(session, counts.max_updates)
            every = steps["save"] if strategy == SaveStrategy.STEPS else steps["eval"]
            saves = max(math.ceil(counts.max_updates / every), 1) if every > 0 else 1
    with session.checking(CHECK):
        if saves == 0:
            return
        if not os.access(real_path(place), os.W_OK):
            session.error(
                CHECK, f"`output_dir={session.output_dir!r}` cannot be written to.", "name a folder that can be"
            )
        size, how = _checkpoint_bytes(session)
        # How many stand on the disk together: old ones are removed once a new one is whole
        args = session.trainer.args
        if not args.save_total_limit:
            kept = saves
        else:
            best = 1 if args.load_best_model_at_end and args.save_total_limit == 1 else 0
            kept = min(args.save_total_limit + best + 1, saves)
        needed, free = size * kept, shutil.disk_usage(real_path(place)).free
        session.measured.append(
            f"a checkpoint takes {in_words(size)} ({how}); of {_counted(saves)} {kept} are there at once: "
            f"{in_words(needed)} of the {in_words(free)} that are free in {place}"
        )
        if needed > free:
            _tell(session, size, kept, saves, free, place)


def _tell(session: Session, size: int, kept: int, saves: int, free: int, place: str) -> None:
    fits = free // max(size, 1)
    way_out = f"set `save_total_limit={max(fits - 2, 1)}`, save less often, or make room" if fits > 1 else "make room"
    if not session.trainer.args.save_only_model:
        way_out += "; `save_only_model=True` leaves out what it takes to resume"
    session.error(
        CHECK,
        f"The run keeps {kept} checkpoints of {in_words(size)} at once (of {_counted(saves)} that it writes): "
        f"{in_words(size * kept)}, and {in_words(free)} are free in {place}.",
        way_out,
    )


def _counted(saves: int) -> str:
    return f"{saves} checkpoint{'s' if saves != 1 else ''}"


def _checkpoint_bytes(session: Session) -> tuple[int, str]:
    """Return the size of a checkpoint, and how it is known."""
    if session.checkpoint_bytes is not None:
        return session.checkpoint_bytes, "measured"
    weights = weights_in_bytes(session.trainer.model)
    return weights * (1 if session.trainer.args.save_only_model else 3), "estimated by its weights"
