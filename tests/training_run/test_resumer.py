"""The table of a resume: its stages have an order, and its methods are called."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from helpers import toy
from helpers.toy import Stream
from hf_compat import Trainer
from hf_compat.checkpoint.run_state import ResumePoint
from hf_compat.errors import ArgumentError, CheckpointError, CheckpointMismatch
from hf_compat.training_run import resumer as resumes
from hf_compat.training_run.resumer import STAGES, ResumeAt, Resumer


def test_stages_stand_in_the_order_of_their_moments():
    order = list(ResumeAt)
    assert [stage.at for stage in STAGES] == sorted((stage.at for stage in STAGES), key=order.index)
    assert {stage.at for stage in STAGES} == set(ResumeAt)


@pytest.mark.parametrize("name", [stage.method for stage in STAGES if stage.method])
def test_every_override_is_called_by_a_resume(name, make_args, tmp_path):
    called = []

    def note(self, *args, **kwargs):
        called.append(name)
        return getattr(Trainer, name)(self, *args, **kwargs)

    options = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }
    Trainer(toy.Classifier(), make_args(**options), train_dataset=toy.rows(16)).train()
    options |= {"max_steps": 3, "restore_callback_states_from_checkpoint": True}
    trainer = type("Own", (Trainer,), {name: note})(toy.Classifier(), make_args(**options), train_dataset=toy.rows(16))
    trainer.train(resume_from_checkpoint=True)
    assert called == [name]


def _warned_of_workers(caplog, *, now, before=None, stream=False, evaluated=False, epoch=0, is_over=False):
    """What is said about workers: (number, whether they are kept) of the loader now, and of the interrupted run."""
    caplog.clear()
    loader = SimpleNamespace(num_workers=now[0], persistent_workers=now[1], dataset=Stream([]) if stream else [])
    resumed = None if before is None else SimpleNamespace(workers=before[0], keeps_workers=before[1])
    start = SimpleNamespace(epoch=epoch, epoch_is_over=is_over)
    Resumer._warn_of_workers(None, SimpleNamespace(loader=loader, resumed=resumed, evaluated=evaluated, start=start))
    words = {
        "stream": "share the stream's", "kept": "draws a random number", "anew": "within a worker begins anew",
    }  # fmt: skip
    return [name for name, text in words.items() if text in caplog.text]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"now": (2, False)}, []),
        ({"now": (2, False), "evaluated": True, "epoch": 1}, []),
        ({"now": (2, True)}, []),
        ({"now": (2, True), "evaluated": True}, ["anew"]),
        ({"now": (2, True), "epoch": 1}, ["anew"]),
        ({"now": (2, True), "is_over": True}, ["anew"]),
        ({"now": (2, True), "before": (2, False), "epoch": 1}, ["kept"]),
        ({"now": (2, False), "before": (2, True), "epoch": 1}, ["kept"]),
        ({"now": (2, False), "before": (1, False), "stream": True}, ["stream"]),
        ({"now": (2, False), "before": (1, False)}, []),
        ({"now": (0, False), "before": (1, False), "stream": True}, []),  # one reads the stream in both
        ({"now": (1, False), "before": (0, False), "stream": True}, []),
        ({"now": (2, True), "before": (3, False), "stream": True, "evaluated": True}, ["stream", "kept"]),
        ({"now": (2, True), "before": (None, None), "stream": True, "evaluated": True}, ["anew"]),
    ],
)
def test_workers_of_another_number_or_kind_are_told_of(caplog, facts, said):
    assert _warned_of_workers(caplog, **facts) == said


def resumer(**values):
    """A resumer of a host in one process, with other values for some of its members."""
    args = {
        "output_dir": "out", "output_store": None, "process_index": 0, "world_size": 1, "save_on_each_node": False,
        "per_device_train_batch_size": 4, "ignore_data_skip": False, "eval_strategy": "no", "logging_strategy": "steps",
        "save_strategy": "steps",
    } | values.pop("args", {})  # fmt: skip
    host = {
        "args": SimpleNamespace(**args), "optimizer": "given", "is_world_process_zero": lambda: True,
        "get_sp_size": lambda: 2, "_train_batch_size": 6, "_callbacks": SimpleNamespace(lightning=[]),
        "accelerator": SimpleNamespace(rank_slice=SimpleNamespace(world_size=4, sharing=1)),
    } | values  # fmt: skip
    saver = SimpleNamespace(folder=None, mirror=SimpleNamespace(uploads=None))
    return Resumer(SimpleNamespace(**host), saver)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(None, None), (True, True), (False, False), ("a/b", "a/b"), (Path("a"), "a"), ("memory://x/y", "memory://x/y")],
)
def test_what_is_wanted_is_read(given, wanted):
    assert resumes.wanted_checkpoint(given) == wanted


@pytest.mark.parametrize("given", [3, 1.0, ["a"], toy.rows(2)])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(ArgumentError, match="neither a path nor a truth value"):
        resumes.wanted_checkpoint(given)


@pytest.mark.parametrize(
    ("wanted", "found", "error", "trained", "is_noted"),
    [
        (True, "c", CheckpointError("broken. More"), False, True),
        (None, "c", CheckpointError("broken. More"), False, True),
        (False, "c", CheckpointError("broken. More"), False, True),
        ("named", "c", CheckpointError("broken. More"), False, False),
        (True, None, CheckpointError("broken. More"), False, False),
        (True, "c", CheckpointError("broken. More"), True, False),
        (True, "c", CheckpointMismatch("another model"), False, False),
        (True, "c", ValueError("other"), False, False),
        (True, "c", None, False, False),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_noted(wanted, found, error, trained, is_noted, monkeypatch):
    own, unloadable = resumer(), {}
    own.later_weights = own.weights_alone = "old"

    @contextlib.contextmanager
    def choosing(self, given, noted):
        assert given == wanted and noted is unloadable
        yield found

    monkeypatch.setattr(Resumer, "choosing_checkpoint", choosing)
    is_raised = error is not None and not is_noted
    raised = pytest.raises(type(error)) if is_raised else contextlib.nullcontext()
    with raised, own.attempting_resume(wanted, unloadable) as checkpoint:
        assert checkpoint == found and own.is_loading is (found is not None)
        assert own.later_weights is None and own.weights_alone is None
        own._host.optimizer = "made"
        if trained:
            own.is_loading = False
        if error is not None:
            raise error
    assert own.is_loading is False and list(unloadable) == ["c"] * is_noted
    assert own._host.optimizer == ("given" if is_noted else "made")
    assert not is_noted or "it cannot be loaded (broken. More)" in unloadable["c"]


@pytest.mark.parametrize(
    ("best", "folders", "found", "told"),
    [
        (None, [], None, ""),
        ("out/checkpoint-2", ["out/checkpoint-2"], "out/checkpoint-2", ""),
        ("was/checkpoint-2", ["was/checkpoint-2", "out/checkpoint-2"], "out/checkpoint-2", "is taken from"),
        ("was/checkpoint-2", ["was/checkpoint-2", "else/checkpoint-2"], "else/checkpoint-2", "is taken from"),
        ("else/checkpoint-2", ["else/checkpoint-2"], "else/checkpoint-2", ""),
        ("gone/checkpoint-2", ["else/checkpoint-2"], "else/checkpoint-2", "is taken from"),
        ("was/checkpoint-2", ["was/checkpoint-2"], None, "is not in the output folder"),
        ("gone/checkpoint-2", [], None, "does not exist anymore"),
        ("out/best", ["out/best"], None, "is not in the output folder"),
        ("was/best", ["else/best"], None, "does not exist anymore"),
    ],
)
def test_the_best_checkpoint_is_this_runs(best, folders, found, told, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(resumes.shared_logger, "warning", said.append)
    for folder in ("out", "else/checkpoint-4", *folders):
        (tmp_path / folder).mkdir(parents=True)
    at = "else" if "else" in str([best, folders]) else "out"
    own = resumer(args={"output_dir": str(tmp_path / "out")})
    result = own.best_of_state(best and str(tmp_path / best), str(tmp_path / at / "checkpoint-4"))
    assert result == (found and str(tmp_path / found))
    assert len(said) == bool(told) and all(told in one for one in said)


@pytest.mark.parametrize(
    ("kind", "is_first", "is_output", "has_others", "outcome"),
    [
        ("a file", True, False, False, "converted"),
        ("a model without a training", True, False, False, "model"),
        ("a model without a training", False, False, True, "model"),
        ("a model without a training", True, True, False, "model"),
        ("a model without a training", True, True, True, "refused"),
        ("a folder", True, False, False, "folder"),
        ("a folder", False, False, True, "folder"),
        ("a folder", True, False, True, "told"),
    ],
)
def test_what_a_named_path_leads_to(kind, is_first, is_output, has_others, outcome, tmp_path, monkeypatch):
    folder, output, told = tmp_path / "given", tmp_path / "out", []
    for one in (folder, output):
        one.mkdir()
    wanted = str(output if is_output else folder)
    if has_others:
        (tmp_path / wanted / "checkpoint-3").mkdir()
    monkeypatch.setattr(resumes, "read_lightning", lambda path: told.append(("read", path)) or "held")
    monkeypatch.setattr(resumes, "to_hf", lambda held, place: told.append((held, os.path.basename(place))))
    monkeypatch.setattr(resumes, "tell_of_model_alone", lambda path: told.append(("alone", path)))
    monkeypatch.setattr(
        resumes, "reading_named_folder", lambda *what: told.append(what[:3]) or contextlib.nullcontext()
    )
    monkeypatch.setattr(resumes.logger, "warning", lambda text, path: told.append(("told", path)))
    own = resumer(args={"output_dir": str(output)}, is_world_process_zero=lambda: is_first)
    with contextlib.ExitStack() as reading:
        if outcome == "refused":
            with pytest.raises(CheckpointError):
                own._named(wanted, kind, reading)
            return
        found = own._named(wanted, kind, reading)
        assert outcome != "converted" or os.path.isdir(os.path.dirname(found))
    if outcome == "converted":
        assert told == [("read", wanted), ("held", "checkpoint")] and os.path.basename(found) == "checkpoint"
        assert not os.path.isdir(os.path.dirname(found))
    elif outcome == "model":
        assert found is None and own.weights_alone == wanted and told == [("alone", wanted)] * is_first
    else:
        assert found == wanted
        assert told == [(wanted, is_first, str(output)), *[("told", wanted)] * (outcome == "told")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("file", "a file"), ("model", "a model without a training"), ("folder", "a folder"), ("none", "not there")],
)
def test_the_kind_of_a_path_is_the_same_everywhere(path, kind, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for name in ("model", "folder"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(resumes, "holds_model_alone", lambda path: path.name == "model")
    assert resumer()._kind(str(tmp_path / path)) == kind


@pytest.mark.parametrize("on_each", [False, True])
def test_which_files_a_process_verifies(on_each):
    share = resumer(args={"save_on_each_node": on_each, "process_index": 1, "world_size": 3})._share
    assert (share.rank, share.world_size) == ((0, 1) if on_each else (1, 3))


@pytest.mark.parametrize("checkpoint", [None, "c"])
@pytest.mark.parametrize("moment", list(ResumeAt))
def test_each_moment_restores_its_stages(checkpoint, moment, monkeypatch):
    told = []
    stages = [
        resumes.Stage(ResumeAt.RUN_NEW, "a", "first"),
        resumes.Stage(ResumeAt.RUN_NEW, "b", "second", takes_folder=False),
        resumes.Stage(ResumeAt.DATA_OPENED, "c", "third", lambda own, folder: told.append(("action", folder))),
    ]
    monkeypatch.setattr(resumes, "STAGES", stages)
    own = resumer(
        first=lambda *given: told.append(("first", *given)), second=lambda *given: told.append(("second", *given))
    )
    own.restore(moment, checkpoint)
    expected = {
        ResumeAt.RUN_NEW: [("first", "c"), ("second",)], ResumeAt.DATA_OPENED: [("action", "c")],
    }  # fmt: skip
    assert told == (expected.get(moment, []) if checkpoint else [])


@pytest.mark.parametrize(
    ("checkpoint", "writer", "folder", "finished", "run_id"),
    [
        ("c", "earlier", "new", False, "earlier"),
        ("c", "earlier", None, True, "earlier"),
        ("c", None, "new", False, "new"),
        (None, None, "new", False, "new"),
        (None, None, None, False, "before"),
        (None, None, "new", True, "new"),
    ],
)
def test_a_run_keeps_the_id_of_its_checkpoint(checkpoint, writer, folder, finished, run_id, monkeypatch):
    told = []
    held = SimpleNamespace(writer=writer and SimpleNamespace(run=writer))
    monkeypatch.setattr(resumes, "read_manifest", lambda path: held)
    monkeypatch.setattr(Resumer, "restore", lambda self, moment, path: told.append((moment, path)))
    own = resumer()
    own._saver.folder = folder and SimpleNamespace(new_run_id=lambda: folder)
    run = SimpleNamespace(checkpoint=checkpoint, run_id="before", start=SimpleNamespace(is_finished=finished))
    own.start(run)
    moments = [ResumeAt.RUN_NEW, *[ResumeAt.DATA_OPENED] * finished]
    assert run.run_id == run_id and told == [(moment, checkpoint) for moment in moments]


@pytest.mark.parametrize(
    ("args", "stored", "lines", "refused"),
    [
        ({}, {}, [], False),
        ({}, {"save_steps": 7}, ["save_steps: 5 (from args) != 7"], False),
        ({}, {"train_batch_size": 8}, ["per_device_train_batch_size: 4 (from args) != 8"], False),
        ({}, {"train_batch_size": None}, [], False),
        ({}, {"save_steps": 0}, [], True),
        ({"save_strategy": "epoch"}, {"save_steps": 0}, ["save_steps: 5 (from args) != 0"], False),
        ({}, {"eval_steps": 0}, ["eval_steps: 4 (from args) != 0"], False),
        ({"eval_strategy": "steps"}, {"eval_steps": 0}, [], True),
        ({}, {"logging_steps": 0}, [], True),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_the_intervals_of_a_state_count(args, stored, lines, refused, is_first, monkeypatch):
    said, told, given = [], [], []
    state = {"logging_steps": 3, "eval_steps": 4, "save_steps": 5, "train_batch_size": 4, "best_model_checkpoint": "b"}
    new = SimpleNamespace(**state | stored)
    monkeypatch.setattr(resumes, "read_state", lambda path, missing: given.append(missing) or new)
    monkeypatch.setattr(resumes.shared_logger, "warning", said.append)
    monkeypatch.setattr(resumes, "tell_of_other_best", lambda *what: told.append(what))
    monkeypatch.setattr(Resumer, "best_of_state", lambda self, best, path: (best, path))
    own = resumer(args=args, state=SimpleNamespace(**state), is_world_process_zero=lambda: is_first)
    if refused:
        with pytest.raises(CheckpointError, match="this run counts by it"):
            own._load_state("c")
        return
    own._load_state("c")
    assert given == [{"logging_steps": 3, "eval_steps": 4, "save_steps": 5}] and own._host.state is new
    assert new.best_model_checkpoint == ("b", "c") and told == [(own._host.args, new)] * is_first
    assert len(said) == bool(lines) and all(line in said[0] and said[0].count("!=") == 1 for line in lines)


@pytest.mark.parametrize(
    ("state", "same_cut", "rng", "loads", "evaluated"),
    [
        (None, False, None, False, {"a"}),
        ({}, True, "own", True, {"a", "b"}),
        ({}, False, None, False, {"a"}),
        ({"world_size": 2}, False, "own", True, {"a"}),
        ({"sharing": 3}, False, "own", True, {"a"}),
        ({"sequence": 1}, False, "own", True, {"a"}),
    ],
)
def test_the_position_and_the_sums_are_resumed(state, same_cut, rng, loads, evaluated, monkeypatch):
    asked, sums = [], []
    usual = {"world_size": 1, "sharing": 1, "sequence": 2, "losses": "sums", "evaluated": ["b"]}
    held = None if state is None else SimpleNamespace(**usual | state)
    point = ResumePoint(has_same_cut=same_cut, rng=rng)
    monkeypatch.setattr(resumes, "read_random_states", lambda *what: asked.append(what) or "random")
    monkeypatch.setattr(resumes.RunState, "load", lambda *what: asked.append(what) or held)
    monkeypatch.setattr(resumes, "resume_point", lambda *what: asked.append(what) or point)
    monkeypatch.setattr(Resumer, "_warn_of_workers", lambda self, run: asked.append("workers"))
    monkeypatch.setattr(Resumer, "_warn_of_order", lambda self, path: asked.append(("order", path)))
    run = SimpleNamespace(
        counts=SimpleNamespace(max_updates=9), updates_before=3, losses=SimpleNamespace(load_state_dict=sums.append),
        evaluated={"a"},
    )  # fmt: skip
    own = resumer(_run=run)
    own._load_position("c")
    assert run.resumed is held and run.start.rng == (rng or "random") and run.evaluated == evaluated
    assert sums == ["sums"] * loads
    samples = 6 * 4 // 2
    assert asked == [
        ("c", 0, 1), ("c", 0, 1, "random"), (held, 3, run.counts, own._host.args, samples, 1, 2), "workers",
        ("order", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("done", "is_first", "ignores", "is_over", "outcome"),
    [
        (8, True, False, False, "order"),
        (8, False, False, False, None),
        (8, True, True, False, None),
        (8, True, False, True, None),
        (9, True, False, False, "nothing left"),
        (9, False, True, True, "nothing left"),
        (10, True, False, False, "nothing left"),
    ],
)
def test_what_is_said_at_the_position(done, is_first, ignores, is_over, outcome, monkeypatch):
    said = []
    monkeypatch.setattr(resumes, "read_random_states", lambda *what: "random")
    monkeypatch.setattr(resumes.RunState, "load", lambda *what: None)
    monkeypatch.setattr(resumes, "resume_point", lambda *what: ResumePoint(epoch_is_over=is_over))
    monkeypatch.setattr(
        resumes.shared_logger, "warning", lambda text: said.append("nothing left") if "Nothing is left" in text else 0
    )
    monkeypatch.setattr(Resumer, "_warn_of_workers", lambda self, run: None)
    monkeypatch.setattr(Resumer, "_warn_of_order", lambda self, path: said.append("order"))
    run = SimpleNamespace(counts=SimpleNamespace(max_updates=9), updates_before=done)
    own = resumer(_run=run, args={"ignore_data_skip": ignores}, is_world_process_zero=lambda: is_first)
    own._load_position("c")
    assert said == ([] if outcome is None else [outcome])


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"data_seed": 1, "train_sampling_strategy": "random", "seed": 5}, []),
        ({"data_seed": 2}, ["data_seed: 1 (from args) != 2"]),
        ({"data_seed": 2, "train_sampling_strategy": "sequential"}, ["data_seed", "train_sampling_strategy"]),
        ({}, []),
        (None, []),
        (3, []),
        (CheckpointError("broken"), []),
    ],
)
def test_arguments_that_change_the_order_are_named(saved, said, monkeypatch):
    told = []

    def read(path):
        if isinstance(saved, Exception):
            raise saved
        return saved

    monkeypatch.setattr(resumes.shared_logger, "warning", told.append)
    monkeypatch.setattr(
        resumes, "Contents", lambda path: SimpleNamespace(find=lambda name: None if saved is None else "p")
    )
    monkeypatch.setattr(resumes, "read_torch_file", read)
    values = {"data_seed": 1, "train_sampling_strategy": "random", "seed": 4}
    resumer(args={"to_dict": lambda: values})._warn_of_order("c")
    assert len(told) == bool(said) and all(one in told[0] for one in said)
    assert not told or told[0].count("(from args)") == len(said)


class Loads(pl.Callback):
    def __init__(self):
        self.told = []

    def load_state_dict(self, state):
        self.told.append(state)

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.told.append(checkpoint)


class LoadsState(pl.Callback):
    told: list = []

    def load_state_dict(self, state):
        self.told.append(state)


@pytest.mark.parametrize(
    ("saved", "extras"), [({}, {}), ({"a": 1}, {}), ({}, {"b": 2}), ({"a": 1}, {"b": 2}), (None, None)]
)
def test_lightning_callbacks_get_their_states_back(saved, extras):
    one, other = Loads(), LoadsState()
    resumed = None if saved is None else SimpleNamespace(callbacks={one.state_key: saved}, extras=extras)
    run = SimpleNamespace(lightning_trainer=1, module=SimpleNamespace(state_dict=lambda: {"w": 1}), resumed=resumed)
    own = resumer(_run=run, _callbacks=SimpleNamespace(lightning=[one, other]))
    own._load_lightning_callbacks("c")
    assert one.told == ([saved] if saved else []) + ([{"state_dict": {"w": 1}, "b": 2}] if extras else [])
    assert other.told == []


@pytest.mark.parametrize(
    ("wanted", "store", "address_in_run", "first", "outcome"),
    [
        ("memory://other/checkpoint-3", "memory://run", None, True, "fetched"),
        ("memory://other/checkpoint-3", None, None, True, "fetched"),
        ("memory://other/checkpoint-3", None, None, False, "as given"),
        ("memory://run/checkpoint-3", "memory://run", "checkpoint-3", True, "brought"),
        ("memory://run/a/checkpoint-3", "memory://run", "a/checkpoint-3", True, "brought"),
        ("memory://runs/checkpoint-3", "memory://run", None, True, "fetched"),
        ("checkpoint-3", "memory://run", None, True, "brought as given"),
        ("checkpoint-3", "memory://run", None, False, "as given"),
    ],
)
def test_a_named_checkpoint_may_come_from_a_store(wanted, store, address_in_run, first, outcome, tmp_path, monkeypatch):
    told, output = [], str(tmp_path / "out")
    uploads = SimpleNamespace(look=lambda: told.append("looked"), bring=lambda path: told.append(("brought", path)))
    monkeypatch.setattr(
        resumes, "fetch_checkpoint", lambda address, place: told.append((address, os.path.isdir(place))) or "fetched"
    )
    own = resumer(args={"output_dir": output, "output_store": store}, is_world_process_zero=lambda: first)
    own._saver.mirror.uploads = uploads if store and first else None
    with contextlib.ExitStack() as reading:
        found = own._brought(wanted, reading)
    here = wanted if address_in_run is None else os.path.join(output, *address_in_run.split("/"))
    if outcome == "fetched":
        assert found == "fetched" and told == [(wanted, True)]
    elif outcome.startswith("brought"):
        assert found == here and told == ["looked", ("brought", here)]
    else:
        assert found == wanted and told == []


@pytest.mark.parametrize("has_uploads", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_checkpoint_that_the_folder_lacks_is_fetched(has_uploads, first, is_there):
    told = []
    own = resumer(is_world_process_zero=lambda: first)
    own._saver.mirror.uploads = (
        SimpleNamespace(bring=lambda *what: told.append(what) or is_there) if has_uploads else None
    )
    assert own._bring("c", True) is (has_uploads and first and is_there)
    assert told == [("c", True)] * (has_uploads and first) and own._fetched == (
        {"c"} if has_uploads and first and is_there else set()
    )


@pytest.mark.parametrize("store", [None, "memory://run"])
@pytest.mark.parametrize("checkpoint", [None, "c"])
@pytest.mark.parametrize("has_uploads", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_best_checkpoint_is_fetched_too(store, checkpoint, has_uploads, has_state, tmp_path, monkeypatch):
    told, folder = [], checkpoint and str(tmp_path)
    if has_state:
        (tmp_path / "trainer_state.json").write_text("{}")
    monkeypatch.setattr(resumes, "read_state", lambda path: SimpleNamespace(best_model_checkpoint="best"))
    own = resumer(args={"output_store": store})
    own._saver.mirror.uploads = SimpleNamespace(bring_best=lambda *what: told.append(what)) if has_uploads else None
    own._bring_best(folder)
    assert told == [(folder, "best" if has_state else None)] * (has_uploads and checkpoint is not None)


@pytest.mark.parametrize("problems", [[], ["one"]])
def test_problems_of_all_ranks_are_listed(problems, monkeypatch):
    monkeypatch.setattr(resumes.manifest, "problems", lambda path, share: list(problems))
    monkeypatch.setattr(resumes, "gather_objects", lambda found: [found, ["of another rank"]])
    assert resumer()._problems("c") == (["one", "of another rank"] if problems else [])
