"""Generation at the other entry points: a plain `lightning.Trainer`, LightningCLI, and `hf-compat fit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from helpers import toy
from helpers.parity import seq2seq_cases as cases
from helpers.parity.compare import first_difference, same
from hf_compat import HFDataModule, HFModule, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments, set_seed
from hf_compat.cli.main import main
from hf_compat.errors import ArgumentError

ARGUMENTS = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_train_epochs": 1, "learning_rate": 1e-2,
    "gradient_accumulation_steps": 2, "predict_with_generate": True, "generation_max_length": 9,
    "generation_num_beams": 2, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip
TIMED = ("_runtime", "_per_second", "_preparation_time")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:LightningCLI's args parameter:UserWarning",
    "ignore:.*does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    # T5's own loss takes `**kwargs` and leaves the count of items out (transformers 5.23)
    "ignore:`forward` of T5ForConditionalGeneration ignores `num_items_in_batch`",
)


class Generating(HFModule):
    """A module with arguments that LightningCLI recognises as `Seq2SeqTrainingArguments`."""

    def __init__(self, args: Seq2SeqTrainingArguments | None = None):
        set_seed(3)
        super().__init__(cases.tiny_t5(), args, compute_metrics=cases.exact)


class Pairs(HFDataModule):
    """Pairs of sequences."""

    def __init__(self, count: int = 18):
        samples = (cases.pairs(count), cases.pairs(9, seed=4), cases.pairs(7, seed=6))
        super().__init__(None, *samples, data_collator=cases.pad_pairs)


def without_times(metrics):
    return {name: float(value) for name, value in metrics.items() if not name.endswith(TIMED)}


@pytest.fixture
def trained(tmp_path):
    """Return Seq2SeqTrainer's metrics, predictions and weights."""
    set_seed(3)
    args = Seq2SeqTrainingArguments(str(tmp_path / "trainer"), report_to="none", save_strategy="no", **ARGUMENTS)
    trainer = Seq2SeqTrainer(
        cases.tiny_t5(), args, cases.pad_pairs, cases.pairs(), cases.pairs(9, seed=4), compute_metrics=cases.exact
    )
    trainer.train()
    metrics = without_times(trainer.evaluate())
    return metrics, trainer.predict(cases.pairs(7, seed=6)).predictions, trainer.model.state_dict()


def test_a_lightning_trainer_of_ones_own(tmp_path, trained):
    metrics, predictions, weights = trained
    module, data = Generating(Seq2SeqTrainingArguments(str(tmp_path), report_to="none", **ARGUMENTS)), Pairs()
    trainer = pl.Trainer(**QUIET)
    trainer.fit(module, data)
    assert same(dict(module.model.state_dict()), dict(weights))
    found = without_times(trainer.callback_metrics)
    assert {name: value for name, value in found.items() if name.startswith("eval_")} == pytest.approx(
        {name: value for name, value in metrics.items() if name != "epoch"}, rel=1e-6
    )
    assert found["eval_loss"] == metrics["eval_loss"]
    tokens = torch.cat(trainer.predict(module, data)).numpy()
    assert same(tokens, predictions), first_difference(tokens, predictions)


def test_a_generation_config_and_a_model_that_cannot(tmp_path):
    config = {"num_beams": 3, "max_new_tokens": 4}
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, generation_config=config, use_cpu=True)
    assert HFModule(cases.tiny_t5(), args).model.generation_config.num_beams == 3
    with pytest.raises(ArgumentError, match="Classifier has no method `generate`"):
        HFModule(toy.Classifier(), args)
    assert HFModule(toy.Classifier(), TrainingArguments(str(tmp_path), use_cpu=True)) is not None


def test_lightning_cli(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    config = {"seed_everything": 42, "model": {"args": {**ARGUMENTS, "num_train_epochs": 1.0}}, "trainer": QUIET}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    words = ["fit", "--config", "run.yaml", "--model.args.generation_num_beams", "2"]
    cli = LightningCLI(Generating, Pairs, args=words, save_config_callback=None)
    assert type(cli.model.steps.args) is Seq2SeqTrainingArguments
    assert same(dict(cli.model.model.state_dict()), dict(trained[2]))
    assert without_times(cli.trainer.callback_metrics)["eval_loss"] == trained[0]["eval_loss"]


def test_hf_compat_fit(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"class_path": "helpers.parity.seq2seq_cases.tiny_t5"},
        "trainer_class": "hf_compat.Seq2SeqTrainer",
        "compute_metrics": "helpers.parity.seq2seq_cases.exact",
        "data": {
            "train_dataset": "helpers.parity.seq2seq_cases.pairs",
            "eval_dataset": {"class_path": "helpers.parity.seq2seq_cases.pairs", "init_args": {"count": 9, "seed": 4}},
            "data_collator": "helpers.parity.seq2seq_cases.pad_pairs",
        },
        "args": {**ARGUMENTS, "output_dir": "out", "seed": 3, "eval_strategy": "epoch", "save_strategy": "no"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    words = ["fit", "--config", "run.yaml", "--generation_config", '{"num_beams": 3, "decoder_start_token_id": 0}']
    assert main(words) == 0
    metrics = json.loads(Path("out/eval_results.json").read_text())
    assert metrics["eval_width"] == 20 and metrics["eval_rows"] == 9
    saved = yaml.safe_load(Path("out/config.yaml").read_text())
    assert saved["args"]["predict_with_generate"] and saved["trainer_class"] == "hf_compat.Seq2SeqTrainer"


def test_generation_without_a_trainer_that_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = {"model": {"class_path": "helpers.parity.seq2seq_cases.tiny_t5"}, "args": {"predict_with_generate": True}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml"]) == 2
    told = capsys.readouterr().err
    assert "`args.predict_with_generate`" in told and "trainer_class: hf_compat.Seq2SeqTrainer" in told
