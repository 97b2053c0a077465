"""Shards of DeepSpeed and of torch.distributed.checkpoint become weights that `from_pretrained` reads.

`zero/` was written by DeepSpeed 0.19.8: two CPU processes, ZeRO 2 and 3, the net of the prototype; `weights.pt` are the
weights that the processes then held.
"""

from __future__ import annotations

import enum
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers import toy
from helpers.parity.compare import same
from hf_compat.checkpoint import convert as converting
from hf_compat.checkpoint.convert import HFCheckpointIO, convert, to_hf
from hf_compat.checkpoint.files import member_of
from hf_compat.checkpoint.reading import read_torch_file
from hf_compat.checkpoint.run_state import DataPosition, RunState
from hf_compat.cli.main import main as command
from hf_compat.errors import CheckpointError, HfCompatWarning
from hf_compat.runtime.seeding import read_rng

ZERO = Path(__file__).with_name("zero")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("shard_bytes", [10**9, 100])
def test_zero_shards(tmp_path, stage, shard_bytes):
    convert(str(ZERO / f"stage{stage}"), str(tmp_path / "hf"), shard_bytes)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == (1 if shard_bytes == 10**9 else 3)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = torch.load(ZERO / "weights.pt", weights_only=True)
    assert same({name.removeprefix("net."): tensor for name, tensor in found.items()}, expected)


def test_a_missing_rank_is_named(tmp_path):
    shutil.copytree(ZERO / "stage3", tmp_path / "zero")
    next((tmp_path / "zero").rglob("*rank_1*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="of 1 ranks, of 2"):
        convert(str(tmp_path / "zero"), str(tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


class Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


@pytest.mark.parametrize("where", ["zero", "dcp", "ckpt"])
def test_shards_and_checkpoints_cannot_run_code(tmp_path, where):
    mark, source = tmp_path / "mark", tmp_path / "source"
    if where == "zero":
        shutil.copytree(ZERO / "stage2", source)
        torch.save({"module": Payload(mark)}, next(source.rglob("*model_states.pt")))
    elif where == "dcp":
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    else:
        source = tmp_path / "it.ckpt"
        torch.save({"state_dict": {}, "hyper_parameters": {"_instantiator": Payload(mark)}}, source)
    with pytest.raises(CheckpointError):
        convert(str(source), str(tmp_path / "hf"))
    assert not mark.exists()


def test_an_instantiator_in_a_lightning_checkpoint_is_not_called(make_args, tmp_path):
    """Lightning calls what `_instantiator` names; we never build a module from a checkpoint."""
    import hf_compat

    path, mark = tmp_path / "it.ckpt", tmp_path / "mark"
    weights = {f"model.{name}": tensor for name, tensor in toy.Classifier().state_dict().items()}
    hostile = {"_instantiator": "os.system", "command": f"touch '{mark}'"}
    torch.save({"state_dict": weights, "global_step": 0, "epoch": 0, "hyper_parameters": hostile}, path)
    trainer = hf_compat.Trainer(toy.Classifier(), make_args(max_steps=1), train_dataset=toy.rows())
    trainer.train(resume_from_checkpoint=str(path))
    assert not mark.exists()


def test_dcp_shards_one_file_at_a_time(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = toy.tiny_gpt2()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    dcp.save({f"model.{name}": tensor for name, tensor in weights.items()}, checkpoint_id=tmp_path / "shards")
    convert(str(tmp_path / "shards"), str(tmp_path / "hf"), shard_bytes=10_000)
    model.config.save_pretrained(tmp_path / "hf")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert same(again.state_dict(), model.state_dict())
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2


def test_an_index_that_an_early_python_3_11_has_written(tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, proto: (getattr, (type(self), self.name)))
    dcp.save({"model.a": torch.ones(2)}, checkpoint_id=tmp_path / "shards")
    convert(str(tmp_path / "shards"), str(tmp_path / "hf"))
    assert same(load_file(next((tmp_path / "hf").glob("*.safetensors"))), {"a": torch.ones(2)})


class Asks:
    def __init__(self, of: object, name: str) -> None:
        self.reduced = getattr, (of, name)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(("of", "name"), [(Asks, "mro"), (os, "system"), (torch.Tensor, "data")])
def test_getattr_gives_nothing_but_members_of_enums(tmp_path, of, name):
    with pytest.raises(pickle.UnpicklingError, match="getattr"):
        member_of(of, name)
    torch.save(Asks(torch.Tensor, name), tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=r"it\.pt cannot be read"):
        read_torch_file(str(tmp_path / "it.pt"), allowed=[torch.Tensor, (member_of, "builtins.getattr")])


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.a": torch.ones(2)}, checkpoint_id=tmp_path / "shards")
    index = tmp_path / "shards" / ".metadata"
    content = pickle.loads(index.read_bytes())
    for info in content.storage_data.values():
        info.relative_path = "../secret"
    index.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        convert(str(tmp_path / "shards"), str(tmp_path / "hf"))


def test_names_may_be_kept_and_nothing_is_overwritten(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.a": torch.ones(2)}, checkpoint_id=tmp_path / "shards")
    assert command(["convert", "--keep-names", str(tmp_path / "shards"), str(tmp_path / "hf")]) == 0
    assert list(load_file(next((tmp_path / "hf").glob("*.safetensors")))) == ["model.a"]
    assert command(["convert", str(tmp_path / "shards"), str(tmp_path / "hf")]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert command(["convert", str(tmp_path / "nothing"), str(tmp_path / "x")]) == 2


def test_weights_that_a_folder_has_no_place_for_are_named(tmp_path):
    weights = {"model.weight": torch.ones(2), "metric.total": torch.ones(1)}
    checkpoint = {"state_dict": weights, "global_step": 1, "epoch": 0, "averages": {"model.weight": torch.ones(2)}}
    torch.save(checkpoint, tmp_path / "it.ckpt")
    with pytest.warns(HfCompatWarning, match=r"2 entries .* no place for: metric\.total, averages\."):
        convert(str(tmp_path / "it.ckpt"), str(tmp_path / "folder"))


def position(**changes):
    values = {"epoch": 2, "is_open": True, "micro_batches_done": 3, "micro_batches_per_epoch": 4, "micro_batch_size": 8}
    return DataPosition(**{**values, **changes}).to_plain()


def of_loader(*states):
    return {"loops": {"fit_loop": {"state_dict": {"combined_loader": [*states]}}}}


def of_windows(**changes):
    return {"hf_compat": {"updates": 4, "windows": position(**changes)}}


@pytest.mark.parametrize(
    ("content", "files", "expected"),
    [
        ({}, "", (1.0, 0, None)),
        ({"optimizer_states": [{"a": 1}], "lr_schedulers": []}, "optimizer.pt", (1.0, 0, None)),
        ({"optimizer_states": [], "lr_schedulers": [{"a": 1}]}, "scheduler.pt", (1.0, 0, None)),
        ({"hf_compat": {"updates": 4}}, "", (1.0, 0, None)),
        (of_windows(), "run_state.pt", (2.75, 8, "update")),
        (of_windows(is_open=False), "run_state.pt", (2.0, 8, "epoch_end")),
        (of_windows(micro_batches_per_epoch=None, micro_batch_size=None), "run_state.pt", (2.0, 0, "update")),
        (of_windows(rng=read_rng()), "run_state.pt rng_state.pth", (2.75, 8, "update")),
        (of_loader(position()), "run_state.pt", (2.75, 8, "update")),
        ({**of_windows(), **of_loader(position(epoch=5))}, "run_state.pt", (2.75, 8, "update")),
        (of_loader({"another": 1}, position()), "", (1.0, 0, None)),
        (of_loader(), "", (1.0, 0, None)),
        ({"loops": {"fit_loop": {"state_dict": {"combined_loader": None}}}}, "", (1.0, 0, None)),
    ],
)
def test_what_becomes_of_a_lightning_checkpoint(tmp_path, content, files, expected):
    weights = {"model.w": torch.ones(2), "metric.total": 3}
    to_hf({"state_dict": weights, "epoch": 1, "global_step": 4, **content}, str(tmp_path / "it"))
    written = {path.name for path in (tmp_path / "it").iterdir()}
    assert written == {"model.safetensors", "trainer_state.json", "manifest.json", *files.split()}
    state = json.loads((tmp_path / "it" / "trainer_state.json").read_text())
    run = RunState.load(str(tmp_path / "it"))
    assert (state["epoch"], state["train_batch_size"], run and run.moment.value) == expected
    assert (
        state["global_step"] == 4
        and "save_steps" not in state
        and [*load_file(tmp_path / "it" / "model.safetensors")] == ["w"]
    )


@pytest.mark.parametrize(
    "weights", [{}, {"w": torch.ones(1)}, {"model.w": 3}, {"model.w": torch.ones(1), "model.v": None}]
)
def test_a_checkpoint_of_another_module_is_refused(tmp_path, weights):
    with pytest.raises(CheckpointError, match="it is of no HFModule"):
        to_hf({"state_dict": weights, "epoch": 1, "global_step": 4}, str(tmp_path / "it"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, None),
        ({"callbacks": {"average": [torch.ones(1)]}, "MixedPrecision": torch.ones(1)}, None),
        ({"note": [1, "text"]}, None),
        ({"averages": {"a": [torch.ones(1)]}}, "holds 1 entries .*: averages. They"),
        ({"state_dict": {"metric": 2}}, "holds 1 entries .*: metric. They"),
        ({"state_dict": dict.fromkeys("abcde", 1)}, "holds 5 entries .*: a, b, c, d, e. They"),
        ({"state_dict": dict.fromkeys("abcde", 1), "f": torch.ones(1)}, "holds 6 .*: a, b, c, d, e …. They"),
    ],
)
def test_weights_without_a_place_are_named(more, told, recwarn):
    weights = {**more.get("state_dict", {}), f"{converting.PREFIX}weight": 1}
    converting.warn_of_left_out("it", {**more, "state_dict": weights, converting.OWN_KEY: torch.ones(1)})
    texts = [str(one.message) for one in recwarn]
    assert len(texts) == (told is not None) and all(re.search(told, text) for text in texts)


def test_what_a_hook_asks_of_a_plugin_is_that_of_the_one_behind():
    behind = SimpleNamespace(checkpoint_io="inner")
    assert HFCheckpointIO(behind).checkpoint_io == "inner"
    with pytest.raises(AttributeError, match="behind"):
        HFCheckpointIO.__new__(HFCheckpointIO).checkpoint_io  # noqa: B018
