"""Kill jobs whose every life may have other ranks, another engine and other clocks; compare what they come to.

    python tests/sweeps/distributed/kill_mixtures.py [KILLS] [SEED]

Every update saves, and every life goes on from the newest checkpoint. A run's lives are alike, or each is drawn anew:
one, two or four ranks; DDP, FSDP 2 with whole or sharded checkpoints, ZeRO 2 or ZeRO 3. The clocks of its ranks are an
hour ahead, an hour behind or jump to and fro. Where Ray is installed (the extra `ray`), some lives are jobs of Ray
Train, which restarts its workers by itself.

A run whose lives were alike has to equal the uninterrupted run bit for bit. Another one's losses, rates, norms and
evaluation have to be within 1e-5 of those of as many ranks as its last life had, under DDP. The status is 1 where a run
differs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import deepspeed  # noqa: F401 - once, not in every life

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sweeps.distributed.kill_strategies import COMMON, GPT2, LONGEST, SHARDED, ZERO_2, Job, kill_some, new_folder

ZERO_3 = {**ZERO_2, "zero_optimization": {"stage": 3}}
ENGINES: dict[str, tuple[str, ...]] = {
    "DDP": (),
    "FSDP2": ("fsdp=True",),
    "FSDP2 sharded": ("fsdp=True", SHARDED),
    "ZeRO2": (f"deepspeed={ZERO_2!r}",),
    "ZeRO3": (f"deepspeed={ZERO_3!r}",),
}
WORLDS = (1, 2, 2, 4)
HOUR = 3600.0
RAY_JOB = Path(__file__).with_name("ray_job.py")
Way = tuple[int, str]  # ranks and engine


def words_of(way: Way) -> tuple[str, ...]:
    """Return the words of a life: as many samples an update whatever the number of ranks."""
    world, engine = way
    # 15 updates: the last is logged. As upstream, `train_loss` counts the first rank's share of updates since the last
    # log, and the ranks of the last update need not be those of the last life.
    return (*COMMON, *GPT2, f"gradient_accumulation_steps={4 // world}", "logging_steps=3", *ENGINES[engine])


def drawn(chance: random.Random) -> Way:
    world = chance.choice(WORLDS)
    return world, "DDP" if world == 1 else chance.choice(list(ENGINES))


def skew_clocks() -> None:
    """Give every process that is forked from now on a clock of its own, by its id."""
    real, own = time.time, {}

    def skewed() -> float:
        kind = own.setdefault(os.getpid(), os.getpid() % 4)
        return real() + (0.0, HOUR, -HOUR, HOUR * (-1) ** int(real()))[kind]

    time.time = skewed


def whole_run(base: Path, way: Way, known: dict[Way, dict]) -> dict:
    """Return what an uninterrupted run comes to; each is made once."""
    if way not in known:
        job = Job(base / f"whole{len(known)}", words_of(way), way[0])
        status = job.wait(job.ranks(), 10 * LONGEST)
        assert status == 0, job.log.read_text()[-3000:]
        known[way] = json.loads((job.folder / "result.json").read_text())
    return known[way]


def live_under_ray(folder: Path, chance: random.Random, counts: Counter[str]) -> None:
    """Let Ray Train finish a run, and kill one of its workers once."""
    shutil.rmtree(folder / "pids", ignore_errors=True)
    log = folder.parent / f"{folder.name}.ray.log"
    words = words_of((2, "DDP"))
    with log.open("w") as out:
        job = subprocess.Popen([sys.executable, str(RAY_JOB), str(folder), *words], stdout=out, stderr=out)
    until = time.monotonic() + 4 * LONGEST
    while len([path for path in folder.glob("pids/*") if path.read_text()]) < 2:
        assert job.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.01)
    victim = int((folder / "pids" / str(chance.randint(0, 1))).read_text())
    time.sleep(chance.uniform(0.0, 2.0))
    if not (folder / "result.json").exists():
        os.kill(victim, signal.SIGKILL)
        counts["kills"] += 1
        counts["workers of Ray"] += 1
    assert job.wait(6 * LONGEST) == 0, log.read_text()[-3000:]


def differences(found: dict, expected: dict) -> list[str]:
    """Return which numbers of a run are not within 1e-5 of another's. Adam makes weights of rounded gradients."""
    if len(found["logs"]) != len(expected["logs"]):
        return [f"{len(found['logs'])} logs, not {len(expected['logs'])}"]
    pairs = [(f"log {i}: {key}", mine.get(key), log[key]) for i, (mine, log) in
             enumerate(zip(found["logs"], expected["logs"], strict=True)) for key in log]  # fmt: skip
    pairs += [(key, found[key], expected[key]) for key in ("eval_loss", "steps")]
    return [
        f"{name}: {mine}, not {theirs}"
        for name, mine, theirs in pairs
        if not (isinstance(mine, int | float) and math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-5))
    ]


def kill_and_resume(base: Path, kills: int, seed: int) -> Counter[str]:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: ranks that a launcher leaves come to this process
    chance = random.Random(seed)
    counts = Counter({"kills": 0, "alike, ended": 0, "alike, equal": 0, "mixed, ended": 0, "mixed, within 1e-5": 0})
    ray = importlib.util.find_spec("ray")
    has_ray = ray is not None and ray.origin is not None  # `tests/ray` is a folder of that name
    known: dict[Way, dict] = {}
    skew_clocks()
    whole_run(base, (2, "ZeRO2"), known)  # DeepSpeed builds its extension, which takes longer than a life
    run = 0
    while counts["kills"] < kills or not counts["mixed, ended"]:
        folder, is_mixed = base / f"run{run}", run % 3 != 0
        way = drawn(chance)
        lives, by_ray = [way], has_ray and run % 4 == 1
        while counts["kills"] < kills and kill_some(Job(folder, words_of(way), way[0]), chance, counts):
            way = drawn(chance) if is_mixed else way
            lives.append(way)
            if by_ray and len(lives) > 2:
                break
        if not (folder / "result.json").exists():
            if by_ray:
                live_under_ray(folder, chance, counts)
                lives[-1] = (2, "Ray")
            else:
                last = Job(folder, words_of(way), way[0])
                assert last.wait(last.ranks(), 10 * LONGEST) == 0, last.log.read_text()[-3000:]
        found = json.loads((folder / "result.json").read_text())
        is_alike = len(set(lives)) == 1
        # the mean of an evaluation, and of updates since the last log, depend on the ranks that there are at the end
        expected = whole_run(base, way if is_alike else (lives[-1][0], "DDP"), known)
        wrong = ([] if found == expected else ["other bits"]) if is_alike else differences(found, expected)
        kind, good = ("alike", "equal") if is_alike else ("mixed", "within 1e-5")
        counts[f"{kind}, ended"] += 1
        counts[f"{kind}, {good}"] += not wrong
        told = ", ".join(f"{world} {engine}" for world, engine in lives)
        print(f"run {run}: {told}: {'; '.join(wrong) or good}", flush=True)
        if not wrong:
            shutil.rmtree(folder)
        run += 1
    return counts


def main() -> int:
    kills, seed = (int(word) for word in [*sys.argv[1:], *("60", "1")[len(sys.argv) - 1 :]])
    base = new_folder()
    counts = kill_and_resume(base, kills, seed)
    print(json.dumps(counts))
    if counts["alike, ended"] + counts["mixed, ended"] != counts["alike, equal"] + counts["mixed, within 1e-5"]:
        return 1
    shutil.rmtree(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
