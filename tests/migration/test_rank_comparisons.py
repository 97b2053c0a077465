"""What a script does where `local_rank` is 0: found by its source, told where transformers 5 never does it."""

from __future__ import annotations

import sys

import pytest
import transformers  # noqa: F401 - its release is asked for

from helpers.migrated import left
from hf_compat.errors import HfCompatWarning, warn_once
from hf_compat.interop.user_script import run_script
from hf_compat.tools.migration.rank_comparisons import comparisons_with_zero


@pytest.mark.parametrize(
    "code",
    [
        "if training_args.local_rank == 0: save()",
        "if 0 == self.args.local_rank and ready: save()",
        "if args.local_rank != 0: quiet()",
        "if not trainer.args.local_rank: save()",
        "is_main = args.local_rank in (0,)",
        "config = transformers.TrainingArguments('out')\nif config.local_rank == 0: save()",
        "config = TrainingArguments('out')\nrank = config.local_rank\nif rank == 0: save()",
        "local_rank = None\ndef say(*a):\n    if local_rank == 0: print(*a)\ndef train():\n    global local_rank\n"
        "    local_rank = training_args.local_rank",
    ],
)
def test_what_is_never_done_under_5(code):
    assert len(comparisons_with_zero(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "if args.local_rank == 0 or args.local_rank == -1: save()",
        "if args.local_rank in [-1, 0]: save()",
        "if args.local_rank not in (-1, 0): wait()",
        "if args.local_rank <= 0: save()",
        "if args.local_rank != -1: several()",
        "if state.local_rank == 0 or args.local_process_index == 0: save()",
        "local_rank = args.local_rank\nlocal_rank = int(os.environ['LOCAL_RANK'])\nprint(local_rank == 0)",
        "parser.add_argument('--local_rank', type=int)\nif args.local_rank == 0: save()",
        "class Own:\n    local_rank: int = 0\nif args.local_rank == 0: save()",
    ],
)
def test_what_is_done_under_5_or_is_another_rank(code):
    assert comparisons_with_zero(code) == []


SCRIPT = """\
from types import SimpleNamespace  # in place of transformers' arguments
args = SimpleNamespace(local_rank=-1)
is_first = args.local_rank == 0
"""


def test_run_and_migrate_tell_of_it_and_run_is_silent_beside_4(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.23.0")  # beside whichever release this runs
    assert left(SCRIPT) == [(3, "args.local_rank == 0")]
    warn_once.cache_clear()
    with pytest.warns(HfCompatWarning, match=r"script\.py:3: `args\.local_rank == 0`.*transformers 5") as told:
        run_script(str(script), [])
    assert len(told) == 1
    warn_once.cache_clear()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    run_script(str(script), [])  # warnings are errors
