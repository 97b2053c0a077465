"""How many names a message of a native module shows."""

from __future__ import annotations

import pytest

from hf_compat.native.overrides import _shown


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "`a`"),
        (["a", "b", "c", "d"], "`a`, `b`, `c`, `d`"),
        (["a", "b", "c", "d", "e"], "`a`, `b`, `c`, `d` and 1 more"),
        (list("abcdefg"), "`a`, `b`, `c`, `d` and 3 more"),
    ],
)
def test_four_names_are_shown_and_the_others_counted(names, text):
    assert _shown(names) == text
