"""A resume of FSDP 2's shards: each rank reads its own parts of the weights, once the model is sharded."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import toy
from helpers.forking import run_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed
from hf_compat.training_run.resumer import ResumeAt, Resumer

WIDTH, LAYERS = 512, 4
WHOLE = 4 * WIDTH * WIDTH * LAYERS  # bytes of the wide layers
PYTHONS = 2_000_000  # bytes at most of the modules that a process imports meanwhile, and of small files


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.toy = toy.Classifier()

    def forward(self, x, labels=None):
        wide = torch.zeros(1, WIDTH)
        for layer in self.layers:
            wide = layer(wide)
        found = self.toy(x, labels)
        return {**found, "loss": found["loss"] + wide.sum()}


class OwnLoading(Trainer):
    """Loads as its base does: an override of the user's may look at whole weights."""

    def _load_from_checkpoint(self, *args, **kwargs):
        super()._load_from_checkpoint(*args, **kwargs)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def resumed(folder: Path, kind: type[Trainer]) -> list[int]:
    """Train, resume in other processes, and return what each rank has read of the weights."""

    def body(rank: int) -> None:
        restore = Resumer.restore

        def counted(self, stage, *args, **kwargs):
            before = bytes_read()
            restore(self, stage, *args, **kwargs)
            if stage is ResumeAt.MODEL_READY:
                (folder / f"read{rank}.json").write_text(json.dumps(bytes_read() - before))

        Resumer.restore = counted
        set_seed(0)
        options = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["Linear"]}
        args = TrainingArguments(
            str(folder / "run"), max_steps=3, save_steps=2, use_cpu=True, disable_tqdm=True, report_to="none",
            fsdp=True, fsdp_config=options, logging_steps=1,
        )  # fmt: skip
        trainer = kind(Wide(), args, train_dataset=toy.Table(toy.rows()))
        trainer.train(resume_from_checkpoint=(folder / "run" / "checkpoint-2").is_dir())
        if rank == 0:
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            (folder / "losses.json").write_text(json.dumps(losses))

    losses = []
    for life in ("first", "second"):
        for ended in run_ranks(folder / life, body):
            assert ended.status == 0, ended.said
        losses.append(json.loads((folder / "losses.json").read_text()))
        for file in folder.glob("run/checkpoint-3/**/*"):
            if file.is_file():
                file.unlink()
    assert losses[0] == losses[1]
    return [json.loads((folder / f"read{rank}.json").read_text()) for rank in (0, 1)]


SHARDS = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["Linear"]}


def counts_of_resumes(folder: Path, world: int, names: tuple[str | bool, ...], **strategy) -> list[list[dict]]:
    """What each rank of each resume reads in bytes, and opens of the run's folder, before its first update."""

    class UntilTraining(TrainerCallback):
        def __init__(self, rank):
            self.rank, self.opened, self.before = rank, [], bytes_read()
            sys.addaudithook(self.note)

        def note(self, event, args):
            if event == "open" and str(folder / "run") in str(args[0]):
                self.opened.append(args[0])

        def on_train_begin(self, args, state, control, **kwargs):
            counts = {"bytes": bytes_read() - self.before, "opened": list(map(str, self.opened))}
            (folder / f"counts{self.rank}.json").write_text(json.dumps(counts))

    def body(rank: int, name: str | bool | None) -> None:
        args = TrainingArguments(
            str(folder / "run"), max_steps=3 if name else 2, use_cpu=True, disable_tqdm=True, report_to="none",
            save_strategy="no" if name else "steps", save_steps=2, **strategy,
        )  # fmt: skip
        trainer = Trainer(Wide(), args, train_dataset=toy.Table(toy.rows()))
        if name:
            trainer.add_callback(UntilTraining(rank))
        trainer.train(resume_from_checkpoint=name)

    found = []
    for place, name in enumerate((None, *names)):
        for ended in run_ranks(folder / f"logs{place}", functools.partial(body, name=name), world):
            assert ended.status == 0, ended.said
        if name:
            found.append([json.loads((folder / f"counts{rank}.json").read_text()) for rank in range(world)])
    return found


def sums_in_two_lives(folder: Path, between, resume: str | bool) -> list[float]:
    """Train, change what was saved, begin from it. Return sums of a layer: at updates 2 and 4, and where it began."""

    class Sums(TrainerCallback):
        def __init__(self):
            self.found = []

        def note(self, model):
            self.found.append(model.toy.outer.weight.full_tensor().double().sum().item())

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.note(model)

        def on_save(self, args, state, control, model=None, **kwargs):
            self.note(model)

    def body(rank: int, life: str) -> None:
        logging.getLogger("hf_compat").addHandler(logging.StreamHandler())  # pytest's keeps silent
        set_seed(len(life))  # other weights at first
        options = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["Linear"]}
        args = TrainingArguments(
            str(folder / "run"), max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True, report_to="none",
            fsdp=True, fsdp_config=options, learning_rate=1e-2,
        )  # fmt: skip
        sums = Sums()
        trainer = Trainer(Wide(), args, train_dataset=toy.Table(toy.rows()), callbacks=[sums])
        trainer.train(resume_from_checkpoint=resume if life == "second" else None)
        (folder / f"{life}{rank}.json").write_text(json.dumps(sums.found))

    for life in ("first", "second"):
        ranks = run_ranks(folder / f"logs of the {life}", functools.partial(body, life=life))
        assert [ended.status for ended in ranks] == [0, 0], ranks
        (folder / f"said in the {life}").write_text("\n".join(ended.said for ended in ranks))
        if life == "first":
            between(folder / "run")
    _, at_2, at_4 = json.loads((folder / "first0.json").read_text())
    return [at_2, at_4, json.loads((folder / "second0.json").read_text())[0]]


def test_shards_without_a_training_are_begun_with(tmp_path):
    def keep_the_weights_alone(run):
        shutil.move(run / "checkpoint-2" / "pytorch_model_fsdp_0", tmp_path / "alone" / "pytorch_model_fsdp_0")
        (tmp_path / "alone" / "model.safetensors").touch()  # makes it a saved model; shards are read first
        shutil.rmtree(run)

    (tmp_path / "alone").mkdir()
    at_2, _, begun = sums_in_two_lives(tmp_path, keep_the_weights_alone, str(tmp_path / "alone"))
    assert begun == at_2


def test_damaged_shards_are_passed_over_for_an_older_checkpoint(tmp_path):
    def damage(run):
        shards = run / "checkpoint-4" / "pytorch_model_fsdp_0" / "__1_0.distcp"
        content = bytearray(shards.read_bytes())
        content[len(content) // 2] ^= 1
        shards.write_bytes(content)
        manifest = run / "checkpoint-4" / "manifest.json"  # without it the damage is found when the file is read
        manifest.unlink()

    at_2, at_4, begun = sums_in_two_lives(tmp_path, damage, True)
    assert begun == at_2 != at_4


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_damage_that_one_rank_hashes_is_told_to_all(tmp_path, file):
    """Each of the two hashes one of the large files while it loads it. Both take the older checkpoint then."""

    def body(rank: int, resume: bool) -> None:
        logging.getLogger("hf_compat").addHandler(logging.StreamHandler())  # pytest's keeps silent
        set_seed(1 + resume)  # other weights at first
        args = TrainingArguments(
            str(tmp_path / "run"), max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True, report_to="none",
            learning_rate=1e-2, save_strategy="no" if resume else "steps",
        )  # fmt: skip
        trainer = Trainer(Wide(), args, train_dataset=toy.Table(toy.rows()))
        trainer.train(resume_from_checkpoint=resume or None)
        if resume:
            found = trainer.model.toy.outer.weight.double().sum().item()
            assert found == load_file(tmp_path / "last.safetensors")["toy.outer.weight"].double().sum().item()

    for ended in run_ranks(tmp_path / "first", functools.partial(body, resume=False)):
        assert ended.status == 0, ended.said
    damaged = tmp_path / "run" / "checkpoint-4" / file
    shutil.copy(tmp_path / "run" / "checkpoint-4" / "model.safetensors", tmp_path / "last.safetensors")
    content = bytearray(damaged.read_bytes())
    content[WHOLE // 2] ^= 1
    damaged.write_bytes(content)
    ranks = run_ranks(tmp_path / "second", functools.partial(body, resume=True))
    assert [ended.status for ended in ranks] == [0, 0], ranks
    assert f"{file} is damaged (its hash differs)" in ranks[0].said


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_damage_in_anothers_shard_is_found_by_its_reader_and_told_to_all(tmp_path, part):
    """Whoever reads a shard compares its hash, as the manifest has it. All ranks take the older checkpoint then."""

    def damage(run):
        shard = run / "checkpoint-4" / part / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[content.rindex(b"ZZZZ")] ^= 1  # what torch fills up with, which no checksum of an entry covers
        shard.write_bytes(content)

    at_2, at_4, begun = sums_in_two_lives(tmp_path, damage, True)
    assert begun == at_2 != at_4


def test_each_rank_reads_its_own_parts(tmp_path):
    for read in resumed(tmp_path, Trainer):
        assert 0.4 * WHOLE < read < 0.75 * WHOLE


def test_an_override_of_the_users_finds_whole_weights(tmp_path):
    for read in resumed(tmp_path, OwnLoading):
        assert read > 0.9 * WHOLE


def test_a_resume_reads_and_hashes_its_own_share_in_one_pass(tmp_path):
    sharded = {"fsdp": True, "fsdp_config": SHARDS}
    name = str(tmp_path / "2" / "run" / "checkpoint-2")
    by_true, by_name = counts_of_resumes(tmp_path / "2", 2, (True, name), **sharded)
    (of_four,) = counts_of_resumes(tmp_path / "4", 4, (True,), **sharded)
    for counts in (by_true, by_name, of_four):
        share = 3 * WHOLE / len(counts)  # weights, and two moments of each
        assert all(share < one["bytes"] < 1.1 * share + PYTHONS for one in counts)
    few, named, many = (max(len(one["opened"]) for one in counts) for counts in (by_true, by_name, of_four))
    assert max(named, many) <= few + 2  # the first rank has the files that belong to none


def test_copies_read_each_file_once_however_the_checkpoint_is_chosen(tmp_path):
    ways = (True, str(tmp_path / "run" / "checkpoint-2"))
    for counts in counts_of_resumes(tmp_path, 2, ways):
        for rank, one in enumerate(counts):
            assert 2 * WHOLE < one["bytes"] < 2 * WHOLE + PYTHONS, "the optimizer's file: the weights are mapped"
            names = [Path(path).name for path in one["opened"] if "checkpoint-2/" in path]
            large = {"model.safetensors", "optimizer.pt"}
            assert all(names.count(name) <= 1 + (name in large) for name in names), "a large one for its size, too"
            assert ("training_args.bin" in names) == (rank == 0), "they are for a warning, which the first rank gives"


def test_a_whole_optimizer_is_opened_by_the_first_rank_alone(tmp_path):
    options = {"fsdp": True, "fsdp_config": {**SHARDS, "state_dict_type": "FULL_STATE_DICT"}}
    ((first, second),) = counts_of_resumes(tmp_path, 2, (True,), **options)
    opened = [sum(path.endswith("/optimizer.pt") for path in one["opened"]) for one in (first, second)]
    assert opened[0] and not opened[1]


def test_an_edited_shard_of_a_named_checkpoint_is_told_of(tmp_path):
    def edit(run):
        shard = run / "checkpoint-4" / "pytorch_model_fsdp_0" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[content.rindex(b"ZZZZ")] ^= 1  # each entry is whole by itself
        shard.write_bytes(content)

    _, at_4, begun = sums_in_two_lives(tmp_path, edit, str(tmp_path / "run" / "checkpoint-4"))
    assert begun == at_4
    told = (tmp_path / "said in the second").read_text()
    assert told.count("__1_0.distcp differs from its manifest.json and is read as it is") == 1
