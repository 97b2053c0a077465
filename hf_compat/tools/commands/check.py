"""`hf-compat check script.py ARGS…` finds what would go wrong in a training, without training.

The script runs up to its first `train()`, which is checked by `Trainer.preflight` instead of being carried out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, HfCompatError, ScriptError
from hf_compat.tools.commands.isolated import add_options, add_script, call_again
from hf_compat.tools.terminal import say, show

if TYPE_CHECKING:
    from hf_compat.tools.preflight.report import PreflightReport
    from hf_compat.tools.until_train import CapturedTrain

FINE, FOUND, NOT_CHECKED = 0, 1, 2
_RESULT = "result.json"
# The exit status, the text for people, and the JSON.
Outcome = tuple[int, str, str]


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="hf-compat check",
        description="Find what would go wrong in a script's training, without training: one update, one evaluation and "
        "one save on a copy. Exit status: 0 fine, 1 something was found, 2 it could not be checked.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--devices", default="1", help="processes on this machine: a number, or auto (all GPUs)")
    parser.add_argument("--compat", choices=("4", "5"), help="generation of transformers whose defaults count")
    parser.add_argument("--launcher", type=int, default=None, help=argparse.SUPPRESS)  # process id, for a rank
    parser.add_argument("--scratch", default=None, help=argparse.SUPPRESS)  # the ranks' folder
    add_options(parser)
    add_script(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command and give its exit status."""
    chosen = make_parser().parse_args(list(words))
    status = call_again("check", words, chosen, chosen.script)
    if status is not None:
        return status
    with tempfile.TemporaryDirectory(prefix="hf_compat_check_", ignore_cleanup_errors=True) as made:
        scratch = chosen.scratch or made
        try:
            outcome = _checked_in_ranks(chosen, scratch) or _checked_here(chosen, scratch)
        except HfCompatError as error:
            outcome = _not_checked(error)
        if chosen.scratch is not None:
            from hf_compat.runtime.launch import read_launch

            # The process that has started the ranks reads the first one's outcome
            if read_launch().process_index == 0:
                with open(os.path.join(scratch, _RESULT), "w", encoding="utf-8") as file:
                    json.dump(outcome, file)
            return FINE
    status, text, as_json = outcome
    show([as_json if chosen.json else text])
    return status


def _checked_in_ranks(chosen: argparse.Namespace, scratch: str) -> Outcome | None:
    """Check in several processes. None if this one is enough, or is one of them."""
    from hf_compat.cli.run import number_of, supervised
    from hf_compat.interop.user_script import require_script
    from hf_compat.runtime.launch import read_launch

    if not chosen.module:
        require_script(chosen.script, "hf-compat check [options] SCRIPT [arguments]")
    processes = number_of(chosen.devices)
    if processes == 1:
        return None
    if read_launch().world_size > 1:
        raise ArgumentError("A launcher has started several processes already.\n\nHint: leave out `--devices`.")
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as elastic_run

    words = [
        "--nproc_per_node", str(processes), "--standalone", "-m", "hf_compat", "check",
        "--launcher", str(os.getpid()), "--scratch", scratch, *(["--compat", chosen.compat] if chosen.compat else []),
        *(["-m"] if chosen.module else []), chosen.script, *chosen.arguments,
    ]  # fmt: skip
    supervised(lambda: elastic_run(get_args_parser().parse_args(words)))  # type: ignore[no-untyped-call]  # torch's
    path = os.path.join(scratch, _RESULT)
    if not os.path.exists(path):
        raise ScriptError(f"The processes of {chosen.script} have ended without a result.")
    with open(path, encoding="utf-8") as file:
        status, text, as_json = json.load(file)
    return status, text, as_json


def _checked_here(chosen: argparse.Namespace, scratch: str) -> Outcome:
    """Run the script up to its first `train()` and check that. Its output goes to the standard error."""
    from hf_compat.hf.arguments_rules import VARIABLE, generation_beside
    from hf_compat.runtime.launch import end_with_launcher, environment
    from hf_compat.tools.migration.rank_comparisons import PROBLEM, WAY_OUT, comparisons_in_file
    from hf_compat.tools.preflight.report import Finding, PreflightReport, Severity, Unchecked, finding_of
    from hf_compat.tools.until_train import UserScript, restore_as_written, run_until_train

    if chosen.launcher is not None:
        end_with_launcher(chosen.launcher)
    else:
        say(f"hf-compat check: {chosen.script} runs up to its first `train()`")
    if chosen.compat is not None:
        environment[VARIABLE] = chosen.compat
    script = UserScript(path=chosen.script, arguments=tuple(chosen.arguments), is_module=chosen.module)
    # Nothing is made in the script's own folder, and no repository on the Hub
    overrides = {"output_dir": os.path.join(scratch, "output"), "push_to_hub": False}

    def preflight(captured: CapturedTrain) -> PreflightReport:
        restore_as_written(captured.trainer.args)
        named = captured.keywords.get("resume_from_checkpoint", captured.keywords.get("model_path"))
        wanted = captured.positional[0] if captured.positional else named
        return captured.trainer.preflight(wanted if isinstance(wanted, (str, bool)) else None)

    with contextlib.redirect_stdout(sys.stderr):
        try:
            report = run_until_train(script, preflight, overrides)
            # Notes on comparisons with local rank 0, which no process has here
            file = str(getattr(sys.modules["__main__"], "__file__", ""))
            ranks = [] if generation_beside() == "4" else comparisons_in_file(file)
            told = ((f"line {line}: `{what}`: {PROBLEM}", WAY_OUT) for line, what in ranks)
            notes = (Finding(severity=Severity.NOTE, check="arguments", problem=one, way_out=way) for one, way in told)
            report = dataclasses.replace(report, findings=(*report.findings, *notes))
        except ScriptError as error:
            cause = error.__cause__
            # A refusal when the Trainer or its arguments are made is a finding
            frames = [frame for frame, _ in traceback.walk_tb(None if cause is None else cause.__traceback__)]
            made = [frame for frame in frames if frame.f_code.co_name in ("__init__", "__post_init__")]
            is_ours = any(str(frame.f_globals.get("__name__", "")).startswith("hf_compat.") for frame in made)
            if cause is None or not (is_ours or isinstance(cause, HfCompatError)):
                return _not_checked(error)
            finding = finding_of(cause, "arguments", f"{script.path} cannot make its Trainer")
            rest = Unchecked(check="everything else", reason="the script ends there, before it trains")
            report = PreflightReport(findings=(finding,), unchecked=(rest,), checked=("arguments",))
    return FINE if report.ok else FOUND, str(report), report.to_json()


def _not_checked(error: HfCompatError) -> Outcome:
    told = {"ok": False, "could_not_check": str(error)}
    return NOT_CHECKED, f"could not check: {error}", json.dumps(told, indent=2)
