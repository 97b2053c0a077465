"""Words about a part of an object are typed by the constructor they go to, and kept so."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import nn

from hf_compat import HFDataModule, HFModule, TrainingArguments
from hf_compat.cli.fit import Run
from hf_compat.errors import ArgumentError
from hf_compat.hf.legacy import OLD_NAMES
from hf_compat.interop import object_parser
from hf_compat.interop.object_parser import take_words

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

    @classmethod
    def of(cls, name: str = "b"):
        return cls(name=name)

def make_data(n: int):
    return Data(n)

def make_model(hidden: int):
    return Model(hidden)

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
VALUES = ("steps", "auto", 0.25, 4, True, "text", "O1", "gloo")
EACH = ["n=12", "shuffle=false", "name=2024", "free=3", "rate=1", "sizes=[1, 2]"]
TYPED = {"n": 12, "shuffle": False, "name": "2024", "free": 3, "rate": 1.0, "sizes": [1, 2]}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "words_module.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.argv", ["cli.py"])


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


# LightningCLI --------------------------------------------------------------------------------------------------------
ARGS = {"class_path": "hf_compat.TrainingArguments", "init_args": {"output_dir": "out", "use_cpu": True}}
CLI = {
    "model": {"model": {"class_path": "words_module.Model"}, "args": ARGS},
    "data": {"args": ARGS, "train_dataset": {"class_path": "words_module.Data", "init_args": {"n": 6}}},
}
pytestmark = [
    # jsonargparse's and Lightning's, of what a test does here
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning"),
]


def lightning_cli(*words, config=CLI, command=()):
    Path("cli.yaml").write_text(yaml.safe_dump(config))
    args = [*command, "--config", "cli.yaml", *words]
    return LightningCLI(
        HFModule, HFDataModule, args=args, run=bool(command), seed_everything_default=1, save_config_callback=None
    )


def refusal(capsys, *words, config=CLI, command=()):
    with pytest.raises(SystemExit):
        lightning_cli(*words, config=config, command=command)
    return capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["--data.train_dataset.init_args.", "--data.train_dataset."])
def test_lightnings_command_line_types_values_by_the_constructor(tmp_path, prefix):
    cli = lightning_cli(*(prefix + one for one in EACH))
    assert cli.datamodule.train_dataset.given == TYPED
    cli.parser.save(cli.config, "saved.yaml", overwrite=True)
    written = yaml.safe_load(Path("saved.yaml").read_text())
    assert written["data"]["train_dataset"]["init_args"] == TYPED
    again = lightning_cli(config={name: written[name] for name in ("model", "data")})
    assert again.datamodule.train_dataset.given == TYPED


FORMS = [
    (["--data.eval_dataset", "words_module.Data", "--data.eval_dataset.n", "3"], {"n": 3}),
    (["--data.eval_dataset=words_module.Data"], {"n": 8}),
    (["--data.eval_dataset.class_path=words_module.Data", "--data.eval_dataset.init_args.shuffle=true"],
     {"shuffle": True}),
    (['--data.eval_dataset={"class_path": "words_module.Data", "init_args": {"n": 4}}', "--data.eval_dataset.n=5"],
     {"n": 5}),
    (["--data.eval_dataset.class_path=words_module.make_data", "--data.eval_dataset.init_args.n=5"], {"n": 5}),
    (["--data.eval_dataset.class_path=words_module.Data.of", "--data.eval_dataset.name=7"], {"name": "7"}),
    (["--data.eval_dataset.class_path=words_module.Data", "--data.eval_dataset.free=null"], {"free": None}),
    (["--data.eval_dataset.class_path=words_module.Data", '--data.eval_dataset.free={"a": [1, {"b": 2}]}'],
     {"free": {"a": [1, {"b": 2}]}}),
    (["--data.eval_dataset.class_path=words_module.Data", "--data.eval_dataset.free.class_path=words_module.Inner",
      "--data.eval_dataset.free.init_args.width=9"], {"free": 9}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "found", "with_lightning"),
    [  # Lightning's takes a second
        pytest.param(*form, with_lightning, marks=pytest.mark.matrix if with_lightning and place % 2 else ())
        for place, form in enumerate(FORMS)
        for with_lightning in (True, False)
    ],
)
def test_objects_of_every_form_in_both_command_lines(words, found, with_lightning):
    data = lightning_cli(*words).datamodule.eval_dataset if with_lightning else run(*words).trainer.eval_dataset
    given = {**data.given, "free": getattr(data.given["free"], "width", data.given["free"])}
    assert {name: given[name] for name in found} == found


def test_several_sets_models_metrics_and_what_replaces_another(monkeypatch):
    words = ["--data.eval_dataset.a.class_path=words_module.Data", "--data.eval_dataset.b.class_path=words_module.Data"]
    cli = lightning_cli(*words, "--data.eval_dataset.b.init_args.n=5")
    assert {name: len(data) for name, data in cli.datamodule.eval_dataset.items()} == {"a": 8, "b": 5}
    words = [
        "--model.model.init_args.hidden=7",
        "--model.model.name=2024",
        "--model.compute_metrics=words_module.Metric",
    ]
    cli = lightning_cli(*words, "--model.compute_metrics.init_args.classes=3")
    assert (cli.model.model.hidden, cli.model.model.name, cli.model.compute_metrics.classes) == (7, "2024", 3)
    inner = ["--model.model.inner.class_path=words_module.Inner", "--model.model.inner.init_args.width=9"]
    assert lightning_cli(*inner).model.model.inner.width == 9
    made = ["--model.model.class_path=words_module.make_model", "--model.model.init_args.hidden=5"]
    assert lightning_cli(*made).model.model.hidden == 5
    other = lightning_cli("--data.train_dataset.class_path=words_module.Inner", "--data.train_dataset.width=3")
    assert other.datamodule.train_dataset.width == 3


@pytest.mark.parametrize("path", ["words_module.Model", "words_module.make_model"])
def test_json_replaces_an_object_of_a_file(path):
    whole = json.dumps({"class_path": path, "init_args": {"hidden": 9}})
    config = copy.deepcopy(CLI)
    config["model"]["model"] = {"class_path": "words_module.make_model", "init_args": {"hidden": 5}}
    assert lightning_cli(f"--model.model={whole}", config=config).model.model.hidden == 9
    Path("run.yaml").write_text(YAML.replace("words_module.Model", "words_module.make_model"))
    assert run("--model", whole).trainer.model.hidden == 9
    data = json.dumps({"class_path": "words_module.make_data", "init_args": {"n": 4}})
    Path("run.yaml").write_text(YAML.replace("words_module.Data", "words_module.make_data"))
    assert len(run("--data.train_dataset", data).trainer.train_dataset) == 4
    config = copy.deepcopy(CLI)
    config["data"]["train_dataset"]["class_path"] = "words_module.make_data"
    assert len(lightning_cli("--data.train_dataset", data, config=config).datamodule.train_dataset) == 4
    del config["model"]["model"]
    assert lightning_cli(f"--model.model={whole}", config=config).model.model.hidden == 9


@pytest.mark.parametrize(
    "command", ["fit", "validate", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("test", "predict"))]
)
def test_subcommands_read_parts_of_objects(command, monkeypatch):
    monkeypatch.setattr(LightningCLI, "_run_subcommand", lambda self, subcommand: None)
    cli = lightning_cli("--data.train_dataset.init_args.n", "48", "--model.args.no_cuda=true", command=[command])
    assert len(cli.datamodule.train_dataset) == 48


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--model.model.init_args.hiden=3", "words_module.Model does not take 'hiden'.*did you mean 'hidden'"),
        ("--data.train_dataset.init_args.shufle=true", "does not take 'shufle'.*did you mean 'shuffle'"),
        ("--data.train_dataset.init_args.n=many", "`data.train_dataset.init_args.n`: 'many' is not of the type int"),
        ("--learning_rte=3", "did you mean `model.args.learning_rate`"),
        ("--model.learning_rte=3", "did you mean `model.args.learning_rate`"),
        ("--model.args.learning_rte=3", "did you mean `learning_rate`"),
        ("--model.args.evaluation_strtegy=no", "did you mean `evaluation_strategy`"),
        ("--data.train_datset=3", "did you mean `data.train_dataset`"),
        ("--trainer.max_epocs=3", "did you mean `trainer.max_epochs`"),
        ("--data.train_dataset.init_args.n", "`--data.train_dataset.init_args.n` has no value"),
    ],
)
@pytest.mark.parametrize("command", [[], ["fit"]])
def test_lightnings_command_line_tells_mistakes_with_the_nearest_name(capsys, word, message, command):
    assert re.search(f"(?s){message}", refusal(capsys, word, command=command))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (["model", "args", "init_args", "learning_rte"], "did you mean `learning_rate`"),
        (["model", "learning_rte"], "did you mean `model.args.learning_rate`"),
        (["data", "train_datset"], "did you mean `.*train_dataset`"),
        (["trainer", "max_epocs"], "did you mean `.*max_epochs`"),
    ],
)
def test_lightnings_configuration_tells_mistakes_with_the_nearest_name(capsys, place, message):
    config = copy.deepcopy(CLI)
    inner = config
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = 3
    assert re.search(message, refusal(capsys, config=config))


@pytest.mark.filterwarnings("ignore:`.*has no effect")
def test_every_old_name_says_in_lightnings_command_line_what_it_says_everywhere(tmp_path):
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--args", type=TrainingArguments)
    parser.add_argument("--config", action="config")

    def made(*words):
        given = ["--args", "hf_compat.TrainingArguments", "--args.output_dir=out", "--args.use_cpu=true", *words]
        return parser.instantiate_classes(parser.parse_args(given)).args.to_dict()

    for place, name in enumerate(sorted(OLD_NAMES)):
        value, expected = next(filter(None, (said_by(name, one) for one in VALUES)))
        Path("old.yaml").write_text(yaml.safe_dump({"args": {**ARGS, "init_args": {name: value}}}))
        ways = [f"--args.{name}={value}"], [f"--args.init_args.{name}", str(value)], ["--config=old.yaml"]
        given = ways[place % len(ways)]  # every way has a third of the names
        assert made(*given) == expected, given


def said_by(name, value):
    """What an old name says in Python; None where it cannot have the value."""
    try:
        return value, TrainingArguments("out", use_cpu=True, **{name: value}).to_dict()
    except ValueError:
        return None


@pytest.mark.filterwarnings("ignore:`.*has no effect")
def test_old_names_in_the_whole_command_line(recwarn):
    cli = lightning_cli("--model.args.evaluation_strategy=steps", "--model.args.tpu_num_cores=2")
    assert cli.model.steps.args.eval_strategy == "steps"
    cli.parser.save(cli.config, "saved.yaml", overwrite=True)
    written = yaml.safe_load(Path("saved.yaml").read_text())
    again = lightning_cli(config={name: written[name] for name in ("model", "data")})
    assert again.model.steps.args.eval_strategy == "steps"
    config = copy.deepcopy(CLI)
    config["model"]["args"]["init_args"]["warmup_ratio"] = 0.25
    config["model"]["args"]["init_args"] |= {"dispatch_batches": False, "split_batches": True}  # of one argument
    args = lightning_cli(config=config).model.steps.args
    assert args.warmup_steps == 0.25
    assert (args.accelerator_config.dispatch_batches, args.accelerator_config.split_batches) == (False, True)


@pytest.mark.parametrize("words", [[], ["--model.args.evaluation_strategy=steps"]])
def test_an_old_name_and_its_successor_contradict_each_other(words):
    config = copy.deepcopy(CLI)
    config["model"]["args"]["init_args"] |= {"eval_strategy": "epoch"}
    if not words:
        config["model"]["args"]["init_args"] |= {"evaluation_strategy": "steps"}
    with pytest.raises(ArgumentError, match=r"is an old name for .*`eval_strategy='epoch'`"):
        lightning_cli(*words, config=config)


@pytest.mark.parametrize(
    ("line", "rest", "taken"),
    [
        (["--data", "1"], [], [("data", (), "1")]),
        (["--data=1", "x"], ["x"], [("data", (), "1")]),
        (["--data="], [], [("data", (), "")]),
        (["--data.a.b", "1", "--a", "2"], ["--a", "2"], [("data", ("a", "b"), "1")]),
        (["--datas", "1"], ["--datas", "1"], []),
        (["data", "data.a=1"], ["data", "data.a=1"], []),
        (["--model", "a", "b"], ["--model", "a", "b"], []),
        (["--model=a", "b"], ["--model=a", "b"], []),
        (["--model", " {a: 1}", "b"], ["b"], [("model", (), " {a: 1}")]),
        (["--model.a=1"], [], [("model", ("a",), "1")]),
        (["--model.help", "--data.help"], ["--model.help", "--data.help"], []),
    ],
)
def test_options_of_objects_are_taken_from_a_line(line, rest, taken):
    sections = {"data": True, "model": False}
    assert take_words(line, sections) == (rest, taken)
    with pytest.raises(ArgumentError, match=r"`--model.x` has no value"):
        take_words([*line, "--model.x"], sections)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("APP_DATA__X", None),
        ("APP_DATA", None),
        ("APP_DATA__SET__WIDTH", "APP_DATA__SET='{width: …}'"),
        ("APP_DATA__SET__INIT_ARGS__WIDTH", "APP_DATA__SET='{init_args: {width: …}}'"),
        ("APP_DATA__SET", None),
        ("OTHER_DATA__SET__WIDTH", None),
        ("APP_MODEL__WIDTH", "APP_MODEL='{width: …}'"),
    ],
)
@pytest.mark.parametrize("prefix", ["APP", "A-PP", None])
def test_variables_for_a_part_of_an_object_are_told(monkeypatch, variable, hint, prefix):
    told, stands = [], {"APP": "APP_", "A-PP": "A_PP_", None: ""}[prefix]
    monkeypatch.setattr(object_parser, "environment", {variable.replace("APP_", stands): "3"})
    monkeypatch.setattr(object_parser, "warn_user", told.append)
    actions = [SimpleNamespace(dest=name) for name in ("data.set", "data.set.width2", "model")]
    object_parser._tell_of_unread_variables(SimpleNamespace(env_prefix=prefix, _actions=actions))
    assert len(told) == (hint is not None)
    for text in told:
        name = variable.replace("APP_", stands)
        assert text == f"The environment variable {name} is not read.\n\nHint: {hint.replace('APP_', stands)}"


@pytest.mark.parametrize(
    ("causes", "raised"),
    [
        ([ValueError], ValueError), ([ValueError, ArgumentError], ArgumentError), ([ValueError, KeyError], ValueError),
        ([TypeError, KeyError, ArgumentError], ArgumentError), ([KeyError, ArgumentError], KeyError),
    ],
)  # fmt: skip
def test_an_error_of_ours_is_raised_without_the_dump_of_values(monkeypatch, causes, raised):
    errors = [kind(f"of level {level}") for level, kind in enumerate(causes)]
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause

    def fail(self, cfg, **options):
        raise errors[0]

    monkeypatch.setattr(object_parser.ArgumentParser, "instantiate_classes", fail)
    with pytest.raises(raised) as caught:
        object_parser.instantiate_classes(object_parser.ArgumentParser(), Namespace())
    assert caught.value is next(error for error in errors if type(error) is raised)


@pytest.mark.parametrize(
    ("hint", "is_model"),
    [
        (nn.Module | dict | str | None, True), (nn.Linear | dict[str, object], True), (nn.Module | str | None, False),
        (nn.Module, False), (dict | str | None, False), (int | dict, False),
    ],
)  # fmt: skip
def test_which_type_is_that_of_a_model(hint, is_model):
    assert object_parser._is_model(hint) is is_model
