"""Writes what each test reaches (a plugin of pytest, for `recording.py` alone)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import hf_compat_hits
import pytest

from mutation.recording import packed

KEEP = Path(os.environ["REACHED_KEEP"])
NOTHING = bytes(hf_compat_hits.SIZE)
of_fixtures: dict[object, tuple[bytes, float]] = {}  # what each has reached, and its seconds


def _join(*parts: bytes) -> bytes:
    joined = 0
    for part in parts:
        joined |= int.from_bytes(part, "little")
    return joined.to_bytes(len(NOTHING), "little")


def pytest_sessionstart() -> None:
    Path(hf_compat_hits.FOLDER, str(os.getpid())).write_bytes(NOTHING)
    hf_compat_hits.attach(os.getpid())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Leave what an earlier run has recorded; short files come first, so that a run that is stopped has seen much."""
    texts = [path.read_text() for path in KEEP.glob("*.jsonl")]
    known = {json.loads(line)["test"] for text in texts for line in text.splitlines()}
    known |= set(json.loads((KEEP / "known.json").read_text()))
    files = {path: rank for rank, path in enumerate(dict.fromkeys(item.path for item in items))}
    items[:] = [item for item in items if item.nodeid not in known]
    items.sort(key=lambda item: -files[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    hf_compat_hits.hits[:] = NOTHING
    started = time.monotonic()
    result = yield
    took = time.monotonic() - started
    taken = [one for definitions in item._fixtureinfo.name2fixturedefs.values() for one in definitions]
    shared = [of_fixtures[one] for one in taken if one in of_fixtures]
    reached = _join(hf_compat_hits.hits[:], *(hits for hits, _ in shared))
    failed = [report.when for report in getattr(item, "reports_kept", ()) if report.failed]
    seconds = {"seconds": round(took, 3), "shared": round(sum(seconds for _, seconds in shared), 3)}
    line = {"test": item.nodeid, **seconds, "failed": failed, "hits": packed(reached)}
    with (KEEP / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.reports_kept = [*getattr(item, "reports_kept", ()), report]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope == "function":
        return (yield)
    before, started = hf_compat_hits.hits[:], time.monotonic()
    hf_compat_hits.hits[:] = NOTHING
    try:
        return (yield)
    finally:
        of_fixtures[fixturedef] = hf_compat_hits.hits[:], time.monotonic() - started
        hf_compat_hits.hits[:] = _join(before, of_fixtures[fixturedef][0])
