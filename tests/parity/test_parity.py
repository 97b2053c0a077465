"""Every case under transformers 5.23 and under hf_compat: equal to the last bit, or a row of docs/differences.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from helpers.parity.cases import CASES
from helpers.parity.compare import first_difference, same
from helpers.parity.differences import IN_ONE_PROCESS as DIFFERENCES
from helpers.parity.differences import names_to_run
from helpers.two_sides import run_both

DOCS = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
pytestmark = pytest.mark.timeout(1800)  # the first test waits for every case


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    chosen = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in chosen if hasattr(item, "callspec")}
    cases = list(CASES) if test_counts.__name__ in {item.name for item in chosen} else sorted(wanted)
    names = {api: names_to_run(api, cases, DIFFERENCES) for api in ("transformers", "hf_compat")}
    return run_both(folder, names, ranks=1)


def differing(results, name: str) -> tuple[set[str], str]:
    theirs, ours = results("transformers", name), results("hf_compat", name)
    parts = {part for part in theirs if not same(theirs[part], ours[part])}
    return parts, first_difference(theirs, ours) if parts else ""


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENCES])
def test_equals_transformers_bit_for_bit(results, name):
    parts, where = differing(results, name)
    assert not parts, where


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_differs_as_the_differences_page_says_and_only_so(results, name):
    difference = DIFFERENCES[name]
    theirs, ours = results("transformers", name), results("hf_compat", name)
    assert not same(theirs, ours), "nothing differs any more: take it off the list and the differences page"
    expected = difference.expect(theirs, difference.mended and results("transformers", difference.mended))
    assert same(expected, ours), first_difference(expected, ours)
    assert f"## {difference.heading}\n" in DOCS.read_text()


@pytest.mark.whole_file
def test_counts(results, capsys):
    equal = [name for name in CASES if not differing(results, name)[0]]
    reasons = {difference.heading for difference in DIFFERENCES.values()}
    with capsys.disabled():
        print(
            f"\nparity: {len(CASES)} configurations, {len(equal)} equal bit for bit, "
            f"{len(DIFFERENCES)} documented for {len(reasons)} reasons"
        )
    assert len(CASES) >= 60
    assert len(reasons) <= 3
    assert len(equal) == len(CASES) - len(DIFFERENCES)


def test_the_oracle_is_the_documented_release():
    assert transformers.__version__.startswith("5.23.")
