"""A run whose output folder has a store: what is told as stored is whole there, and goes on anywhere."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
import torch

from helpers import object_store, toy
from helpers.forking import run_ranks
from helpers.object_store import Fault
from helpers.parity.compare import same
from hf_compat import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.layout import list_checkpoints
from hf_compat.checkpoint.reading import MANIFEST_KIND
from hf_compat.checkpoint.store import OWNER_NAME, CheckpointStore
from hf_compat.cli.main import main as command
from hf_compat.errors import CheckpointError, MissingCheckpoint, OutputFolderError, StoreError, UnsupportedArgument
from hf_compat.runtime import stores
from hf_compat.training_run import uploads

ADDRESS = "s3://bucket/run"


@pytest.fixture(scope="module")
def server():
    with object_store.serving() as started:
        yield started


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_STORES", {})
    monkeypatch.setattr(stores, "PAUSES", (0.01, 0.01))
    with object_store.reached(server):
        yield server
        server.reset()


def make(folder=None, callbacks=(), cls=Trainer, **values):
    """A Trainer on a machine of its own: another local folder each time that one is named."""
    set_seed(3)
    base = {
        "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True,
        "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    place = {"output_dir": ADDRESS} if folder is None else {"output_dir": str(folder), "output_store": ADDRESS}
    args = TrainingArguments(**{**place, **base, **values})
    data = {"train_dataset": toy.rows(), "eval_dataset": toy.rows(8, 5)}
    return cls(toy.Classifier(), args, callbacks=list(callbacks), **data)


def outcome(trainer):
    logs = [
        {k: v for k, v in log.items() if "second" not in k and "runtime" not in k} for log in trainer.state.log_history
    ]
    best = Path(trainer.state.best_model_checkpoint or "").name
    return logs, best, trainer.model.state_dict(), trainer.optimizer.state_dict()["state"], torch.rand(1)


def names(address=ADDRESS):
    """The names in the store, without those within checkpoints, which are listed if they are whole."""
    held = CheckpointStore(address)
    held.look()
    found = {name for name in held.storage.sizes() if not re.search(r"checkpoint-\d+/", name)}
    return found - {OWNER_NAME} | held.whole.keys()


def told_as_stored(caplog):
    return {one.args[0] for one in caplog.records if str(one.msg).startswith("Stored ")}


class StopsAt(TrainerCallback):
    def __init__(self, update, error):
        self.update, self.error = update, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.update:
            raise self.error


@pytest.mark.matrix
def test_a_trainer_that_has_stored_can_be_sent_to_another_process(store, tmp_path, caplog):
    trainer = make(tmp_path / "run")
    trainer.save_model()
    again = pickle.loads(pickle.dumps(trainer))
    caplog.set_level(logging.INFO, "hf_compat")
    again.train()
    assert told_as_stored(caplog) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_a_run_goes_on_from_the_store_alone_and_is_the_uninterrupted_one(store, tmp_path, caplog):
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the best is an early one
    whole = make(tmp_path / "whole", output_store=None, **best)
    whole.train()
    expected = outcome(whole)
    caplog.set_level(logging.INFO, "hf_compat")
    with pytest.raises(ZeroDivisionError):
        make(callbacks=[StopsAt(5, ZeroDivisionError())], **best).train()
    stored = names()
    assert {one for one in stored if "checkpoint" in one} <= told_as_stored(caplog)
    assert "checkpoint-4" in stored and {one for one in stored if "checkpoint" in one} == {
        "checkpoint-2",
        "checkpoint-4",
    }
    resumed = make(tmp_path / "elsewhere", **best)
    resumed.train(resume_from_checkpoint=True)
    found = outcome(resumed)
    assert same(found, expected), "to the last bit"
    assert found[1] == "checkpoint-2" == os.path.basename(*list_checkpoints(tmp_path / "elsewhere"))
    assert {one for one in names() if "checkpoint" in one} == {"checkpoint-2"}, "kept alone, as on this machine"


def test_all_that_lands_in_the_folder_is_stored(store, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_compat")

    class Writes(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            place = Path(args.output_dir, "notes", "deep")
            place.mkdir(parents=True)
            (place / "a b.txt").write_text("at the end")

    trainer = make(save_total_limit=2, callbacks=[Writes()])
    trainer.train()
    assert names() == {"checkpoint-4", "checkpoint-6", "notes/deep/a b.txt"}
    told = [one.getMessage() for one in caplog.records]
    assert f"Checkpoints are written to {trainer.args.output_dir} and stored in {ADDRESS}." in told
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": 1.0})
    trainer.create_model_card()
    beside = {"model.safetensors", "training_args.bin", "trainer_state.json", "train_results.json", "README.md"}
    assert names() >= beside | {"all_results.json", "checkpoint-6"}
    trainer.save_model(os.path.join(trainer.args.output_dir, "final"))
    assert "final/model.safetensors" in names()
    Path(trainer.args.output_dir, "later.txt").write_text("by the script")
    uploads._finish_at_exit(lambda: trainer._saver.mirror.uploads, os.getpid())
    assert "later.txt" in names()
    local = Path(trainer.args.output_dir, "checkpoint-6", "model.safetensors").read_bytes()
    assert fsspec.filesystem("s3").cat_file("bucket/run/checkpoint-6/model.safetensors") == local


def test_scripts_that_look_for_the_newest_checkpoint_find_it_in_the_store(store, tmp_path):
    assert get_last_checkpoint(ADDRESS) is None
    args = make().args
    assert os.path.isdir(args.output_dir) and get_last_checkpoint(args.output_dir) is None
    make(max_steps=4).train()
    shutil.rmtree(args.output_dir)
    assert get_last_checkpoint(ADDRESS) == f"{ADDRESS}/checkpoint-4"
    trainer = make()
    found = get_last_checkpoint(trainer.args.output_dir)
    assert found == os.path.join(trainer.args.output_dir, "checkpoint-4") and manifest.problems(found) == []
    shutil.rmtree(found)
    for wanted in (f"{ADDRESS}/checkpoint-2", os.path.join(trainer.args.output_dir, "checkpoint-2")):
        trainer = make(max_steps=3, save_strategy="no")
        trainer.train(resume_from_checkpoint=wanted)
        assert trainer._run.updates_before == 2 and os.path.isdir(os.path.join(trainer.args.output_dir, "checkpoint-2"))
        shutil.rmtree(trainer.args.output_dir)
    other = Trainer(
        toy.Classifier(), make(tmp_path / "x", output_store=None, max_steps=3).args, train_dataset=toy.rows()
    )
    other.train(resume_from_checkpoint=f"{ADDRESS}/checkpoint-2")
    assert other._run.updates_before == 2 and not [*Path(other.args.output_dir).glob(".c*")]
    with pytest.raises(MissingCheckpoint, match=rf"(?s)at {ADDRESS}\..*such as {ADDRESS}/checkpoint-4"):
        other.train(resume_from_checkpoint=ADDRESS)
    with pytest.raises(MissingCheckpoint, match="look at the address"):
        other.train(resume_from_checkpoint=f"{ADDRESS}/checkpoint-9")
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        make(tmp_path / "y", output_store="s3://bucket/nothing").train(resume_from_checkpoint=True)


def test_a_checkpoint_that_is_not_whole_is_passed_over(store, tmp_path, caplog):
    make(max_steps=4).train()
    files, place = fsspec.filesystem("s3"), "bucket/run/checkpoint-4"
    weights, listed = f"{place}/model.safetensors", f"{place}/manifest.json"
    content, list_of_files = files.cat_file(weights), files.cat_file(listed)
    marker = json.dumps({"kind": MANIFEST_KIND, "saving": "x", "name": "checkpoint-4"}).encode()
    damages = {
        "model.safetensors is missing": {weights: None},
        f"model.safetensors has {len(content) - 1} bytes, not what manifest.json says": {weights: content[:-1]},
        "the save into it did not end": {listed: marker},
        "manifest.json is not readable": {listed: b"{"},
        None: {listed: None},  # it was never told as stored
    }
    for wrong, changes in damages.items():
        for name, changed in changes.items():
            files.rm_file(name) if changed is None else files.pipe_file(name, changed)
        held = CheckpointStore(ADDRESS)
        held.look()
        assert [*held.whole] == ["checkpoint-2"] and held.incomplete.get("checkpoint-4") == wrong
        files.pipe_file(weights, content)
        files.pipe_file(listed, list_of_files)
    files.pipe_file(weights, content[:-1] + bytes([content[-1] ^ 1]))  # which its hash tells alone
    trainer = make(tmp_path / "elsewhere", max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._run.updates_before == 2
    assert "checkpoint-4 is not whole and is skipped: model.safetensors is damaged" in caplog.text


def test_a_failing_store_stops_no_training_and_loses_nothing(store, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_compat")
    store.fail(Fault("put", "cut before", within="checkpoint-2", count=1), Fault("put", "403", within="checkpoint-4"))
    trainer = make()
    with pytest.raises(
        StoreError, match=r"(?s)^checkpoint-4: not stored in s3://bucket/run.*folder .*/run alone.*Hint:"
    ) as told:
        trainer.train()
    assert trainer.state.global_step == 6 and trainer.state.log_history[-1]["train_loss"]
    assert told_as_stored(caplog) == {"checkpoint-2", "checkpoint-6"} == names()
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len([one for one in warned if one.startswith("checkpoint-4 is not stored")]) == 1, "once a checkpoint"
    store.fail()
    way_out = re.search(r"`hf-compat (upload [^`]*)`", str(told.value))[1]
    assert command(way_out.split()) == 0
    assert names() == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert command(["upload", str(tmp_path / "nothing"), ADDRESS]) == 2
    assert command(["upload", trainer.args.output_dir, "out"]) == 2


def test_what_has_failed_is_stored_with_the_next_save(store, caplog):
    caplog.set_level(logging.INFO, "hf_compat")

    class Mends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                trainer._saver.background.wait()
                trainer._saver.mirror.uploads.settle()
                assert not told_as_stored(caplog)
                store.fail()

    store.fail(Fault("put", "403", within="checkpoint-"))
    trainer = make(callbacks=[Mends()])
    trainer.train()
    assert names() == {"checkpoint-2", "checkpoint-4", "checkpoint-6"} == told_as_stored(caplog)


def test_a_store_that_cannot_be_reached_ends_the_training_before_it_begins(store):
    store.fail(Fault("list", "403"))
    trainer = make()
    with pytest.raises(StoreError, match="s3://bucket/run could not be listed: PermissionError: told to"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_bucket_that_is_not_there_is_named(store, tmp_path):
    with pytest.raises(StoreError, match="s3://nobucket/run could not be written: FileNotFoundError"):
        make(tmp_path / "out", output_store="s3://nobucket/run").train()
    assert not fsspec.filesystem("s3").exists("s3://nobucket")


def test_a_replaced_checkpoint_is_the_old_or_the_new_one_at_every_request(store, tmp_path):
    make(tmp_path / "old", max_steps=2).train()
    make(tmp_path / "new", max_steps=2, max_grad_norm=0.1, output_store=None).train()
    before, after = ((tmp_path / one / "checkpoint-2" / "manifest.json").read_bytes() for one in ("old", "new"))
    puts, seen = 2 * len([*(tmp_path / "new" / "checkpoint-2").iterdir()]) + 2, []
    tried = [*range(0, puts, 4), puts]  # how many requests go well
    for done in tried:
        held = CheckpointStore(ADDRESS)
        held.look()
        held.take("me")
        if seen and seen[-1] == after:
            held.put(tmp_path / "old" / "checkpoint-2", "checkpoint-2", "me")
        store.fail(Fault("put", "403", after=done))
        with pytest.raises(StoreError) if done < puts else contextlib.nullcontext():
            held.put(tmp_path / "new" / "checkpoint-2", "checkpoint-2", "me")
        store.fail()
        held = CheckpointStore(ADDRESS)
        held.look()
        seen.append(held.whole["checkpoint-2"].content)
        held.remove_left()
    assert seen == [before if done < puts // 2 else after for done in tried]
    assert manifest.problems(held.fetch("checkpoint-2", str(tmp_path / "fetched"))) == []


def test_a_run_that_another_one_has_taken_the_store_from_ends(store, tmp_path, caplog):
    class Taken(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                trainer._saver.background.wait()
                trainer._saver.mirror.uploads.settle()
                CheckpointStore(ADDRESS).take("other.000000-1-00000000")

    trainer = make(tmp_path / "out", callbacks=[Taken()])
    with pytest.raises(OutputFolderError, match=r"(?s)another run \(host other, process 1\) has begun to save there"):
        trainer.train()
    assert names() == {"checkpoint-2"}
    again = make(tmp_path / "again")
    again.train(resume_from_checkpoint=True)
    assert names() == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_a_signal_waits_for_the_upload_of_its_checkpoint(store, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_compat")

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    store.fail(Fault("put", "cut before", within="checkpoint-3", count=2))
    with pytest.raises(SystemExit) as left:
        make(tmp_path / "out", enable_jit_checkpoint=True, save_steps=5, callbacks=[Ends()]).train()
    assert left.value.code == 143 and told_as_stored(caplog) == {"checkpoint-3"} == names()


def test_a_callback_may_change_a_checkpoint_before_it_is_uploaded(store, tmp_path):
    class Changes(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            Path(args.output_dir, f"checkpoint-{state.global_step}", "vocab.txt").write_text("mine")

    make(tmp_path / "out", max_steps=2, callbacks=[Changes()]).train()
    assert fsspec.filesystem("s3").cat_file("bucket/run/checkpoint-2/vocab.txt") == b"mine"
    assert names() == {"checkpoint-2"}


def test_an_overridden_rotation_counts_in_the_store_too(store, tmp_path):
    class KeepsOne(Trainer):
        def _rotate_checkpoints(self, use_mtime=False, output_dir=None):
            for path in list_checkpoints(output_dir)[:-1]:
                shutil.rmtree(path)

    make(tmp_path / "out", cls=KeepsOne).train()
    assert names() == {"checkpoint-6"}


@pytest.mark.matrix
def test_an_older_local_checkpoint_gives_way_to_the_one_of_the_store(store, tmp_path, caplog):
    make(tmp_path / "here", max_steps=4).train()
    elsewhere = make(tmp_path / "there", max_steps=4, max_grad_norm=0.1)
    elsewhere.train(resume_from_checkpoint=f"{ADDRESS}/checkpoint-2")
    trainer = make(tmp_path / "here", max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert "is not the one in s3://bucket/run, which is fetched" in caplog.text
    weights = [(tmp_path / place / "checkpoint-4" / "model.safetensors").read_bytes() for place in ("here", "there")]
    assert weights[0] == weights[1]
    assert not [name for name in names() if "local" in name]


def test_a_damaged_local_checkpoint_gives_way_to_the_one_of_the_store(store, tmp_path, caplog):
    make(tmp_path / "here", max_steps=4).train()
    weights = tmp_path / "here" / "checkpoint-4" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    trainer = make(tmp_path / "here", max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._run.updates_before == 4 and weights.read_bytes() == content
    assert "checkpoint-4 is not the one in s3://bucket/run, which is fetched" in caplog.text


@pytest.mark.parametrize("fsdp", ["", pytest.param("fsdp2", marks=pytest.mark.matrix)])
def test_two_processes_store_one_checkpoint_and_resume_it(store, tmp_path, fsdp):
    sharded = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    values = {"ddp_timeout": 60, "save_total_limit": 1, **(sharded if fsdp else {})}

    def whole(rank):
        trainer = make(tmp_path / "whole", output_store=None, **values)
        trainer.train()
        torch.save(trainer.state.log_history[-2]["loss"], tmp_path / f"whole-{rank}")

    def first(rank):
        with pytest.raises(ZeroDivisionError):
            make(callbacks=[StopsAt(5, ZeroDivisionError())], **values).train()

    def second(rank):
        trainer = make(tmp_path / "elsewhere", **values)
        trainer.train(resume_from_checkpoint=True)
        assert trainer._run.updates_before == 4
        assert (trainer._saver.mirror.uploads is None) == (rank == 1)
        torch.save(trainer.state.log_history[-2]["loss"], tmp_path / f"resumed-{rank}")

    for body in (whole, first, second):
        ended = run_ranks(tmp_path / body.__name__, body, seconds=120)
        assert [rank.status for rank in ended] == [0, 0], [rank.said for rank in ended]
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    for rank in range(2):
        assert torch.load(tmp_path / f"resumed-{rank}") == torch.load(tmp_path / f"whole-{rank}")
    assert names() == {"checkpoint-6"}
    kept = (Path(place, "checkpoint-6") for place in (tmp_path / "whole", tmp_path / "elsewhere"))
    for one, other in zip(
        *(sorted(place.rglob("*.safetensors")) or sorted(place.rglob("*.distcp")) for place in kept), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()


def test_several_machines_are_refused(monkeypatch, tmp_path):
    with pytest.raises(UnsupportedArgument, match="of 1 machines writes its files"):
        make(tmp_path / "out", save_on_each_node=True)


def test_a_preflight_and_a_tool_leave_the_store_alone(store, tmp_path, monkeypatch):
    store.log()
    make(tmp_path / "out").preflight()
    monkeypatch.setenv("HF_COMPAT_ISOLATED_IN", "x")
    make(max_steps=2).train()
    assert store.log() == []
