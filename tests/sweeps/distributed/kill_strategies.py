"""Kill ranks and launchers at random instants under a strategy, resume each time, and compare with a whole run.

    python tests/sweeps/distributed/kill_strategies.py STRATEGY [KILLS] [SEED]      (DDP, FSDP2 or ZeRO2)

Every update saves. Each life is a job of two ranks under torch's elastic launcher, with the reports of `hf-compat
run`. Launchers and ranks are forked from this process, which has imported everything: a life costs no start-up time.
Killed are one rank, both, the launcher, or the launcher and a rank, half of the times while a checkpoint is being
written. A job whose launcher lives has to end with a status other than 0 and to name the rank; in every case no process
may be left.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from helpers.jobs import job
from hf_compat.cli.run import supervised
from hf_compat.runtime.launch import end_with_launcher

ZERO_2 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}  # fmt: skip
SHARDED = "fsdp_config={'state_dict_type': 'SHARDED_STATE_DICT'}"
GPT2 = ("model=gpt2",)
# The runs of a strategy take turns with these words.
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DDP": ((),),
    "FSDP2": ((*GPT2, "fsdp=True"), (*GPT2, "fsdp=True", SHARDED)),
    "ZeRO2": ((*GPT2, f"deepspeed={ZERO_2!r}"),),
}
COMMON = ("num_train_epochs=3", "save_steps=1", "logging_steps=2", "save_total_limit=3", "resume=auto")
LONGEST = 60.0  # seconds that a job may take to end once a process of it was killed
VICTIMS = ("rank 0", "rank 1", "both ranks", "launcher", "launcher and rank")


class Job:
    """Ranks, two by default, and their launcher, forked from this process."""

    def __init__(self, folder: Path, words: tuple[str, ...], world: int = 2) -> None:
        self.folder, self.log, self.world = folder, folder.parent / f"{folder.name}.log", world
        shutil.rmtree(folder / "pids", ignore_errors=True)
        for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
            lock.unlink()  # a rank was killed while it loaded an extension; the next would wait without end
        self.launcher = os.fork()
        if self.launcher == 0:
            self._launch(words)

    def _launch(self, words: tuple[str, ...]) -> None:
        status = 1
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            # what `--standalone` of `hf-compat run` stands for
            meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex)
            config, _, _ = config_from_args(
                get_args_parser().parse_args(
                    ["--nproc_per_node", str(self.world), "--max_restarts", "0", *meeting, "job.py"]
                )
            )
            config.start_method = "fork"
            status = supervised(lambda: elastic_launch(config, rank_main)(os.getpid(), str(self.folder), *words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def ranks(self) -> list[int]:
        """Wait until all ranks are up; none where the job has ended before."""
        until = time.monotonic() + LONGEST
        while time.monotonic() < until:
            found = [path.read_text() for path in sorted((self.folder / "pids").glob("*"))]
            if len(found) == self.world and all(found):
                return [int(pid) for pid in found]
            time.sleep(0.002)
        raise TimeoutError(f"the ranks did not start:\n{self.log.read_text()[-3000:]}")

    def has_result(self) -> bool:
        """Return whether training has reached its end."""
        return (self.folder / "result.json").exists()

    def wait(self, ranks: list[int], seconds: float) -> int:
        """Return the launcher's status once no process of the job is left."""
        until, left, status = time.monotonic() + seconds, {self.launcher, *ranks}, None
        while left:
            for pid in list(left):
                found, how = reaped(pid)
                left -= {pid} if found else set()
                status = how if found and pid == self.launcher else status
            if time.monotonic() > until:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"{left} of {self.launcher} {ranks} still run:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.002)
        assert status is not None
        return status


def reaped(pid: int) -> tuple[bool, int | None]:
    """Return whether a process has ended, and its status where it was this one's child."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # the launcher's child, while it lives
        return not Path(f"/proc/{pid}").exists(), None
    return bool(found), os.waitstatus_to_exitcode(status) if found else None


def rank_main(launcher: int, folder: str, *words: str) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a rank that is not forked has not the launcher's
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_launcher(launcher)
    sys.argv = ["job.py", folder, *words]
    job.main()


def wait_for_an_instant(job: Job, chance: random.Random) -> None:
    """Wait for the instant of a kill: while the ranks start, or some saves later, often within one."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, 1.0))
        return
    wanted = newest_save(job.folder) + chance.randint(1, 5)
    until = time.monotonic() + LONGEST
    while newest_save(job.folder) < wanted and not job.has_result() and time.monotonic() < until:
        time.sleep(0.001)
    if chance.random() < 0.6:
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not any(job.folder.glob(".saving-*")):
            time.sleep(0.0005)
    time.sleep(chance.uniform(0.0, 0.05))


def newest_save(folder: Path) -> int:
    names = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def victims_of(name: str, job: Job, ranks: list[int], chance: random.Random) -> list[int]:
    return {
        "rank 0": [ranks[0]],
        "rank 1": ranks[1:2],
        "both ranks": chance.sample(ranks, len(ranks)),
        "launcher": [job.launcher],
        "launcher and rank": [job.launcher, chance.choice(ranks)],
    }[name]


def kill_some(job: Job, chance: random.Random, counts: Counter[str]) -> bool:
    """Kill processes of a job at a random instant; returns whether it ended by that."""
    ranks = job.ranks()
    name = chance.choice([name for name in VICTIMS if len(ranks) > 1 or name not in ("rank 1", "both ranks")])
    wait_for_an_instant(job, chance)
    began = time.monotonic()
    if job.has_result():
        assert job.wait(ranks, LONGEST) == 0, job.log.read_text()[-3000:]
        return False
    saving = any(job.folder.glob(".saving-*"))
    for pid in victims_of(name, job, ranks, chance):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            counts["too late"] += 1
    status = job.wait(ranks, LONGEST)
    counts["slowest, ms"] = max(counts["slowest, ms"], int(1000 * (time.monotonic() - began)))
    if job.has_result() and status == 0:
        return False
    counts["kills"] += 1
    counts["within saves"] += saving
    counts[name] += 1
    said = job.log.read_text()
    assert status != 0, f"the job hides that {name} was killed:\n{said[-3000:]}"
    assert "launcher" in name or "has failed with status" in said, said[-3000:]
    job.log.write_text("")
    return True


def whole_run(folder: Path, words: tuple[str, ...]) -> dict:
    job = Job(folder, (*COMMON, *words))
    status = job.wait(job.ranks(), 10 * LONGEST)
    assert status == 0, job.log.read_text()[-3000:]
    return json.loads((folder / "result.json").read_text())


def kill_and_resume(base: Path, strategy: str, kills: int, seed: int) -> Counter[str]:
    """Kill so often and compare every run that reached its end with a whole one; returns what was counted."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: ranks that a launcher leaves come to this process
    chance, counts = random.Random(seed), Counter({"kills": 0, "runs that ended": 0, "equal bit for bit": 0})
    variants = VARIANTS[strategy]
    whole = [whole_run(base / f"whole{index}", words) for index, words in enumerate(variants)]
    run = 0
    while counts["kills"] < kills or counts["runs that ended"] == 0:
        folder, words, expected = base / f"run{run}", variants[run % len(variants)], whole[run % len(whole)]
        while counts["kills"] < kills and kill_some(Job(folder, (*COMMON, *words)), chance, counts):
            pass
        if not (folder / "result.json").exists():
            last = Job(folder, (*COMMON, *words))
            assert last.wait(last.ranks(), 10 * LONGEST) == 0, last.log.read_text()[-3000:]
        counts["runs that ended"] += 1
        found = json.loads((folder / "result.json").read_text())
        counts["equal bit for bit"] += found == expected
        if found != expected:
            print(f"run {run} differs; it is kept in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        run += 1
    return counts


def new_folder() -> Path:
    """Make a folder for runs, and for the extensions that DeepSpeed builds in them."""
    base = Path(tempfile.mkdtemp(prefix="hf_compat_kill_"))
    os.environ["TORCH_EXTENSIONS_DIR"] = str(base / "extensions")
    return base


def main() -> int:
    strategy, kills, seed = [*sys.argv[1:], "200", "1"][:3] if len(sys.argv) < 4 else sys.argv[1:4]
    if strategy == "ZeRO2":
        import deepspeed  # noqa: F401 - once, not in every life
    base = new_folder()
    counts = kill_and_resume(base, strategy, int(kills), int(seed))
    print(json.dumps({"strategy": strategy, **counts}))
    if counts["runs that ended"] != counts["equal bit for bit"]:
        return 1
    shutil.rmtree(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
