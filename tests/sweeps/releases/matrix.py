"""Older releases of transformers beside ours: each case under that release's Trainer and under hf_compat, bit for bit.

    python tests/sweeps/releases/matrix.py                       # every release
    python tests/sweeps/releases/matrix.py 4.57                  # one
    python tests/sweeps/releases/matrix.py 4.57 --cases baseline accumulation
    python tests/sweeps/releases/matrix.py --write               # every release, and the tables of docs/releases.md
    python tests/sweeps/releases/matrix.py --resume              # go on where a run was broken off
    python tests/sweeps/releases/matrix.py --sides hf_compat     # run ours alone, and compare with what theirs gave
    python tests/sweeps/releases/matrix.py 4.57 --folder F --read    # of the runs that F holds
    python tests/sweeps/releases/matrix.py --tests    # instead, the tests that depend on the release, beside each
    python tests/sweeps/releases/matrix.py 5.0 --tests FILE -k WORD  # of one file, with words for pytest

The first run makes an environment (a minute): the release with the packages of its time, on the torch and Lightning of
this interpreter. Both sides get that release's own arguments, so its defaults hold. Environments stay in
`hf_compat_releases` below the temporary directory, or where `--folder` says.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from helpers.parity.cases import CASES
from helpers.parity.differences import IN_ONE_PROCESS
from sweeps.releases import release_differences
from sweeps.releases.environments import FOLDER, RELEASES, ROOT, python_of

PAGE = ROOT / "docs" / "releases.md"
SIDES = ("transformers", "hf_compat")
MENDED = "mended"
# What depends on the release that is installed.
RELEASE_TESTS = (
    "tests/interop/test_beside_release.py", "tests/interop/test_attributes.py", "tests/hf/test_declared_old_names.py",
    "tests/hf/test_old_attributes.py", "tests/trainer_methods/test_former_methods.py",
    "tests/migration/test_rank_comparisons.py",
)  # fmt: skip


def run_cases(python: Path, folder: Path, names: list[str], chosen: argparse.Namespace) -> None:
    """Run the cases under both trainers; what each gave lies in the folder as soon as it has ended.

    Args:
        python: The interpreter of the release's environment.
        folder: Where results lie, a folder for each side.
        names: The cases.
        chosen: What the command line says: the sides, whether at the same time, whether to go on.
    """
    wanted = {side: prepared(folder / side, names, chosen.resume) for side in chosen.sides}
    with tqdm(total=sum(map(len, wanted.values())), desc=folder.name, unit="case") as bar:
        running: list[subprocess.Popen] = []
        for side in (side for side, left in wanted.items() if left):
            running.append(started(python, folder, side, wanted[side]))
            if chosen.jobs == 1:
                wait_for(running, folder, wanted, bar)
        wait_for(running, folder, wanted, bar)


def run_mended(python: Path, folder: Path, names: list[str], chosen: argparse.Namespace) -> None:
    """Run what differs under that release's Trainer with 5.23's fixes: what is equal then differs for them alone."""
    prepared(folder / MENDED, [case_of(name) for name in names], chosen.resume)
    left = [case_of(name) for name in names if verdict(folder, name)[0] == "differs"]
    left = [name for name in left if not has_run(folder / MENDED, name)]
    with tqdm(total=len(left), desc=f"{folder.name} mended", unit="case") as bar:
        if left:
            wait_for([started(python, folder, MENDED, left)], folder, {MENDED: left}, bar)


def case_of(name: str) -> str:
    """Return the case that is run in place of one in which transformers, of every release, has a bug."""
    known = IN_ONE_PROCESS.get(name)
    return known.mended if known is not None and known.mended else name


def prepared(folder: Path, names: list[str], resume: bool) -> list[str]:
    """Return the cases that are to run: those without a result, or all, whose results are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    if resume:
        return [name for name in names if not has_run(folder, name)]
    endings = ("pickle", "error", "mends")
    for old in [folder / f"{name}.{ending}" for name in names for ending in endings]:
        old.unlink(missing_ok=True)
    return names


def has_run(folder: Path, name: str) -> bool:
    return any((folder / f"{name}.{ending}").is_file() for ending in ("pickle", "error"))


def started(python: Path, folder: Path, side: str, names: list[str]) -> subprocess.Popen:
    how, api = ("--mended", "transformers") if side == MENDED else ("--adopted", side)
    command = [
        str(python),
        str(HERE.parents[1] / "helpers" / "parity" / "runner.py"),
        how,
        api,
        str(folder / side),
        *names,
    ]
    with (folder / f"{side}.log").open("w") as log:
        return subprocess.Popen(command, env=quiet(), stdout=log, stderr=subprocess.STDOUT)


def wait_for(running: list[subprocess.Popen], folder: Path, wanted: dict[str, list[str]], bar: tqdm) -> None:
    """Wait for the processes, and show how many cases have a result."""
    while any(process.poll() is None for process in running):
        time.sleep(1)
        bar.n = sum(has_run(folder / side, name) for side, names in wanted.items() for name in names)
        bar.refresh()


def run_guests(python: Path, folder: Path) -> None:
    """Run the checks of what scripts have of that release."""
    (folder / "guests").mkdir(exist_ok=True)
    command = [str(python), str(HERE / "guests.py"), str(folder / "guests")]
    with (folder / "guests.log").open("w") as log:
        subprocess.run(command, env=quiet(), stdout=log, stderr=subprocess.STDOUT, check=False)


def run_tests(python: Path, release: str, words: list[str]) -> tuple[int, str]:
    """Run tests beside a release; return pytest's status, its last line and what has failed.

    Its warnings of old names are no errors there: a release of another time warns of the packages of today.
    """
    chosen = words if any(not word.startswith("-") for word in words[:1]) else [*RELEASE_TESTS, *words]
    command = [str(python), "-m", "pytest", "-q", "-W", "ignore", "-m", "", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=quiet(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines()
    told = [f"  {line}" for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, "\n".join([f"{release}: {lines[-1] if lines else 'pytest has said nothing'}", *told])


def quiet() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **offline}


def read(folder: Path, side: str, name: str) -> dict | str:
    """Return what a case gave under a side, or its error's last line."""
    result, error = (folder / side / f"{name}.{ending}" for ending in ("pickle", "error"))
    if result.is_file():
        return pickle.loads(result.read_bytes())
    last = error.read_text().strip().splitlines()[-1] if error.is_file() else "not run"
    return last.replace(f"{folder / side}{os.sep}", "")


def verdict(folder: Path, name: str) -> tuple[str, str]:
    """Compare a case: `equal`, `explained` with the reason, `not applicable` with it, or `differs` with the place."""
    theirs, ours = (read(folder, side, name) for side in SIDES)
    if "not run" in (theirs, ours):
        return "not run", ""
    if isinstance(theirs, str):
        return "not applicable", theirs
    if isinstance(ours, str):
        return "differs", f"ours fails: {ours}"
    mended = read(folder, MENDED, case_of(name))
    used = folder / MENDED / f"{case_of(name)}.mends"
    reasons = used.read_text().split() if used.is_file() else []
    return release_differences.compare(name, (theirs, None if isinstance(mended, str) else mended), ours, reasons)


def verdicts_of(release: str, folder: Path, names: list[str]) -> dict:
    """Return every verdict of a release, and what its guests gave."""
    guests = folder / "guests" / "guests.json"
    return {
        "release": RELEASES[release].version,
        "beside": RELEASES[release].companions,
        "cases": {name: verdict(folder, name) for name in names},
        "guests": json.loads(guests.read_text()) if guests.is_file() else {},
    }


def counted(found: dict) -> dict[str, int]:
    kinds = [kind for kind, _ in found["cases"].values()]
    return {kind: kinds.count(kind) for kind in ("equal", "explained", "not applicable", "differs", "not run")}


def table(results: dict[str, dict]) -> str:
    """Return the page's tables: counts, reasons, guests."""
    heads = ("transformers", "beside", "run", "equal", "explained", "not applicable", "differing", "not run")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for found in results.values():
        of = counted(found)
        run = of["equal"] + of["explained"] + of["differs"]
        beside = ", ".join(found["beside"]).replace("==", " ")
        counts = (run, *(of[kind] for kind in ("equal", "explained", "not applicable", "differs", "not run")))
        lines.append(f"| {found['release']} | {beside} | {' | '.join(map(str, counts))} |")
    for release, found in results.items():
        lines += ["", f"### {release}", ""]
        lines += [
            f"- {what}" for what in sorted(reasons(found, "explained")) + sorted(reasons(found, "not applicable"))
        ]
        lines += [f"- {name.replace('_', ' ')}: {said}." for name, said in found["guests"].items() if said != "works"]
    return "\n".join(lines).replace("<", "&lt;") + "\n"  # a class's repr would be an HTML tag


def reasons(found: dict, kind: str) -> list[str]:
    """Return each reason of a kind with its cases."""
    by_reason: dict[str, list[str]] = {}
    for name, (its, reason) in found["cases"].items():
        if its == kind:
            by_reason.setdefault(reason, []).append(name)
    return [f"{kind}, {', '.join(f'`{name}`' for name in names)}: {reason}" for reason, names in by_reason.items()]


def write(results: dict[str, dict]) -> None:
    """Put the tables in the page, and the verdicts beside the environments."""
    heading = "## What was run"
    before, _, _ = PAGE.read_text().partition(f"{heading}\n")
    PAGE.write_text(f"{before}{heading}\n\n{table(results)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {', '.join(RELEASES)}; all by default")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="names of tests/helpers/parity/cases.py")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--resume", action="store_true", help="run only what has no result yet")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="whose trainer runs; both by default")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="both sides at the same time, or not")
    parser.add_argument("--read", action="store_true", help="run nothing: compare what the folder holds")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, metavar="WORD", help="run tests; files and words for pytest"
    )
    parser.add_argument("--write", action="store_true", help="write the tables of docs/releases.md")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.releases if name not in RELEASES]
    if unknown:
        parser.error(f"there is no environment for {', '.join(unknown)}; there is one for {', '.join(RELEASES)}")
    if chosen.tests is not None:
        failed = 0
        for release in chosen.releases or RELEASES:
            status, said = run_tests(python_of(RELEASES[release], chosen.folder), release, chosen.tests)
            print(said, flush=True)
            failed |= status
        return failed
    results = {}
    for release in chosen.releases or RELEASES:
        runs = chosen.folder / "runs" / release
        if not chosen.read:
            python = python_of(RELEASES[release], chosen.folder)
            runs.mkdir(parents=True, exist_ok=True)
            run_cases(python, runs, chosen.cases, chosen)
            run_mended(python, runs, chosen.cases, chosen)
            run_guests(python, runs)
        results[release] = found = verdicts_of(release, runs, chosen.cases)
        print(release, counted(found))
        for name, (kind, said) in found["cases"].items():
            if kind == "differs":
                print(f"  {name}: {said}")
    (chosen.folder / "verdicts.json").write_text(json.dumps(results, indent=1))
    if chosen.write:
        write(results)
    return int(any(kind == "differs" for found in results.values() for kind, _ in found["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
