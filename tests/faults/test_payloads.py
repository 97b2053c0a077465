"""A sample of `payloads.py`: nothing in a checkpoint runs, and nothing outside is deleted."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch

from sweeps.faults import payloads


def test_no_payload_runs():
    table, is_well = payloads.run(every=60, every_targeted=5)
    assert is_well, "\n".join("  ".join(row) for row in table)


def test_there_are_enough_of_them():
    tries = payloads.all_tries()
    assert len(tries) >= 250 and sum(one.is_targeted for one in tries) >= 40
    assert {one.form for one in tries} == {"plain", "PEFT", "DCP", "DeepSpeed", ".ckpt"}


def test_each_payload_runs_where_a_reader_is_careless(tmp_path):
    mark = tmp_path / "mark"
    for kind, content in payloads.contents(mark).items():
        path = tmp_path / "file"
        path.write_bytes(content)
        with contextlib.suppress(TypeError):  # some of them have no value in the end
            if "torch" in kind.rpartition(", ")[2]:
                torch.load(path, weights_only=False)
            else:
                pickle.loads(content)
        assert mark.exists(), kind
        mark.unlink()


@pytest.mark.parametrize("part", ["latest"])
def test_deepspeed_itself_would_run_them(tmp_path, part):
    """The engine of `payloads.py` looks for files as DeepSpeed's does: without our reader the payload runs."""
    folder, mark = tmp_path / "global_step2", tmp_path / "mark"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(payloads.contents(mark)["exec, torch"])
    (tmp_path / part).write_text("global_step[2]")
    payloads.Engine().load_checkpoint(str(tmp_path))
    assert mark.exists()
