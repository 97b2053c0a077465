"""What a notebook shows of our objects; `test_notebook_page.py` has what it shows of runs."""

from __future__ import annotations

import dataclasses

import pytest

import hf_compat
from hf_compat.tools.preflight.report import PreflightReport


def test_what_is_printed_is_shown_so_as_the_last_line_of_a_cell():
    explained = hf_compat.explain(hf_compat.TrainingArguments(learning_rate=0.5, run_name="<b>", use_cpu=True))
    shown = explained._repr_html_()
    assert shown.startswith("<pre ") and "learning_rate=0.5" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    from IPython.lib.pretty import pretty

    assert pretty(explained) == str(explained)
    report = PreflightReport(findings=(), unchecked=(), checked=("arguments",))
    assert pretty(report) == str(report) and "arguments" in report._repr_html_()


@pytest.mark.parametrize("kind", [hf_compat.TrainingArguments, hf_compat.Seq2SeqTrainingArguments])
def test_help_describes_every_argument(kind):
    for field in dataclasses.fields(kind):
        [line] = [line for line in kind.__doc__.splitlines() if line.startswith(f"        {field.name} (")]
        assert len(line.partition("): ")[2]) >= 10, field.name
