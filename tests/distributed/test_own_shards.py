"""A resume of FSDP 2's shards: each rank reads its own parts of the weights, once the model is sharded."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch

from helpers import toy
from helpers.forking import run_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed
from hf_compat.training_run.resumer import ResumeAt, Resumer

WIDTH, LAYERS = 512, 4
WHOLE = 4 * WIDTH * WIDTH * LAYERS  # bytes of the wide layers


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
        for ended in run_ranks(folder / f"logs of the {life}", functools.partial(body, life=life)):
            assert ended.status == 0, ended.said
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


def test_each_rank_reads_its_own_parts(tmp_path):
    for read in resumed(tmp_path, Trainer):
        assert 0.4 * WHOLE < read < 0.75 * WHOLE


def test_an_override_of_the_users_finds_whole_weights(tmp_path):
    for read in resumed(tmp_path, OwnLoading):
        assert read > 0.9 * WHOLE
