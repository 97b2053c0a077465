"""The decisions of a save, without a training: when its parts run, what it keeps, and what its errors say."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from helpers.saving import Background, Folder, make
from hf_compat.checkpoint import layout, manifest
from hf_compat.checkpoint.manifest import SavingPlace
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.checkpoint.shares import as_rows
from hf_compat.errors import CheckpointWriteError, OutputFolderError
from hf_compat.runtime.collectives import Rows, float_bits
from hf_compat.training_run import saver as saving
from hf_compat.training_run.saver import Saver, Timing

BOOT = "a boot"


class OwnFormat:
    def save_pretrained(self, folder):
        """Write files that nobody knows."""


@pytest.mark.parametrize(
    ("changes", "overrides", "by_flag", "expected"),
    [
        ({}, (), True, (False, Timing.LATER)),
        ({}, (), False, (False, Timing.NOW)),
        ({}, ("_save_checkpoint",), True, (False, Timing.NOW)),
        ({}, ("_sorted_checkpoints",), True, (False, Timing.NOW)),
        ({}, ("save_model",), True, (True, Timing.LATER)),
        ({}, ("_save_scaler",), True, (True, Timing.LATER)),
        ({"processing_class": OwnFormat()}, (), True, (True, Timing.LATER)),
        ({"data_collator": SimpleNamespace(tokenizer=OwnFormat())}, (), True, (True, Timing.LATER)),
        (
            {"processing_class": object(), "data_collator": SimpleNamespace(tokenizer=OwnFormat())},
            (),
            True,
            (False, Timing.LATER),
        ),
        ({"heard": [object()]}, (), True, (False, Timing.SUMMED)),
        ({"heard": [SimpleNamespace(reads_checkpoints=False)]}, (), True, (False, Timing.LATER)),
        ({"heard": [SimpleNamespace(reads_checkpoints=False), object()]}, (), True, (False, Timing.SUMMED)),
        ({"heard": [object()], "args": {"world_size": 2}}, (), True, (False, Timing.NOW)),
        ({"args": {"world_size": 2}}, (), True, (False, Timing.LATER)),
        ({"args": {"push_to_hub": True}}, (), True, (False, Timing.NOW)),
        ({"args": {"_launch": SimpleNamespace(nodes=2)}}, (), True, (False, Timing.NOW)),
        ({"boot": None}, (), True, (False, Timing.NOW)),
        ({"exists": True}, (), True, (False, Timing.NOW)),
        ({"args": {"async_save": True}}, (), True, (False, Timing.BACKGROUND)),
        ({"args": {"async_save": True}}, (), False, (False, Timing.BACKGROUND)),
        ({"args": {"async_save": True}, "heard": [object()]}, (), True, (False, Timing.BACKGROUND)),
        ({"args": {"async_save": True, "world_size": 2}}, (), True, (False, Timing.LATER)),
        ({"args": {"async_save": True}}, ("_save",), True, (True, Timing.LATER)),
        ({"args": {"async_save": True}}, ("_rotate_checkpoints",), True, (False, Timing.NOW)),
        (
            {"args": {"async_save": True}, "_model_state": SimpleNamespace(can_be_copied=False)},
            (),
            True,
            (False, Timing.LATER),
        ),
    ],
)  # fmt: skip
def test_when_the_parts_of_a_save_run(changes, overrides, by_flag, expected, monkeypatch, tmp_path):
    changes = dict(changes)
    heard, boot, exists = changes.pop("heard", []), changes.pop("boot", BOOT), changes.pop("exists", False)
    monkeypatch.setattr(manifest, "this_boot", lambda: boot)
    monkeypatch.setattr(saving, "warn_once", lambda why: None)
    saver = make(overrides, callback_handler=SimpleNamespace(hearing=lambda event: heard), **changes)
    saver.is_by_flag = by_flag
    saver._lacks_renames[str(tmp_path)] = False
    final = tmp_path / "checkpoint-3"
    if exists:
        final.mkdir()
    assert saver._where_and_when(str(final)) == expected


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        ({"args": {"world_size": 2}}, (), "with several processes"),
        ({"_model_state": SimpleNamespace(can_be_copied=False)}, (), "the model is sharded"),
        ({}, ("_save", "_rotate_checkpoints"), "overrides _save, _rotate_checkpoints"),
    ],
)
def test_why_a_save_is_not_beside_the_training(values, overrides, said, monkeypatch):
    told = []
    monkeypatch.setattr(saving, "warn_once", told.append)
    values = values | {"args": values.get("args", {}) | {"async_save": True}}
    make(overrides, **values)._where_and_when("out/checkpoint-3")
    assert len(told) == 1 and told[0].startswith("`async_save=True`: ") and said in told[0]


@pytest.mark.parametrize(("lacks", "saves", "asked"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_disk_is_asked_once_whether_it_renames_folders(lacks, saves, asked, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(saving, "renames_folders", lambda folder: told.append(folder) or not lacks)
    saver, folder = make(args={"should_save": saves}), str(tmp_path / "new")
    assert [saver._must_write_in_place(folder) for _ in range(2)] == [asked] * 2
    assert told == [folder] * saves and os.path.isdir(folder) is saves
    saver._lacks_renames[folder] = True
    assert saver._where_and_when(f"{folder}/checkpoint-3")[0]


@pytest.mark.parametrize(
    ("timing", "store", "called"),
    [
        (Timing.NOW, None, []),
        (Timing.BACKGROUND, None, []),
        (Timing.LATER, None, ["flush_and_hash"]),
        (Timing.SUMMED, None, ["flush_listed"]),
        (Timing.SUMMED, "memory://a", ["flush_and_hash"]),
        (Timing.LATER, "memory://a", ["flush_and_hash"]),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
def test_a_save_is_finished(timing, store, called, saves, monkeypatch):
    told, held = [], []
    for name in ("flush_and_hash", "flush_listed"):
        monkeypatch.setattr(manifest, name, lambda final, name=name: told.append(name))
    saver = make(args={"output_store": store, "should_save": saves})
    saver.folder = SimpleNamespace(locks={}, owner=SimpleNamespace(id="o"))
    saver.mirror = SimpleNamespace(
        check=lambda: None, hold=lambda *what: held.append(what), send_held=lambda: held.append("sent")
    )
    saver._finish("out/checkpoint-3", timing, "best")
    assert told == called
    assert held == ([("out/checkpoint-3", "best", "o")] + ["sent"] * (timing is not Timing.NOW) if saves else [])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_checkpoint_that_could_not_be_finished_goes(is_lost, monkeypatch, tmp_path):
    def fail(final):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(manifest, "flush_and_hash", fail)
    saver, removed = make(), []
    saver.mirror = SimpleNamespace(check=lambda: None)
    monkeypatch.setattr(Saver, "remove", lambda self, path: removed.append(path))
    final = str(tmp_path / "checkpoint-3")
    checks = iter([None, OutputFolderError("taken")] if is_lost else [None, None])

    def check(self, path):
        error = next(checks)
        if error is not None:
            raise error

    monkeypatch.setattr(Saver, "check_folder", check)
    with pytest.raises(OutputFolderError if is_lost else CheckpointWriteError):
        saver._finish(final, Timing.LATER, None)
    assert removed == ([] if is_lost else [final])


@pytest.mark.parametrize(
    ("overrides", "limit", "expected"),
    [
        ((), 2, ["checkpoint-1"]),
        ((), None, []),
        ((), 0, []),
        (("_rotate_checkpoints",), 2, ["own"]),
        (("_rotate_checkpoints", "_sorted_checkpoints"), None, ["own"]),
        (("_sorted_checkpoints",), 2, ["checkpoint-2"]),
        (("_sorted_checkpoints",), None, []),
    ],
)
def test_what_is_beyond_the_limit_goes(overrides, limit, expected, monkeypatch, tmp_path):
    removed, asked = [], []
    folders = [str(tmp_path / f"checkpoint-{number}") for number in (1, 2, 3)]
    saver = make(overrides, args={"save_total_limit": limit})
    saver.mirror = SimpleNamespace(check=lambda: None)
    saver._host._rotate_checkpoints = lambda **options: (asked.append(options), removed.append("own"))

    def own_order(**options):
        asked.append(options)
        return [folders[1], str(tmp_path / "other"), folders[0], folders[2]]

    saver._host._sorted_checkpoints = own_order
    monkeypatch.setattr(manifest, "is_ours", lambda path: path in folders)
    monkeypatch.setattr(
        Saver, "in_rotation_order", lambda self, run_dir, done: folders if (run_dir, done) == (str(tmp_path), 3) else []
    )
    monkeypatch.setattr(Saver, "remove", lambda self, path: removed.append(os.path.basename(path)))
    saver._finish(folders[2], Timing.NOW, None)
    assert removed == expected
    assert all(one == {"use_mtime": True, "output_dir": str(tmp_path)} for one in asked)


@pytest.mark.parametrize("timing", [Timing.NOW, Timing.LATER, Timing.SUMMED])
@pytest.mark.parametrize("saves", [False, True])
def test_when_a_save_is_finished(timing, saves, monkeypatch):
    told = []
    monkeypatch.setattr(manifest, "file_stats", lambda final: {"of": final})
    monkeypatch.setattr(manifest, "relist_changed_files", lambda folder, stats: told.append((folder, stats)) or ())
    saver = make(args={"should_save": saves})
    saver.mirror = SimpleNamespace(check=lambda: None, send_held=lambda: told.append("sent"))
    saver.background = SimpleNamespace(submit=lambda part: told.append("submitted") or part())
    saver._finish_in_time("out/c", timing, lambda: told.append("finished"))
    at_once = ["finished"] * (timing is Timing.NOW) + ["submitted", "finished"] * (timing is Timing.LATER and saves)
    assert told == at_once
    told.clear()
    for _ in range(2):
        saver.end_of_event()
    seen = [("out/c", {"of": "out/c"})] * (saves and timing is not Timing.LATER)
    after = ["submitted", "finished"] * (saves and timing is Timing.SUMMED)
    assert told == [*seen, *after, "sent", "sent"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_checkpoint_that_a_callback_moved_is_no_error(is_there, monkeypatch, tmp_path):
    def fail(folder, stats):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(manifest, "relist_changed_files", fail)
    saver, folder = make(), tmp_path / "checkpoint-3"
    saver._sealed = (str(folder), {})
    if not is_there:
        assert saver._adopt_changes() is None and saver._sealed is None
        return
    folder.mkdir()
    with pytest.raises(CheckpointWriteError, match="gone"):
        saver._adopt_changes()


@pytest.mark.parametrize(
    ("cause", "is_full", "way_out"),
    [
        (OSError(errno.ENOSPC, "full"), False, "make room there,"),
        (OSError(errno.EDQUOT, "quota"), False, "make room there,"),
        (OSError(errno.EROFS, "ro"), False, "give write permission there,"),
        (OSError(errno.EMFILE, "many"), False, "raise the limit of open files"),
        (OSError(errno.ENAMETOOLONG, "long"), False, "choose a shorter `output_dir`"),
        (OSError(errno.EEXIST, "there"), False, "another program writes there"),
        (OSError(errno.EIO, "bad"), False, "look for the disk's errors"),
        (OSError(errno.EIO, "bad"), True, "make room there,"),
        (OSError("no number"), False, "make room or give write permission there"),
        (RuntimeError("torch's"), False, "make room or give write permission there"),
        (RuntimeError("torch's"), True, "make room there,"),
    ],
)
def test_a_write_that_failed_names_its_way_out(cause, is_full, way_out, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0 if is_full else 1))
    said = str(saving._not_written(str(tmp_path / "checkpoint-3"), cause))
    assert f"Hint: {way_out}" in said and str(cause) in said and ("no space left on the disk" in said) is is_full
    gone = str(saving._not_written(str(tmp_path / "none" / "checkpoint-3"), cause))
    assert "no space left" not in gone


class Adds(Callback):
    def __init__(self, change):
        self.change = change

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.change(checkpoint)


@pytest.mark.parametrize(
    ("changes", "weights", "extras", "warned"),
    [
        ([lambda kept: kept.update(a=1)], None, {"a": 1}, 0),
        ([lambda kept: kept.update(a=1), lambda kept: kept.update(b=None)], None, {"a": 1, "b": None}, 0),
        ([lambda kept: kept.update(a=object(), b=2)], None, {"b": 2}, 1),
        ([lambda kept: kept.update(state_dict={"model.w": 5})], {"w": 5}, {}, 0),
        ([lambda kept: kept.update(state_dict=dict(kept["state_dict"]))], {"w": 1}, {}, 0),
        ([], None, {}, 0),
    ],
)
@pytest.mark.parametrize("lacks", ["", "lightning_trainer", "module"])
def test_lightning_callbacks_add_to_a_checkpoint(changes, weights, extras, warned, lacks, monkeypatch):
    told, asked = [], []
    monkeypatch.setattr(saving, "warn_once", told.append)
    module = SimpleNamespace(state_dict=lambda: asked.append(1) or {"model.w": 1})
    run = {"lightning_trainer": object(), "module": module} | ({lacks: None} if lacks else {})
    saver = make(run=run, _callbacks=SimpleNamespace(lightning=[Callback(), *map(Adds, changes)]))
    saver._ask_lightning_callbacks()
    assert saver._weights == (None if lacks else weights) and saver._extras == ({} if lacks else extras)
    assert len(told) == (0 if lacks else warned) and len(asked) == (0 if lacks else min(len(changes), 1))


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_model_holds_other_weights_for_a_while(is_pruned):
    model = nn.Linear(2, 1)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: value + 1 for name, value in own.items()}
    if is_pruned:
        other.pop("bias")
    with saving._holding(model, other):
        assert model.state_dict().keys() == other.keys()
        assert all(torch.equal(model.state_dict()[name], value) for name, value in other.items())
        assert torch.equal(model.weight, own["weight"] if is_pruned else other["weight"])
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items()) and len(own) == 2
    assert "state_dict" not in vars(model)


@pytest.mark.parametrize(
    ("of_all", "sharing", "added"), [(None, 1, 7.0), ([[2.0], [3.0]], 1, 5.0), ([[2.0], [2.0], [3.0], [3.0]], 2, 5.0)]
)
def test_operations_of_each_model_are_added(of_all, sharing, added):
    saver = make(current_flos=7.0)
    saver._host.accelerator.rank_slice.sharing = sharing
    rows = Rows([float_bits(7.0)])
    if of_all is not None:
        rows.of_all = torch.tensor([[float_bits(one) for one in row] for row in of_all])
    saver._add_flos(rows)
    assert saver._host.state.total_flos == added and saver._host.current_flos == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_what_other_ranks_have_listed_is_known(is_there, tmp_path):
    names = layout.files_of_rank(1, 2, 3)
    facts = {names[0]: {"bytes": 4, "sha256": "ab" * 32}}
    rows = Rows(as_rows(names, {}))
    saver = make(args={"world_size": 2})
    assert saver._known_to_all(None) == {} == saver._known_to_all(rows)
    if is_there:
        rows.of_all = torch.tensor([as_rows(layout.files_of_rank(0, 2, 3), {}), as_rows(names, facts)])
        known = saver._known_to_all(rows)
        assert list(known) == [names[0]] and known[names[0]]["bytes"] == 4


class Lock:
    def __init__(self, folder, lost=None, is_held=True):
        self.folder, self.lost, self.is_held = str(folder), lost, is_held

    def acquire(self):
        if self.lost:
            raise OutputFolderError("another run's")


@pytest.mark.parametrize(
    ("locks", "kept", "path", "refused"),
    [
        ([Lock("/a", "lost")], [], "/a/checkpoint-1", True),
        ([Lock("/a", "lost")], [], "/a", True),
        ([Lock("/a", "lost")], [], None, True),
        ([Lock("/a", "lost")], [], "/b", False),
        ([Lock("/a", "lost")], [], "/ab", False),
        ([Lock("/a", "lost", is_held=False)], [], "/a", False),
        ([Lock("/a")], [], "/a", False),
        (None, [], "/a", False),
        (None, [Lock("/a", "lost", is_held=False)], "/a/b", True),
        ([], [Lock("/a", "lost")], None, True),
    ],
)
def test_a_folder_that_is_lost_is_not_written_to(locks, kept, path, refused):
    saver = make()
    saver._lost = kept
    saver.folder = None if locks is None else SimpleNamespace(locks=dict(enumerate(locks)))
    try:
        saver.check_folder(path)
        was_refused = False
    except OutputFolderError:
        was_refused = True
    assert was_refused is refused


@pytest.mark.parametrize(
    ("locks", "store", "lost"),
    [
        (None, True, False),
        ([], False, False),
        ([], True, True),
        ([Lock("/a")], False, False),
        ([Lock("/a"), Lock("/b", "lost")], False, True),
    ],
)
def test_a_lost_folder_is_seen(locks, store, lost):
    saver = make()
    saver.folder = None if locks is None else SimpleNamespace(locks=dict(enumerate(locks)))
    saver.mirror = SimpleNamespace(has_lost_store=store)
    assert saver.has_lost_folder is lost


class Place(SavingPlace):
    def __init__(self, final, owner, in_place=False):
        super().__init__(final, owner, in_place)
        self.told, self.fails = [], None

    def seal(self, *facts, **more):
        if self.fails is not None:
            raise self.fails
        self.told.append((facts, more))

    def put(self):
        self.told.append("put")

    def discard(self):
        self.told.append("discarded")


@pytest.mark.parametrize(
    ("timing", "flushes", "sums"),
    [
        (Timing.NOW, True, False),
        (Timing.BACKGROUND, True, False),
        (Timing.LATER, False, False),
        (Timing.SUMMED, False, True),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("pushes", [False, True])
def test_a_folder_is_written_sealed_and_pushed(timing, flushes, sums, saves, pushes, tmp_path):
    saver = make(args={"should_save": saves, "push_to_hub": pushes, "save_total_limit": 4})
    folder, written = Folder(), []
    place = Place(str(tmp_path / "checkpoint-3"), folder.owner)
    assert saver._put(folder, place, timing, True, written.append) is True
    run_dir = str(tmp_path)
    assert written == [place.folder] and os.path.isdir(place.hidden)
    assert place.told == ([(("writer", flushes, {}), {"sums": sums}), "put"] if saves else [])
    assert folder.told == ([("held", run_dir), ("writer", run_dir, 4), ("held", run_dir)] if saves else [])
    beside = timing is Timing.BACKGROUND
    assert saver._host._pushes.unpushed == (place.final if pushes and beside else None)
    assert saver._host._pushes.pushed == [place.final] * (pushes and not beside)


@pytest.mark.parametrize(
    ("ends_at_once", "world_size", "in_updates", "is_told"),
    [(True, 2, False, True), (False, 1, False, True), (False, 2, True, True), (False, 2, False, False)],
)
def test_an_error_of_the_name_is_told_at_once_or_at_the_next_save(
    ends_at_once, world_size, in_updates, is_told, tmp_path
):
    sources = SimpleNamespace(in_updates=in_updates)
    saver = make(
        args={"world_size": world_size, "push_to_hub": True},
        run={"flag_agreement": SimpleNamespace(sources=sources)},
        callback_handler=None,
    )
    folder = Folder()
    place = Place(str(tmp_path / "checkpoint-3"), folder.owner)
    place.fails = OSError(errno.ENOSPC, "full")
    if is_told:
        with pytest.raises(CheckpointWriteError, match="make room"):
            saver._put(folder, place, Timing.LATER, ends_at_once, lambda path: None)
        assert saver.background.settle() is None
    else:
        assert saver._put(folder, place, Timing.LATER, ends_at_once, lambda path: None) is False
        assert isinstance(saver.background.settle(), CheckpointWriteError)
    assert place.told == ["discarded"] and saver._host._pushes.pushed == []


@pytest.mark.parametrize(
    ("error", "raised", "saves"),
    [
        (OSError(errno.EIO, "bad"), CheckpointWriteError, True),
        (RuntimeError("torch"), CheckpointWriteError, False),
        (OutputFolderError("own"), OutputFolderError, True),
        (ValueError("other"), ValueError, True),
        (KeyboardInterrupt(), KeyboardInterrupt, True),
    ],
)
def test_an_error_of_the_disk_becomes_one_of_the_checkpoint(error, raised, saves, tmp_path):
    saver = make(args={"should_save": saves})
    place = Place(str(tmp_path / "checkpoint-3"), Owner())
    with pytest.raises(raised) as caught, saver._together(place):
        raise error
    assert type(caught.value) is raised and place.told == ["discarded"] * saves


@pytest.mark.parametrize(
    ("name", "content", "rank", "world", "saves", "file"),
    [
        ("scheduler.pt", {"a": 1}, 0, 1, True, "scheduler.pt"),
        ("scheduler.pt", {"a": 1}, 1, 2, False, None),
        ("scheduler.pt", None, 0, 1, True, None),
        ("run_state.pt", {"a": 1}, 0, 1, True, "run_state.pt"),
        ("run_state.pt", {"a": 1}, 1, 2, False, layout.of_rank("run_state.pt", 1, 2)),
        ("more.json", {"a": 1}, 0, 1, True, "more.json"),
    ],
)
def test_a_state_is_written_where_this_rank_has_it(name, content, rank, world, saves, file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        saving, "STATE_FILES", [saving.StateFile("x", None), saving.StateFile(name, lambda own: content)]
    )
    saver = make(args={"process_index": rank, "world_size": world, "should_save": saves})
    saver.write_state(name, str(tmp_path))
    assert os.listdir(tmp_path) == ([file] if file else [])
    if file:
        path = tmp_path / file
        assert (json.loads(path.read_text()) if file.endswith("json") else torch.load(path)) == content


@pytest.mark.parametrize("scaler", [None, SimpleNamespace(state_dict=lambda: {"scale": 2})])
@pytest.mark.parametrize("schedule", [None, SimpleNamespace(state_dict=lambda: {"last_epoch": 2})])
def test_states_that_a_training_does_not_have(scaler, schedule):
    saver = make(lr_scheduler=schedule)
    saver._host.accelerator.scaler = scaler
    assert saver._state_of_schedule() == (schedule and {"last_epoch": 2})
    assert saver._state_of_scaler() == (scaler and {"scale": 2})


@pytest.mark.parametrize("lacks", ["lightning_trainer", "windows"])
def test_outside_of_a_training_there_is_no_state_of_the_run(lacks):
    saver = make(run={"lightning_trainer": object(), "windows": object(), lacks: None})
    assert saver._state_of_run() is None


@pytest.mark.parametrize(
    ("within", "stops", "rate", "own_rng", "asked"),
    [
        (False, False, 0.5, False, (False, False)),
        (True, True, None, False, (False, True)),
        (False, True, 0.5, True, (True, False)),
        (True, False, None, True, (False, True)),
    ],
)
def test_the_state_of_the_run(within, stops, rate, own_rng, asked, monkeypatch):
    seen = []

    class Position:
        def beside(self, known):
            seen.append(sorted(known))
            return SimpleNamespace(to_plain=lambda: {"epoch": 0})

    def position(epoch_is_over, before_last):
        seen.append((epoch_is_over, before_last))
        return Position()

    monkeypatch.setattr(saving, "is_training_batch", lambda trainer: within)
    run = {
        "lightning_trainer": object(),
        "windows": SimpleNamespace(position=position),
        "losses": SimpleNamespace(state_with=lambda norm: ({"sum": 1}, norm)),
        "grad_norm": 2.0,
        "learning_rate": None if rate is None else torch.tensor(rate),
        "moment": saving.RunState.__dataclass_fields__["moment"].default,
        "loader": SimpleNamespace(num_workers=3, persistent_workers=True),
        "evaluated": {"b", "a"},
    }
    saver = make(
        ("_save_rng_state",) if own_rng else (),
        run=run,
        control=SimpleNamespace(should_epoch_stop=stops),
        get_sp_size=lambda: 2,
        _train_batch_size=8,
        args={"world_size": 2},
    )
    saver._host.accelerator.rank_slice = SimpleNamespace(sharing=1, world_size=3)
    saver._extras = {"x": 1}
    state = saver._state_of_run()
    assert seen[0] == asked and bool(seen[1]) is not own_rng
    assert state["samples_per_micro_batch"] == 12 and state["evaluated"] == ["a", "b"] and state["extras"] == {"x": 1}
    assert (state["workers"], state["keeps_workers"], state["grad_norm"]) == (3, True, 2.0)
    assert state["learning_rate"] == rate and (state["world_size"], state["sequence"]) == (2, 2)


def test_the_best_checkpoint_stays_alone(monkeypatch, tmp_path):
    folders = [str(tmp_path / f"checkpoint-{number}") for number in (1, 2, 3)]
    saver, removed, said = make(), [], []
    monkeypatch.setattr(Saver, "in_rotation_order", lambda self, run_dir, done: folders if done == 0 else [])
    monkeypatch.setattr(Saver, "remove", lambda self, path: removed.append(path))
    monkeypatch.setattr(saving, "log_line", said.append)
    saver.keep_best_alone(str(tmp_path), folders[1])
    assert removed == [folders[0], folders[2]] and len(said) == 2 and saver.mirror.alone == folders[1]


@pytest.mark.parametrize(
    ("at_once", "strategy", "rank", "on_each", "taken"),
    [
        (True, "steps", 0, False, 1),
        (True, "no", 0, False, 0),
        (False, "steps", 0, False, 0),
        (True, "steps", 1, False, 0),
        (True, "steps", 1, True, 1),
        (True, "steps", 0, True, 1),
        (False, "steps", 1, True, 0),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
def test_who_takes_the_folder_and_when(at_once, strategy, rank, on_each, taken, saves, monkeypatch):
    told = []
    monkeypatch.setattr(Saver, "_take", lambda self, folder: told.append("taken"))
    args = {"save_strategy": strategy, "enable_jit_checkpoint": False, "process_index": rank, "should_save": saves}
    saver = make(args=args | {"save_on_each_node": on_each})
    saver.background, owner = Background(), Owner()
    facts = SimpleNamespace(owner=owner)

    def compare(given, before):
        told.append("compared")
        if before is not None:
            before()
        facts.owner = other

    other = Owner()
    with saver.taking_folder(at_once, facts, compare):
        assert saver.folder.owner is other
    expected = taken if rank == 0 or saves else 0
    assert told == ["compared"] + ["taken"] * expected
    assert saver.folder is None and saver.background.told == ["waited"]


@pytest.mark.parametrize("unwritten", [None, CheckpointWriteError("not written")])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_training_that_fails_leaves_its_folder(unwritten, trains, is_async, monkeypatch):
    saver = make(
        is_in_train=trains, args={"save_strategy": "no", "enable_jit_checkpoint": False, "async_save": is_async}
    )
    saver.background, memory = Background(unwritten), saver.copy_memory
    saver._lost, saver._unfinished = ["earlier"], lambda: None
    lost, released = Lock("/a", "lost"), []
    lost.release = lambda: released.append(1)
    kept = Lock("/b")
    kept.release = lambda: released.append(2)
    with pytest.raises(ValueError, match="own") as caught, saver.taking_folder(at_once=True):
        saver.folder.locks = {"/a": lost, "/b": kept}
        raise ValueError("own")
    assert getattr(caught.value, "__notes__", []) == ([] if unwritten is None else ["not written"])
    assert saver.background.told == ["submitted", "settled"] and released
    assert saver._lost == (["earlier"] if not trains else []) + [lost] and saver.folder is None
    assert (saver.copy_memory is memory) is not is_async
