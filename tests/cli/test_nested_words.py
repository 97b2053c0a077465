"""Words about a part of an object are typed by the constructor they go to, and kept so."""

from __future__ import annotations

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from hf_compat import HFDataModule, HFModule
from hf_compat.cli.fit import Run
from hf_compat.errors import ArgumentError

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, hidden: int = 4, name: str = "plain", inner=None):
        super().__init__()
        self.layer, self.hidden, self.name, self.inner = nn.Linear(4, 3), hidden, name, inner

    def forward(self, x, labels=None):
        scores = self.layer(x)
        return nn.functional.cross_entropy(scores, labels), scores

class Inner:
    def __init__(self, width: int = 1):
        self.width = width

class Data(list):
    def __init__(self, n: int = 8, shuffle: bool = False, name: str = "a", free=None, rate=0.5, sizes: list[int] = ()):
        self.given = {"n": n, "shuffle": shuffle, "name": name, "free": free, "rate": rate, "sizes": list(sizes)}
        super().__init__({"x": torch.full((4,), float(i)), "labels": i % 3} for i in range(n))

class Wide(Inner):
    def __call__(self, prediction):
        return {}

class Metric:
    def __init__(self, classes: int):
        self.classes = classes

    def __call__(self, prediction):
        return {"classes": self.classes}
"""
YAML = """
model: {class_path: words_module.Model}
data:
  train_dataset: {class_path: words_module.Data, init_args: {n: 6}}
compute_metrics: {class_path: words_module.Metric, init_args: {classes: 2}}
args: {output_dir: out, max_steps: 1, use_cpu: true, report_to: none, save_strategy: "no", disable_tqdm: true}
"""
EACH = ["n=12", "shuffle=false", "name=2024", "free=3", "rate=1", "sizes=[1, 2]"]
TYPED = {"n": 12, "shuffle": False, "name": "2024", "free": 3, "rate": 1.0, "sizes": [1, 2]}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "words_module.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*words, command="fit", config="run.yaml"):
    words = (*words, "--ckpt_path", "initial") if command == "predict" else words
    return Run(command, ["--config", config, *words])


@pytest.mark.parametrize("command", ["fit", "predict"])
@pytest.mark.parametrize("prefix", ["--data.train_dataset.init_args.", "--data.train_dataset."])
def test_values_have_the_types_of_the_constructor_and_are_kept_so(tmp_path, command, prefix):
    found = run(*(prefix + one for one in EACH), command=command)
    assert found.trainer.train_dataset.given == TYPED
    written = yaml.safe_load(found.text)["data"]["train_dataset"]
    assert written == {"class_path": "words_module.Data", "init_args": TYPED}
    (tmp_path / "config.yaml").write_text(found.text)
    assert run(config="config.yaml").trainer.train_dataset.given == TYPED


def test_an_object_and_then_its_parts_on_the_command_line():
    whole = '{"class_path": "words_module.Data", "init_args": {"n": 4, "name": "b"}}'
    found = run("--data.train_dataset", whole, "--data.train_dataset.init_args.n", "5")
    assert found.trainer.train_dataset.given["n"] == 5 and found.trainer.train_dataset.given["name"] == "b"
    found = run("--data.eval_dataset", "words_module.Data", "--data.eval_dataset.n=3")
    assert len(found.trainer.eval_dataset) == 3
    # another class takes none of the first one's arguments
    found = run("--compute_metrics.class_path=words_module.Wide", "--compute_metrics.init_args.width=7")
    assert found.trainer.compute_metrics.width == 7


def test_functions_models_and_objects_within_them():
    found = run("--compute_metrics.init_args.classes", "3", "--model.init_args.hidden", "7", "--model.name=2024")
    assert found.trainer.compute_metrics.classes == 3
    assert (found.trainer.model.hidden, found.trainer.model.name) == (7, "2024")
    inner = ["--model.init_args.inner.class_path=words_module.Inner", "--model.init_args.inner.init_args.width=9"]
    assert run(*inner).trainer.model.inner.width == 9


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model.init_args.hiden=3", "words_module.Model does not take 'hiden'.*did you mean 'hidden'"),
        ("--data.train_dataset.init_args.shufle=true", "does not take 'shufle'.*did you mean 'shuffle'"),
        ("--data.train_dataset.init_args.n=many", "`data.train_dataset.init_args.n`: 'many' is not of the type int"),
        ("--model.init_args.hidden=wide", "`model.init_args.hidden`: 'wide' is not of the type int"),
        ("--learning_rte=3", "did you mean `--learning_rate`"),
        ("--data.train_datset=3", "did you mean `--data.train_dataset`"),
        ("--data.train_dataset.init_args.n", "`--data.train_dataset.init_args.n` has no value"),
    ],
)
def test_mistakes_are_told_with_the_nearest_name(word, message):
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        run(word)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # jsonargparse's, of what it does here
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--data.train_dataset.init_args.n=48", "`train_dataset.init_args.n=48`.*Hint: .*class_path.*48"),
        ("--model.model.init_args.hiden=3", "`model` is .*no torch.nn.Module is made of it.*Hint: model:"),
    ],
)
def test_a_word_that_lightnings_command_line_mistakes_is_an_error(tmp_path, monkeypatch, word, message):
    monkeypatch.setattr("sys.argv", ["cli.py"])
    args = {"class_path": "hf_compat.TrainingArguments", "init_args": {"output_dir": "out", "use_cpu": True}}
    data = {"args": args, "train_dataset": {"class_path": "words_module.Data", "init_args": {"n": 8}}}
    config = {"model": {"model": {"class_path": "words_module.Model"}, "args": args}, "data": data}
    (tmp_path / "cli.yaml").write_text(yaml.safe_dump(config))
    options = {"run": False, "seed_everything_default": 1}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        LightningCLI(HFModule, HFDataModule, args=["--config", "cli.yaml", word], **options)
    whole = '--data.train_dataset={"class_path": "words_module.Data", "init_args": {"n": 48}}'
    made = LightningCLI(
        HFModule, HFDataModule, args=["--config", "cli.yaml", whole], run=False, seed_everything_default=1
    )
    assert made.datamodule.train_dataset.given["n"] == 48
