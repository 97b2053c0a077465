"""Leave the process group at the end of the process without a crash.

Gloo's threads free the tensors of the last collective after the process has its result, and need Python for that. Where
Python ends first, CPython before 3.14 ends such a thread by force, and the whole process with it: "terminate called
without an active exception", SIGABRT; the launcher reports a finished run as failed. `destroy_process_group` waits for
the threads only where nobody else holds the group, but a model under DDP and a device mesh hold it (pytorch/pytorch,
issue 190489).
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

from torch import distributed

TASKS = Path("/proc/self/task")
GLOO_THREAD = "pt_gloo_runloop"
SLEEPING = "S"

# A thread that waits for Python wakes as soon as this one sleeps, and is no longer seen asleep. Three looks in a row
# also see threads that wait one behind the other.
LOOKS = 3
SECONDS_BETWEEN = 0.001
GIVE_UP_SECONDS = 5.0


@functools.cache
def leave_at_exit() -> None:
    """Wait for Gloo's threads when the process ends; nothing happens at a second call.

    Exit handlers run in reverse order: a later one, such as that of `destroy_at_exit`, runs before the wait.
    """
    atexit.register(wait_for_gloo)


def destroy_at_exit() -> None:
    """Destroy the process group that this process has made, where it still stands at the end."""
    leave_at_exit()
    atexit.register(lambda: distributed.destroy_process_group() if distributed.is_initialized() else None)


def wait_for_gloo() -> None:
    """Wait until Gloo's threads sleep, at most 5 seconds: what they had to free is free then.

    Only Linux tells what a thread does; elsewhere one pause has to do.
    """
    if not TASKS.is_dir():
        time.sleep(0.05)
        return
    give_up, looks = time.monotonic() + GIVE_UP_SECONDS, 0
    while looks < LOOKS and time.monotonic() < give_up:
        time.sleep(SECONDS_BETWEEN)
        # The state letter of each of Gloo's threads, as `/proc` gives it; a thread that has just ended has none
        states = []
        for task in TASKS.iterdir():
            try:
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == GLOO_THREAD:
                states.append(rest.split()[0])
        looks = 0 if any(state != SLEEPING for state in states) else looks + 1
