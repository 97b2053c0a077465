"""A resume of FSDP 2's shards: each rank reads its own parts of the weights, once the model is sharded."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from helpers import toy
from helpers.forking import run_ranks
from hf_compat import Trainer, TrainingArguments, set_seed
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


def test_each_rank_reads_its_own_parts(tmp_path):
    for read in resumed(tmp_path, Trainer):
        assert 0.4 * WHOLE < read < 0.75 * WHOLE


def test_an_override_of_the_users_finds_whole_weights(tmp_path):
    for read in resumed(tmp_path, OwnLoading):
        assert read > 0.9 * WHOLE
