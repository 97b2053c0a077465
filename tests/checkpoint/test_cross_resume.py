"""A checkpoint of each of three programs, resumed by each of them, is the uninterrupted run, bit for bit."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from hf_compat import HFDataModule, HFModule
from hf_compat.cli.main import main as command

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    # the state after the update is what is meant
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]
PROGRAMS = ("transformers", "hf_compat", "lightning")
AT = 7  # the second update of the second epoch
OPTIONS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "save_strategy": "steps",
    "save_steps": AT,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}


class Counter(pl.Callback):
    """A Lightning callback with a state."""

    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, *args):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def arguments(api, folder):
    return api.TrainingArguments(str(folder), **OPTIONS)


def run(program: str, folder, resume=None):
    """Train, from the start or from a checkpoint; returns the weights, and the state of Lightning's callback."""
    api = transformers if program == "transformers" else hf_compat
    args, counter = arguments(api, folder), Counter()
    api.set_seed(3)
    model = toy.Classifier()
    if program == "lightning":
        pl.seed_everything(args.seed, verbose=False)
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=AT, save_top_k=-1)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, callbacks=[counter, saver],
        )  # fmt: skip
        with warnings.catch_warnings():  # the arguments are those of the other programs
            warnings.filterwarnings("ignore", message="These arguments have no effect")
            trainer.fit(HFModule(model, args), HFDataModule(args, toy.rows()), ckpt_path=resume)
    else:
        callbacks = [counter] if program == "hf_compat" else []
        trainer = api.Trainer(model, args, train_dataset=toy.rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, counter.seen


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    weights, paths = {}, {}
    for program in PROGRAMS:
        weights[program], _ = run(program, folder / program)
        paths[program] = str(folder / program / (f"step={AT}.ckpt" if program == "lightning" else f"checkpoint-{AT}"))
    assert same(weights["hf_compat"], weights["transformers"]) and same(weights["lightning"], weights["transformers"])
    return paths, weights["transformers"], folder


RESULTS: dict[tuple[str, str], bool] = {}  # by writer and reader: which of the nine ways gave the uninterrupted run


@pytest.mark.parametrize("reader", PROGRAMS)
@pytest.mark.parametrize("writer", PROGRAMS)
def test_resumed_run_is_the_uninterrupted_one(checkpoints, writer, reader, tmp_path):
    paths, expected, _ = checkpoints
    path = paths[writer]
    if (writer, reader) == ("lightning", "transformers"):
        assert command(["convert", path, str(tmp_path / f"checkpoint-{AT}")]) == 0
        path = str(tmp_path / f"checkpoint-{AT}")
    found, seen = run(reader, tmp_path / "out", path)
    RESULTS[writer, reader] = same(found, expected)
    assert RESULTS[writer, reader]
    if reader != "transformers" and writer != "transformers":
        assert seen == 15  # the callback's count went on


@pytest.mark.whole_file
def test_all_nine_ways_were_taken_and_are_equal(capsys):
    assert list(RESULTS) == [(writer, reader) for writer in PROGRAMS for reader in PROGRAMS], "run this whole file"
    assert all(RESULTS.values())
    with capsys.disabled():
        print(f"\n{'written by':<14}" + "".join(f"{reader:>14}" for reader in PROGRAMS) + "   (resumed by)")
        for writer in PROGRAMS:
            print(f"{writer:<14}" + "".join(f"{'equal':>14}" for _ in PROGRAMS))


def test_an_hf_folder_becomes_a_lightning_checkpoint_and_comes_back(checkpoints, tmp_path, capsys):
    paths, expected, _ = checkpoints
    ckpt, again = str(tmp_path / "it.ckpt"), str(tmp_path / f"checkpoint-{AT}")
    assert command(["convert", paths["hf_compat"], ckpt]) == 0
    assert same(run("lightning", tmp_path / "a", ckpt)[0], expected)
    assert command(["convert", ckpt, again]) == 0
    assert same(load_file(f"{again}/model.safetensors"), load_file(f"{paths['hf_compat']}/model.safetensors"))
    assert same(run("hf_compat", tmp_path / "b", again)[0], expected)
    assert command(["convert", ckpt, again]) == 2
    assert "not overwritten" in capsys.readouterr().err


# its own loss takes `**kwargs` and leaves the count of items out (transformers 5.23)
@pytest.mark.filterwarnings("ignore:`forward` of BertForSequenceClassification ignores `num_items_in_batch`")
def test_our_folder_is_a_from_pretrained_folder(tmp_path):
    model = toy.tiny_bert()
    args = hf_compat.TrainingArguments(str(tmp_path), **{**OPTIONS, "max_steps": AT})
    hf_compat.Trainer(model, args, train_dataset=toy.labelled_blocks()).train()
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{AT}")
    assert same(again.state_dict(), model.state_dict())
