"""Sources for the tests of `migrate`: rewritten, with what was left to a person."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

SCRIPTS = Path(__file__).resolve().parents[1] / "migration" / "scripts"
NAMES = sorted(path.name for path in SCRIPTS.glob("*.py"))


def today(source: str, target: Target = Target.HF_COMPAT) -> str:
    """Return a source after migration; a second one changes nothing."""
    text = textwrap.dedent(source).lstrip("\n")
    result = rewrite_python(text, target).text
    assert rewrite_python(result, target).text == result, result
    return result


def left(source: str, target: Target = Target.HF_COMPAT) -> list[tuple[int, str]]:
    """Return line and subject of what is left to a person."""
    found = rewrite_python(textwrap.dedent(source).lstrip("\n"), target).findings
    return [(one.line, one.what) for one in found]
