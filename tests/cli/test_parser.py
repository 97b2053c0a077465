"""HfArgumentParser: the same instances from the same words as transformers', and more types."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Optional

import pytest
import transformers
from transformers.hf_argparser import HfArg as TheirHfArg

import hf_compat
from hf_compat import HfArgumentParser, TrainingArguments
from hf_compat.cli.parser import HfArg


class Kind(Enum):
    tiny = "tiny"
    large = "large"


@dataclass
class Model:
    model_name: str = field(metadata={"help": "the model; 50% of it"})
    layers: int = 2
    dropout: Optional[float] = None  # noqa: UP045 - old scripts write it so
    cache: bool = False
    fast: bool = True
    maybe: bool | None = None
    kind: Kind = Kind.tiny
    mode: Literal["a", "b", 3] = "a"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    names: list[str] | None = None
    rate: float = TheirHfArg(default=0.1, aliases=["--r"], help="a rate")
    fixed: int = field(init=False, default=7)


@dataclass
class More:
    options: dict[str, Any] | None = None
    plain: dict = field(default_factory=dict)
    other: int = HfArg(default=5, aliases="-o", help="other")


LINES = [
    "--model_name m",
    "--model-name m --layers 3 --dropout 0.5",
    "--model_name m --cache --fast false",
    "--model_name m --no_fast --maybe true",
    "--model_name m --no-fast --cache yes",
    "--model_name m --kind large --mode 3",
    "--model_name m --sizes 4 5 6 --names x y",
    "--model_name m --r 1e-3",
    "--model_name m --layers 3 --layers 4",
]


@pytest.mark.parametrize("line", LINES)
def test_the_same_words_give_the_same_instances(line):
    (theirs,) = transformers.HfArgumentParser(Model).parse_args_into_dataclasses(line.split())
    (ours,) = HfArgumentParser(Model).parse_args_into_dataclasses(line.split())
    assert ours == theirs


TRAINING = [
    "--output_dir out --learning_rate 5e-5 --per_device_train_batch_size 8 --bf16 --use_cpu",
    "--output_dir out --eval_strategy steps --eval_steps 0.5 --lr_scheduler_type cosine --optim sgd --seed 3",
    "--output_dir out --gradient-checkpointing --lr_scheduler_kwargs {\"num_cycles\":2} --report_to none --use_cpu",
    "--output_dir out --label_names a b --include_for_metrics loss --dataloader_pin_memory false",
    "--output_dir out --no_dataloader_pin_memory --max_steps 5 --save_total_limit 2 --logging_steps 0.1",
]  # fmt: skip


@pytest.mark.parametrize("line", TRAINING)
def test_training_arguments_from_a_command_line(line):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # theirs, on gradient_checkpointing
        theirs_parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        (theirs,) = theirs_parser.parse_args_into_dataclasses(line.split())
    (ours,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split())
    assert ours.to_dict() == theirs.to_dict()


def test_names_of_earlier_releases_are_options():
    line = "--output_dir out --evaluation_strategy epoch --no_cuda --per_gpu_train_batch_size 3 --warmup_ratio 0.1"
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line.split())
    assert (args.eval_strategy, args.use_cpu, args.per_device_train_batch_size) == ("epoch", True, 3)
    assert args.warmup_steps == 0.1
    (args,) = HfArgumentParser(TrainingArguments).parse_dict({"output_dir": "o", "evaluation_strategy": "epoch"})
    assert args.eval_strategy == "epoch"
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--async_save"])
    assert args.async_save is True


def test_dicts_and_lists_as_json():
    words = ["--options", '{"a": {"b": [1, 2]}}', "--plain", '{"x": 1}', "-o", "6"]
    (more,) = HfArgumentParser(More).parse_args_into_dataclasses(words)
    assert more == More({"a": {"b": [1, 2]}}, {"x": 1}, 6)
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses(["--model_name", "m", "--sizes", "[7, 8]"])
    assert model.sizes == [7, 8]


def test_several_classes_further_options_and_remaining_words():
    parser = HfArgumentParser((Model, More))
    parser.add_argument("--extra", type=int, default=0)
    words = ["--model_name", "m", "--other", "2", "--extra", "3", "--unknown", "4"]
    model, more, namespace, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    assert (model.model_name, more.other, namespace.extra, rest) == ("m", 2, 3, ["--unknown", "4"])
    with pytest.raises(ValueError, match=r"not used by the HfArgumentParser.*--unknown"):
        parser.parse_args_into_dataclasses(words)


def test_files(tmp_path, monkeypatch):
    values = {"model_name": "m", "layers": 4, "other": 9}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text("model_name: m\nlayers: 4\nother: 9\n")
    expected = (Model("m", layers=4), More(other=9))
    parser = HfArgumentParser([Model, More])
    assert parser.parse_json_file(tmp_path / "a.json") == parser.parse_yaml_file(tmp_path / "a.yaml") == expected
    with pytest.raises(ValueError, match=r"not used by the HfArgumentParser: \['other'\]"):
        HfArgumentParser(Model).parse_dict(values)
    assert HfArgumentParser(Model).parse_dict(values, allow_extra_keys=True) == expected[:1]
    (tmp_path / "script.args").write_text("--model_name file --layers 8")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "script.py"), "--layers", "9"])
    assert HfArgumentParser(Model).parse_args_into_dataclasses() == (Model("file", layers=9),)
    (tmp_path / "b.args").write_text("--layers 1")
    words = ["--model_name", "m", "--args_file", str(tmp_path / "b.args")]
    (model,) = HfArgumentParser(Model).parse_args_into_dataclasses(
        words, look_for_args_file=False, args_file_flag="--args_file"
    )
    assert model.layers == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "two"], "--layers.*'two' is not of the type int"),
        (["--model_name", "m", "--kind", "huge"], "--kind.*invalid choice: 'huge'"),
        (["--model_name", "m", "--sizes", "1", "x"], "--sizes.*'x' is not of the type int"),
        (["--model_name", "m", "--cache", "perhaps"], "'perhaps' is not a truth value"),
        ([], "required: --model_name"),
    ],
)
def test_wrong_words_end_with_a_message(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        HfArgumentParser(Model).parse_args_into_dataclasses(words)
    assert ended.value.code == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_help_shows_fields_and_defaults(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser((Model, TrainingArguments)).parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "--learning_rate" in shown and "50% of it" in shown and "--evaluation_strategy" not in shown


def test_a_dataclass_of_ones_own_training_arguments():
    @dataclass
    class Mine(hf_compat.TrainingArguments):
        beta: float = 0.5

    (mine,) = HfArgumentParser(Mine).parse_args_into_dataclasses(["--beta", "2", "--evaluation_strategy", "no"])
    assert mine.beta == 2.0 and dataclasses.is_dataclass(mine) and mine.eval_strategy == "no"


def test_a_field_with_the_name_of_a_new_argument_is_one_clear_error():
    """4.x had no argument `use_cache`; transformers' parser ends in argparse's own error."""
    own = dataclasses.make_dataclass("ModelArguments", [("use_cache", bool, False)])
    with pytest.raises(hf_compat.errors.ArgumentError) as raised:
        HfArgumentParser((own, TrainingArguments))
    assert "have a field `use_cache`" in str(raised.value) and "rename your own field" in str(raised.value)


def test_set_defaults_counts_for_training_arguments():
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(learning_rate=1.0, eval_strategy="epoch", dataloader_pin_memory=False)
    words = ["--output_dir", "out", "--use_cpu", "--evaluation_strategy", "epoch", "--warmup_r", "0.1"]
    (args,) = parser.parse_args_into_dataclasses(words)
    assert (args.learning_rate, args.eval_strategy, args.dataloader_pin_memory) == (1.0, "epoch", False)
    assert (args.warmup_steps, args.average_tokens_across_devices) == (0.1, True)
    (args,) = parser.parse_args_into_dataclasses([*words[:3], "--learning_rate", "0.5", "--eval_strategy", "no"])
    assert (args.learning_rate, args.eval_strategy) == (0.5, "no")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"help": "h"},
        {"aliases": "-a", "default": 3},
        {"aliases": ["-a", "--b"], "help": "h", "default_factory": list},
        {"metadata": {"help": "old", "other": 1}, "help": "new"},
    ],
)
def test_a_declared_field_is_upstreams(facts):
    theirs, ours = TheirHfArg(**facts), HfArg(**facts)
    assert (ours.default, ours.default_factory) == (theirs.default, theirs.default_factory)
    assert dict(ours.metadata) == dict(theirs.metadata)
