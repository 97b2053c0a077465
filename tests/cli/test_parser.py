"""HfArgumentParser: the same instances from the same words as transformers', and more types."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal, Optional

import pytest
import transformers
from transformers.hf_argparser import HfArg as TheirHfArg

import hf_compat
from hf_compat import HfArgumentParser, TrainingArguments
from hf_compat.cli.parser import HfArg, _add_field, _reading, _SeveralWords, read_arguments, read_word


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


MISSING = dataclasses.MISSING


@pytest.mark.parametrize(
    ("hint", "default"),
    [
        *((kind, value) for kind in (bool, bool | None) for value in (MISSING, None, True, False)),
        *((kind, value) for kind in (str, str | None) for value in (MISSING, None, "z")),
        *((kind, value) for kind in (int, int | None) for value in (MISSING, None, 2)),
        *((kind, MISSING) for kind in (Kind, Literal["a", 3], list[int], list[str] | None)),
        (Literal["a", 3], "a"),
        (Kind | None, None),
        (list[int] | None, None),
    ],
)
def test_a_field_of_each_kind_is_read_as_upstream_reads_it(hint, default):
    made = dataclasses.make_dataclass("Made", [("x", hint, field(default=default, metadata={"help": "100% of it"}))])

    def read(parser, line):
        try:
            return parser.parse_args_into_dataclasses(line.split(), return_remaining_strings=True)
        except SystemExit as ended:
            return ended.code

    theirs, ours = transformers.HfArgumentParser(made), HfArgumentParser(made)
    for line in ("", "--x", "--x true", "--x no", "--no_x", "--no-x", "--x a", "--x 3", "--x 1 2"):
        assert read(ours, line) == read(theirs, line)


def test_an_option_has_the_names_of_its_field_and_its_help():
    @dataclass
    class Mine:
        one_two: bool = field(
            default=True, metadata={"help": "5% and %(default)s 7%% of it", "aliases": ["-t", "--tt"]}
        )
        report_to: str = "none"
        any_of: int = field(default=1, metadata={"choices": [1, 2]})

    parser = HfArgumentParser(Mine)
    found = {option: action for action in parser._actions for option in action.option_strings if "h" not in option}
    assert [*found] == ["--one_two", "--one-two", "-t", "--tt", "--no_one_two", "--no-one-two",
                        "--report_to", "--report-to", "--any_of", "--any-of"]  # fmt: skip
    assert {found[name].help for name in ("-t", "--no-one-two")} == {"5%% and %(default)s 7%% of it"}
    assert "5% and True 7% of it" in " ".join(parser.format_help().split())
    assert found["--report_to"].nargs is None and found["--any_of"].choices == [1, 2]
    assert parser.parse_args(["--any-of", "2"]).any_of == 2
    training = {action.dest: action for action in HfArgumentParser(TrainingArguments)._actions}
    assert (training["report_to"].nargs, training["run_name"].nargs) == ("+", None)


def test_an_argument_translates_words_that_are_no_choice():
    def read(word):
        if word != "old":
            raise hf_compat.errors.ArgumentError("it is refused")
        return Kind.large

    (one,) = dataclasses.fields(dataclasses.make_dataclass("Made", [("kind", Kind, Kind.tiny)]))
    for check, words in ((SimpleNamespace(read=read), ("old", "tiny")), (None, ("large", "tiny"))):
        parser = argparse.ArgumentParser(exit_on_error=False)
        _add_field(parser, one, Kind, check)
        assert [parser.parse_args(["--kind", word]).kind for word in words] == ["large", "tiny"]
        with pytest.raises(argparse.ArgumentError, match="invalid choice: 'new'"):
            parser.parse_args(["--kind", "new"])


@pytest.mark.parametrize(
    ("word", "kinds", "value"),
    [
        ("yes", {bool}, True),
        ("no", {bool, str}, False),
        (True, {bool, list}, True),
        ("yes", {str}, "yes"),
        ("x", {bool, str}, "x"),
        (" [1]", {str, list}, [1]),
        (" [1]", {str}, " [1]"),
        ("1", {str, list}, "1"),
        ("x", {bool}, None),
        ("[1]", {bool, list}, None),
    ],
)
def test_a_word_is_read_by_the_kinds_that_are_allowed(word, kinds, value):
    if value is None:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a truth value"):
            read_word(word, kinds)
    else:
        assert read_word(word, kinds) == value and type(read_word(word, kinds)) is type(value)


MISSING = dataclasses.MISSING


@pytest.mark.parametrize(
    ("hint", "default", "shape", "values"),
    [
        (Kind, MISSING, (None, None), ["tiny", "large"]),
        (Kind | None, None, (None, None), ["tiny", "large"]),
        (Literal["a", None, 3], "a", (None, None), ["a", 3]),
        (Literal["a", 3] | None, None, (None, None), ["a", 3]),
        (bool, False, ("?", True), {"no": False}),
        (bool, MISSING, ("?", True), {"no": False}),
        (bool | None, None, (None, None), {"no": False}),
        (bool | None, MISSING, (None, None), {"no": False}),
        (bool | None, False, ("?", True), {"no": False}),
        (bool | str | None, None, ("?", True), {"no": False, "x": "x"}),
        (bool | list[int], False, ("?", True), {"no": False}),
        (str, "", (None, None), {"no": "no", "[1]": "[1]"}),
        (str | None, None, (None, None), {"no": "no", "[1]": "[1]"}),
        (str | list[str], "", (None, None), {"no": "no", '["a"]': ["a"]}),
        (str | dict[str, int] | None, None, (None, None), {"no": "no", '{"a": 1}': '{"a": 1}'}),
        (list, MISSING, ("+", None), {"1": "1"}),
        (list[str], MISSING, ("+", None), {"1": "1"}),
        (list[int] | None, None, ("+", None), {"1": 1}),
        (int, 1, (None, None), {"1": 1}),
        (int | None, None, (None, None), {"1": 1, "null": None}),
        (int | list[int], 1, (None, None), {"1": 1, "[1]": [1]}),
        (dict[str, int], MISSING, (None, None), {'{"a": 1}': {"a": 1}}),
    ],
)
def test_a_type_decides_how_many_words_an_option_takes_and_how_they_are_read(hint, default, shape, values):
    keywords = _reading(hint, SimpleNamespace(default=default))
    assert (keywords.pop("nargs", None), keywords.pop("const", None)) == shape
    assert keywords.pop("action", None) is (_SeveralWords if shape[0] == "+" else None)
    if isinstance(values, list):
        assert keywords == {"choices": values}
    else:
        assert {word: keywords["type"](word) for word in values} == values and set(keywords) == {"type"}


@pytest.mark.parametrize(
    ("words", "takes_text", "values"),
    [
        (["2"], False, [2]),
        (["2"], True, "2"),
        (["2", "3"], True, [2, 3]),
        ([' ["2", 3]'], True, [2, 3]),
        (["[2]", "3"], False, None),
        (None, False, []),
    ],
)
def test_a_list_is_several_words_or_json(words, takes_text, values):
    parser, namespace = HfArgumentParser(), argparse.Namespace()
    action = _SeveralWords(["--x"], "x", type=int, takes_text=takes_text)
    if values is None:
        with pytest.raises(argparse.ArgumentError, match="invalid literal"):
            action(parser, namespace, words)
    else:
        action(parser, namespace, words)
        assert namespace.x == values


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


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("here", {"a": 1}, None),
        ("here", {}, None),
        ("here", [1], "here holds .*, not names of arguments"),
        ("here", "text", "here holds 'text', not names of arguments"),
        ("here", {"a": 1, 2: 3}, "here holds .*, not names of arguments"),
        ("none", {"a": 1}, "the file does not exist"),
        ("a\0b", {"a": 1}, None),  # the reader says so
    ],
)
def test_a_file_of_arguments_holds_names(tmp_path, monkeypatch, name, content, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    with pytest.raises(hf_compat.errors.ArgumentError, match=told) if told else contextlib.nullcontext():
        assert read_arguments(name, lambda path: content) == content


@pytest.mark.parametrize(
    ("words", "options", "seed"),
    [
        (["/a/script.py", "--output_dir", "o", "x.y"], {}, 1),
        (["/a/script.py", "--output_dir", "o", "x.y"], {"look_for_args_file": False}, 42),
        (["/a/script.py", "--output_dir", "o", "x.y"], {"args_filename": "other.txt"}, 2),
        (["/a/script.py", "--output_dir", "o", "x.y", "--more", "third.txt"], {"args_file_flag": "--more"}, 3),
        (["/a/script.py", "--output_dir", "o", "x.y", "--seed", "9"], {}, 9),
        ([], {"args": ["--output_dir", "o", "x.y"]}, 42),
    ],
)
def test_where_the_arguments_of_a_script_are(tmp_path, monkeypatch, words, options, seed):
    parser = HfArgumentParser(TrainingArguments)
    files = {"script.args": 1, "x.args": 4, "other.txt": 2, "third.txt": 3}
    for name, value in files.items():
        (tmp_path / name).write_text(f"--seed {value}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [word.replace("/a", str(tmp_path)) for word in words])
    args, rest = parser.parse_args_into_dataclasses(return_remaining_strings=True, **options)
    assert (args.seed, args.output_dir, rest) == (seed, "o", ["x.y"])


def test_an_option_for_files_is_not_shortened(tmp_path):
    (tmp_path / "third.txt").write_text("--seed 3")
    line = ["--output_dir", "o", "--mor", str(tmp_path / "third.txt")]
    args, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        line, return_remaining_strings=True, args_file_flag="--more"
    )
    assert args.seed == 42 and rest == line[2:]
