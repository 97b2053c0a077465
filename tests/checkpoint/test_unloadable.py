"""What is whole on disk and turns out not to load: the automatic resume goes on with the next older checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer, TrainerCallback
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.convert import convert
from hf_compat.errors import CheckpointError, CheckpointMismatch, LossError

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from helpers import damage
from sweeps.faults import payloads

VALUES = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


def train(args, resume=None, **parts):
    torch.manual_seed(5)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(16), **parts)
    trainer.train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def change(folder, file, place, new):
    """Put another value into a file, and list the folder's files again: it looks whole."""
    path = folder / file
    content = torch.load(path, weights_only=True)
    torch.save(damage.changed(content, place, new), path)
    payloads.sealed(folder)


def written(make_args, tmp_path):
    train(make_args(**VALUES))
    return tmp_path / "out"


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def lightning_trainer():
    return pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip


UNLOADABLE = [
    ("optimizer.pt", ("state", 2, "exp_avg"), damage.REMOVED, "lacks `exp_avg`"),
    ("optimizer.pt", ("state", 5), {"x": 1}, "the state of a parameter lacks `exp_avg`"),
    (
        "optimizer.pt",
        ("state", 5, "exp_avg"),
        torch.zeros(9),
        "`exp_avg` of a parameter has the shape [9], its parameter",
    ),
    ("optimizer.pt", ("param_groups", 1, "params"), [], "which is in no group"),
    ("scheduler.pt", ("_last_lr",), [], "`_last_lr` is [], and the optimizer has 2 groups"),
    ("scheduler.pt", ("base_lrs",), [], "`base_lrs` is [], and the optimizer has 2 groups"),
    ("run_state.pt", ("data", "rng"), [], "`rng` has [] in place of random states"),
    ("run_state.pt", ("data", "is_open"), None, "`is_open` is None, not true or false"),
    ("run_state.pt", ("learning_rate",), "x", "`learning_rate` is 'x', not a number, or null"),
    ("run_state.pt", ("keeps_workers",), 3, "`keeps_workers` is 3, not true or false"),
    ("run_state.pt", ("version",), 1, "was written by another version of hf_compat"),
]


@pytest.mark.parametrize(("file", "place", "new", "message"), UNLOADABLE)
def test_what_cannot_be_loaded_is_passed_over(make_args, tmp_path, caplog, file, place, new, message):
    out = written(make_args, tmp_path)
    change(out / "checkpoint-6", file, place, new)
    args = make_args(**{**VALUES, "max_steps": 8})
    with pytest.raises(CheckpointError) as caught:
        train(args, str(out / "checkpoint-6"))
    assert message in str(caught.value)
    with caplog.at_level(logging.WARNING, "hf_compat"):
        found = train(args, True)
    assert "checkpoint-6 is not whole and is skipped" in caplog.text and message in caplog.text
    shutil.rmtree(out / "checkpoint-6")
    assert same(found, train(args, str(out / "checkpoint-4")))


def sealed_without_position(folder, file, content):
    """Replace a file, and leave the place in the data to be worked out as for a checkpoint of transformers."""
    (folder / "run_state.pt").unlink()
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        torch.save(content, folder / file)
    payloads.sealed(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"no header"),
        ("optimizer.pt", b"no archive"),
        ("scheduler.pt", {"last_epoch": "x"}),
        ("rng_state.pth", {"python": None}),
        ("rng_state.pth", b"no archive"),
    ],
)
def test_the_older_checkpoint_replaces_every_part_of_one_that_fails_late(make_args, tmp_path, caplog, file, content):
    """The same holds where random states come from their file, which is used last."""
    out = written(make_args, tmp_path)
    sealed_without_position(out / "checkpoint-4", "random.txt", b"")
    sealed_without_position(out / "checkpoint-6", file, content)
    args = make_args(**{**VALUES, "max_steps": 8})
    begun = []

    class Counts(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    with caplog.at_level(logging.WARNING, "hf_compat"):
        found = train(args, True, callbacks=[Counts()])
    assert (
        f"checkpoint-6 is not whole and is skipped: it cannot be loaded ({out / 'checkpoint-6' / file}" in caplog.text
    )
    assert begun == [4]
    shutil.rmtree(out / "checkpoint-6")
    assert same(found, train(args, str(out / "checkpoint-4")))


def test_an_optimizer_of_the_users_goes_on_from_the_older_one(make_args, tmp_path):
    def mine():
        torch.manual_seed(5)
        model = toy.Classifier()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(resume):
        model, optimizer = mine()
        args = make_args(**{**VALUES, "max_steps": 6 if resume is None else 8})
        trainer = Trainer(model, args, train_dataset=toy.rows(16), optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.optimizer.optimizer is optimizer  # within the wrapper, as under transformers
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    run(None)
    out = tmp_path / "out"
    change(out / "checkpoint-6", "scheduler.pt", ("_last_lr",), [])
    expected = run(str(out / "checkpoint-4"))
    shutil.rmtree(out / "checkpoint-8")
    change(out / "checkpoint-6", "scheduler.pt", ("_last_lr",), [])  # it was written again
    assert same(run(True), expected)


def test_where_none_can_be_loaded_an_error_says_so(make_args, tmp_path, caplog):
    out = written(make_args, tmp_path)
    for step in (2, 4, 6):
        change(out / f"checkpoint-{step}", "scheduler.pt", ("_last_lr",), [])
    with caplog.at_level(logging.WARNING, "hf_compat"), pytest.raises(CheckpointError, match="No valid checkpoint"):
        train(make_args(**{**VALUES, "max_steps": 8}), True)
    assert all(f"checkpoint-{step} is not whole" in caplog.text for step in (2, 4, 6))


def test_an_error_while_training_is_no_reason_to_go_on_with_another(make_args, tmp_path):
    class Fails(TrainerCallback):
        begun = 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.begun += 1
            raise CheckpointError("of the user's")

    written(make_args, tmp_path)
    fails = Fails()
    with pytest.raises(CheckpointError, match=r"of the user's"):
        train(make_args(**{**VALUES, "max_steps": 8}), True, callbacks=[fails])
    assert fails.begun == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("part", [payloads.shards.MODEL_FOLDER, payloads.shards.OPTIMIZER_FOLDER])
def test_shards_that_do_not_load_are_passed_over(make_args, tmp_path, part):
    torch.manual_seed(5)
    trainer = Trainer(toy.Classifier(), make_args(**VALUES), train_dataset=toy.rows(16))
    trainer.train()
    last = tmp_path / "out" / "checkpoint-6"
    payloads.write_shards(last, trainer.model, trainer.optimizer)
    for name in ("model.safetensors", "optimizer.pt"):
        (last / name).unlink()

    def rename(index):
        key = damage.first_tensor(index)
        place = next(place for place in index.storage_data if place.fqn == key)
        index.state_dict_metadata[key + "x"] = index.state_dict_metadata.pop(key)
        index.storage_data[type(place)(key + "x", place.offset)] = index.storage_data.pop(place)

    damage.change_index(last / part / ".metadata", rename)
    payloads.sealed(last)
    args = make_args(**{**VALUES, "max_steps": 8})
    found = train(args, True)
    shutil.rmtree(last)
    assert same(found, train(args, str(tmp_path / "out" / "checkpoint-4")))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "message"),
    [("another dtype", "holds another tensor as"), ("a tensor that is bytes", "holds a tensor as")],
)
def test_shards_of_another_kind_than_their_index_says_are_not_converted(tmp_path, kind, message):
    model = toy.Classifier()
    (tmp_path / "source").mkdir()
    payloads.write_shards(tmp_path / "source", model, torch.optim.SGD(model.parameters()))
    source = tmp_path / "source" / payloads.shards.MODEL_FOLDER
    convert(str(source), str(tmp_path / "right"))
    damage.change_index(source / ".metadata", damage.INDEX_CHANGES[kind])
    with pytest.raises(CheckpointError, match=message):
        convert(str(source), str(tmp_path / "wrong"))
    assert not (tmp_path / "wrong").exists()


def test_a_state_without_its_update_is_not_update_0(make_args, tmp_path):
    out = written(make_args, tmp_path)
    (out / "checkpoint-6" / "trainer_state.json").write_text("{}")
    payloads.sealed(out / "checkpoint-6")
    args = make_args(**{**VALUES, "max_steps": 8})
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is not a readable trainer state: `global_step` is"):
        train(args, str(out / "checkpoint-6"))
    found = train(args, True)
    shutil.rmtree(out / "checkpoint-6")
    assert same(found, train(args, str(out / "checkpoint-4")))


def test_parameters_without_a_state_are_told_of(make_args, tmp_path, caplog):
    out = written(make_args, tmp_path)
    args = make_args(**{**VALUES, "max_steps": 8})
    with caplog.at_level(logging.WARNING, "hf_compat"):
        train(args, str(out / "checkpoint-6"))
    assert "start anew" not in caplog.text
    change(out / "checkpoint-6", "optimizer.pt", ("state", 0), damage.REMOVED)
    with caplog.at_level(logging.WARNING, "hf_compat"):
        train(args, str(out / "checkpoint-6"))
    assert "no state of the optimizer for 1 of" in caplog.text and "start anew" in caplog.text


# ---- Lightning's own files ----

FILES = [
    (("hf_compat", "windows"), "x", "The position of the data is 'x', not fields"),
    (("hf_compat", "windows", "rng", "cpu"), "x", "`rng` has random states of"),
    (("hf_compat", "windows", "epoch"), -1, "`epoch` is -1, not a whole number"),
    (("hf_compat", "updates"), "x", "without a number of updates"),
    (("hf_compat",), [1], "without a number of updates"),
    (("lr_schedulers",), damage.REMOVED, "`lr_schedulers` is missing"),
    (("optimizer_states",), damage.REMOVED, "`optimizer_states` is missing"),
    (("optimizer_states", 0, "state", 0, "exp_avg"), damage.REMOVED, "`exp_avg`"),
    (("lr_schedulers", 0, "_last_lr"), [], "`_last_lr` is []"),
]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("use", ["fit", "convert", "train"])
@pytest.mark.parametrize(("place", "new", "message"), FILES)
def test_a_field_of_a_lightning_checkpoint_is_named(make_args, tmp_path, use, place, new, message):
    import lightning.pytorch as pl

    train(make_args(**VALUES))
    path = tmp_path / "it.ckpt"
    convert(str(tmp_path / "out" / "checkpoint-4"), str(path))
    content = torch.load(path, weights_only=True)
    torch.save(damage.changed(content, place, new), path)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    args = make_args()
    uses = {
        "fit": lambda: pl.Trainer(max_epochs=2, enable_checkpointing=False, **options).fit(
            HFModule(toy.Classifier(), args), HFDataModule(args, toy.rows(16)), ckpt_path=str(path)
        ),
        "convert": lambda: convert(str(path), str(tmp_path / "converted")),
        "train": lambda: train(make_args(**{**VALUES, "max_steps": 8}), str(path)),
    }
    if use == "convert" and len(place) > 1 and place[0] != "hf_compat":
        assert uses["convert"]()  # what the optimizer needs is not known here
        return
    with pytest.raises(CheckpointError) as caught:
        uses[use]()
    assert message in str(caught.value) and "it.ckpt" in str(caught.value)
    assert not (tmp_path / "converted").exists()


FOLDERS = [
    ("optimizer.pt", [], "it holds [], not the state of an optimizer"),
    ("optimizer.pt", {"param_groups": [], "state": 5}, "`state` is 5"),
    ("scheduler.pt", [], "it holds [], not fields"),
    ("scheduler.pt", {"base_lrs": [0.1]}, "`last_epoch` is missing"),
    ("run_state.pt", [], "is [], not fields"),
    ("trainer_state.json", "no archive", "is not a readable trainer state"),
]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(("file", "content", "message"), FOLDERS)
def test_a_folder_that_a_lightning_trainer_cannot_continue_is_named(make_args, tmp_path, file, content, message):
    """Its manifest matches, so what is wrong shows when it is loaded."""
    folder = written(make_args, tmp_path) / "checkpoint-6"
    if file.endswith(".json"):
        (folder / file).write_text("[]")
    else:
        torch.save(content, folder / file)
    payloads.sealed(folder)
    args = make_args()
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, **options)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(HFModule(toy.Classifier(), args), HFDataModule(args, toy.rows(16)), ckpt_path=str(folder))
    assert message in str(caught.value) and "checkpoint-6" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_lightning_checkpoint_that_is_gone_is_named(make_args, tmp_path):
    import lightning.pytorch as pl

    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    args, path = make_args(), tmp_path / "gone.ckpt"
    with pytest.raises(CheckpointError, match=r"gone\.ckpt: there is no such file"):
        trainer.fit(HFModule(toy.Classifier(), args), HFDataModule(args, toy.rows(16)), ckpt_path=path)


def test_states_are_read_that_transformers_wrote_long_ago(tmp_path):
    """Fields that came later have their defaults; `global_step` was there from the beginning."""
    from hf_compat.checkpoint.validation import read_trainer_state

    (tmp_path / "trainer_state.json").write_text(json.dumps({"epoch": 1.0, "global_step": 3, "log_history": []}))
    assert read_trainer_state(tmp_path / "trainer_state.json").global_step == 3
    manifest.seal(str(tmp_path))


@pytest.mark.parametrize("wanted", [True, "checkpoint-6"])
def test_a_whole_checkpoint_of_another_model_is_no_damage(make_args, tmp_path, caplog, wanted):
    """An older checkpoint would not fit either, and training anew would overwrite a run of somebody else's model."""
    out = written(make_args, tmp_path)
    trainer = Trainer(toy.Classifier(classes=7), make_args(**VALUES), train_dataset=toy.rows())
    with pytest.raises(
        CheckpointMismatch, match=r"(?s)checkpoint-6 holds another model.*outer.*Hint: make the model"
    ) as error:
        trainer.train(resume_from_checkpoint=wanted if wanted is True else str(out / wanted))
    assert "seal" not in str(error.value) and "skipped" not in caplog.text


def test_weights_of_another_model_in_a_file_of_torch_are_named(make_args, tmp_path):
    folder = written(make_args, tmp_path) / "checkpoint-6"
    torch.save(toy.Classifier(classes=7).state_dict(), folder / "pytorch_model.bin")
    for name in ("model.safetensors", "manifest.json"):
        (folder / name).unlink()
    with pytest.raises(
        CheckpointMismatch, match=r"(?s)another model, and pytorch_model\.bin .*`outer.weight` has the shape"
    ):
        train(make_args(**VALUES), str(folder))


def test_a_missing_folder_is_called_so(make_args, tmp_path):
    out = written(make_args, tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)no such folder.*Beside it: .*checkpoint-6") as caught:
        train(make_args(**VALUES), str(out / "checkpoint-60"))
    assert "seal" not in str(caught.value)


def test_an_empty_name_is_no_fresh_start(make_args):
    with pytest.raises(CheckpointError, match="valid checkpoint at '': `resume_from_checkpoint` is empty"):
        train(make_args(**VALUES), "")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_missing_folder_is_called_so_in_a_lightning_trainer(make_args, tmp_path, lightning_trainer, command):
    folder = written(make_args, tmp_path)
    module, data = HFModule(toy.Classifier()), HFDataModule(None, *[toy.rows(8)] * 3)
    with pytest.raises(CheckpointError, match=r"checkpoint-9: there is no such folder. Beside it: checkpoint-2"):
        getattr(lightning_trainer, command)(module, data, ckpt_path=str(folder / "checkpoint-9"))


def test_why_no_checkpoint_can_be_loaded_stands_in_the_error(make_args, tmp_path):
    folder = written(make_args, tmp_path)
    for update in (2, 4, 6):
        (folder / f"checkpoint-{update}" / "optimizer.pt").write_bytes(b"xx")
    with pytest.raises(
        CheckpointError, match=r"No valid checkpoint(.|\n)*checkpoint-6: optimizer.pt(.|\n)*checkpoint-2"
    ):
        train(make_args(**VALUES), resume=True)


def test_a_module_of_another_shape_is_named(make_args, tmp_path):
    folder = written(make_args, tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the model: `model.outer.weight` has the shape \[3, 16\]"):
        HFModule.load_from_checkpoint(folder / "checkpoint-6", model=toy.Classifier(classes=5))


def test_a_model_without_a_trained_parameter_is_called_frozen(make_args):
    model = toy.Classifier()
    model.requires_grad_(False)
    with pytest.raises(
        LossError, match=r"no parameter of the model does, as all are frozen(.|\n)*requires_grad_\(True\)"
    ):
        Trainer(model, make_args(), train_dataset=toy.rows(8)).train()
