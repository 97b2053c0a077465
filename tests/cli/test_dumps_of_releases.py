"""What arguments of older releases write of themselves is taken back here: by the constructor, a file, a command line.

`tests/sweeps/releases/dumps.py` has written the dumps, from the real packages.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from hf_compat import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from hf_compat.cli.main import main
from hf_compat.errors import HfCompatWarning, InertArgumentWarning

DUMPS = Path(__file__).resolve().parents[1] / "sweeps" / "releases" / "dumps"
RELEASES = sorted(path.stem for path in DUMPS.glob("*.json"))
CLASSES = {one.__name__: one for one in (TrainingArguments, Seq2SeqTrainingArguments)}
CASES = [(release, name) for release in RELEASES for name in json.loads((DUMPS / f"{release}.json").read_text())]
# What these releases said by default and has no effect, or another name, today.
TOLD = {"4.19.4": ["`optim=.adamw_hf"], "4.30.2": ["`save_safetensors=False", "`optim=.adamw_hf"]}
BOTH = pytest.mark.parametrize(("release", "name"), CASES)


def dump_of(release, name):
    return json.loads((DUMPS / f"{release}.json").read_text())[name]


@pytest.fixture(autouse=True)
def only_what_is_to_be_told(request):
    """Fail on a warning about a value that the release itself has written."""
    release = getattr(request.node, "callspec", None) and request.node.callspec.params.get("release")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HfCompatWarning)
        for said in TOLD.get(release, ()):
            warnings.filterwarnings("ignore", said)
        yield


def assert_as_it_was(args, dump):
    assert args.output_dir == "out" and args.use_cpu is True and args.per_device_train_batch_size == 8
    assert args.learning_rate == 5e-5 and args.seed == 42 and args.save_total_limit is None and args.fp16 is False
    assert args.logging_dir == dump.get("logging_dir") or dump.get("logging_dir") is None
    assert args.log_level == "passive" and args.log_level_replica == "warning"


def test_dumps_of_all_generations_are_there():
    assert {release.split(".")[0] for release in RELEASES} == {"3", "4", "5"} and len(CASES) >= 20


@BOTH
def test_the_constructor_takes_it(release, name):
    dump = dump_of(release, name)
    assert_as_it_was(CLASSES[name](**dump), dump)


@BOTH
def test_a_json_file_holds_it(release, name, tmp_path):
    dump = dump_of(release, name)
    path = tmp_path / "args.json"
    path.write_text(json.dumps(dump))
    (args,) = HfArgumentParser(CLASSES[name]).parse_json_file(path)
    assert_as_it_was(args, dump)


def words_of(dump):
    """Return a dump as words; None and an empty list have none."""
    for name, value in dump.items():
        if value is None or value == []:
            continue
        words = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
        yield from (f"--{name}", *words)


@BOTH
def test_a_command_line_says_it(release, name):
    dump = dump_of(release, name)
    (args,) = HfArgumentParser(CLASSES[name]).parse_args_into_dataclasses(list(words_of(dump)))
    assert_as_it_was(args, dump)


@BOTH
def test_explain_takes_it_as_name_and_value(release, name, capsys):
    dump = {n: v for n, v in dump_of(release, name).items() if n not in ("no_cuda", "use_cpu")}
    pairs = [f"{n}={v if isinstance(v, str) else json.dumps(v)}" for n, v in dump.items()]
    assert main(["explain", "use_cpu=true", *pairs]) == 0, capsys.readouterr()
    assert "output_dir" in capsys.readouterr().out


LEVELS = {-1: "passive", 10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical", "20": "info"}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_may_be_its_number(level):
    assert TrainingArguments("out", use_cpu=True, log_level=level).log_level == LEVELS[level]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--log_level_replica", str(level)]
    )
    assert args.log_level_replica == {-1: "warning"}.get(level, LEVELS[level])
    with pytest.raises(ValueError, match=r"(?s)log_level=15.*choose one of") as told:
        TrainingArguments("out", log_level=15)
    assert told.type.__module__.startswith("hf_compat")


@pytest.mark.parametrize("value", ["{}", "", '"{}"'])
def test_an_empty_sagemaker_setting_asks_for_nothing(value, capsys):
    assert main(["explain", f"mp_parameters={value}", "use_cpu=true"]) == 0, capsys.readouterr()
    with pytest.warns(InertArgumentWarning, match="SageMaker"):
        TrainingArguments("out", mp_parameters={"partitions": 2})


def parsed(*words):
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", *words])


def test_words_of_older_command_lines():
    warnings.simplefilter("ignore", HfCompatWarning)
    (args,) = parsed("--report_to", "tensorboard", "wandb", "--optim", "adamw_hf", "--debug", "True")
    assert args.report_to == ["tensorboard", "wandb"] and args.optim == "adamw_torch"
    assert args.debug == ["tpu_metrics_debug"]
    assert parsed("--report_to", '["tensorboard"]')[0].report_to == ["tensorboard"]
    assert parsed("--report_to", "none", "--seed", "3")[0].report_to == []
    with pytest.raises(SystemExit):
        parsed("--optim", "adamw_of_nobody")
