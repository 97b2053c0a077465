"""Rotation: the checkpoints to delete for a limit and a list of kept ones."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from transformers import trainer_utils

from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.reading import Writer
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.errors import CheckpointError
from hf_compat.training_run.output_folder import OutputFolder
from hf_compat.training_run.rotation import checkpoints_to_delete, in_order_of_rotation, is_from_run

WRITTEN = [f"out/checkpoint-{update}" for update in (2, 4, 6, 8)]


def updates_of(paths):
    return [int(path.rpartition("-")[2]) for path in paths]


@pytest.mark.parametrize(
    ("limit", "best", "gone"),
    [
        (None, None, []),
        (0, None, []),
        (9, None, []),
        (3, None, [2]),
        (1, None, [2, 4, 6]),
        (3, 2, [4]),
        (2, 4, [2, 6]),
        (1, 4, [2, 6]),  # the best and the newest stay, whatever the limit
        (1, 8, [2, 4, 6]),
        (2, 3, [2, 4]),  # the best one is gone already
    ],
)
def test_the_oldest_go_but_not_the_best_or_the_newest(limit, best, gone):
    keep = [WRITTEN[-1], None if best is None else f"out/checkpoint-{best}"]
    assert updates_of(checkpoints_to_delete(WRITTEN, limit, keep)) == gone


@pytest.mark.parametrize("limit", [None, 1, 2, 3])
@pytest.mark.parametrize("best", [None, 2, 6, 8])
def test_the_choice_is_upstreams(tmp_path, limit, best):
    for order, update in enumerate((2, 4, 6, 8)):
        (tmp_path / f"checkpoint-{update}").mkdir()
        os.utime(tmp_path / f"checkpoint-{update}", (order, order))
    paths = [str(tmp_path / f"checkpoint-{update}") for update in (2, 4, 6, 8)]
    best_path = None if best is None else str(tmp_path / f"checkpoint-{best}")
    gone = checkpoints_to_delete(paths, limit, [best_path, paths[-1]])
    trainer_utils.rotate_checkpoints(str(tmp_path), limit, best_path)
    assert {path for path in paths if not os.path.isdir(path)} == set(gone)


def test_paths_are_compared_as_places_on_the_disk():
    assert checkpoints_to_delete(WRITTEN, 1, ["./out/../out/checkpoint-2", WRITTEN[-1]]) == WRITTEN[1:3]


@pytest.mark.parametrize(("best", "gone"), [(4, [2, 6, 8]), (8, [2, 4, 6]), (3, [2, 4, 6])])
def test_at_the_end_a_limit_of_one_leaves_the_best(best, gone):
    """If the best one is gone, the newest stays."""
    assert updates_of(checkpoints_to_delete(WRITTEN, 1, [f"out/checkpoint-{best}"])) == gone


def test_other_runs_go_first_then_what_lies_beyond_the_update():
    owner = {"a-12": "old", "a-3": "old", "a-2": "new", "a-4": "new", "a-8": "new"}
    found = {path: int(path[2:]) for path in owner}
    ordered = in_order_of_rotation(found, 4, lambda path: owner[path] == "new")
    assert ordered == ["a-3", "a-12", "a-8", "a-2", "a-4"]


def test_a_folder_that_could_not_be_searched_is_searched_at_the_next_save(tmp_path, monkeypatch):
    """Another program may keep the first look from it. A save after that lacked the folder's checkpoints."""
    folder, search = OutputFolder(Owner()), manifest.recover

    def fail_once(run_dir, has_lock):
        monkeypatch.setattr(manifest, "recover", search)
        raise CheckpointError(f"{run_dir} cannot be listed: Input/output error.")

    monkeypatch.setattr(manifest, "recover", fail_once)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        folder.hold(str(tmp_path))
    folder.hold(str(tmp_path))
    run = SimpleNamespace(run_id="0123abcd", turn=None, checkpoint=None)
    assert folder.writer(run, str(tmp_path), None) == Writer("0123abcd", 1)
    folder.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("origin", "path", "writer", "expected"),
    [
        (None, "out/checkpoint-2", "mine", True),
        (None, "out/checkpoint-2", "another", False),
        ("out/checkpoint-4", "out/checkpoint-2", "another", False),
        (None, "out/checkpoint-2", None, False),
        ("out/checkpoint-4", "out/checkpoint-2", None, True),
        ("out/checkpoint-4", "out/checkpoint-4", None, True),
        ("out/checkpoint-4", "out/checkpoint-5", None, False),
        ("out/checkpoint-4", "out/other", None, False),
        ("out/checkpoint-4", "away/checkpoint-2", None, False),
    ],
)
def test_which_checkpoints_are_a_runs_own(origin, path, writer, expected):
    run = SimpleNamespace(run_id="mine", checkpoint=origin, updates_before=4)
    assert is_from_run(run, path, None if writer is None else SimpleNamespace(run=writer)) is expected
