"""`--config`: what is no configuration is told within a second, with the file and the place."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from jsonargparse import ArgumentParser

from hf_compat.cli import configuration
from hf_compat.cli.fit import make_parser
from hf_compat.cli.main import main
from hf_compat.errors import ArgumentError

MODEL = "model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 2}}\n"
BOMB = "model:\n  init_args:\n    a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    {new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "model:\n  a: &a {x: 1}\n" + "".join(
    f"  {new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}], {new}: 1}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

TEXTS = {
    "aliases of aliases": (BOMB, "stands for more than 50000 values"),
    "merges of merges": (MERGES, "stands for more than 50000 values"),
    "an alias of what holds it": ("model: &a [*a]\n", "nests more than 40 levels"),
    "an alias of nothing": ("model: *b\n", "found undefined alias, line 1"),
    "deep": ("model: " + "[" * 5000 + "]" * 5000, "nests more than 40 levels"),
    "deep in blocks": ("".join(" " * level + "a:\n" for level in range(500)), "nests more than 40 levels"),
    "deep by aliases": (
        f"model:\n  a: &a {'[' * 15}x{']' * 15}\n  b: &b {'[' * 14}*a{']' * 14}\n  c: {'[' * 11}*b{']' * 11}\n",
        "nests more than 40 levels",
    ),
    "deep by aliases, with nothing in it": (
        f"model:\n  a: &a {'[' * 15}{']' * 15}\n  b: &b {'[' * 14}*a{']' * 14}\n  c: {'[' * 10}*b{']' * 10}\n",
        "nests more than 40 levels",
    ),
    "digits": (f"args: {{seed: {'9' * 6000}}}\n", "a number of 6000 digits, line 1"),
    "sexagesimal": (f"args: {{seed: 1{':30' * 100_000}}}\n", "a number of"),
    "NUL": ("model: a\0b\n", "control characters are not allowed"),
    "a list": ("- 1\n- 2\n", "holds a list, not sections"),
    "text": ("hello\n", "holds a str, not sections"),
    "nothing": ("", "holds nothing, not sections"),
    "two documents": ("model: a\n---\nmodel: b\n", "another document"),
    "a key twice": (MODEL + MODEL, "'model' twice, line 2"),
    "a key twice within": (MODEL + "args: {max_steps: 1, max_steps: 2}\n", "'max_steps' twice, line 2"),
    "an unknown section": ("modle: a\n", "did you mean `model`?"),
    "an unknown argument": (MODEL + "args: {lerning_rate: 1}\n", "did you mean `args.learning_rate`?"),
    "an argument outside": (MODEL + "learning_rate: 1\n", "did you mean `args.learning_rate`?"),
    "a number as key": (MODEL + "args: {1: 2}\n", "`args.1`, which is not known"),
    "a list of arguments": (MODEL + "args: [max_steps]\n", "`args` is a list"),
    "many callbacks": (MODEL + f"callbacks: [{'a, ' * 1001}]\n", "`callbacks` has 1001 items"),
    "no integer": ("model: !!int x\n", "not of its type"),
    "no truth value": ("model: !!bool x\n", "not of its type"),
    "Python": ("model: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
    "cut off": ("args: {hub_token: hf_SECRET\n", "not valid YAML"),
}


def test_as_many_levels_as_the_message_says():
    deepest = f"a: &a {'[' * 15}{']' * 15}\nb: &b {'[' * 14}*a{']' * 14}\nc: {'[' * 10}*b{']' * 10}\n"
    assert set(configuration.load(deepest)) == {"a", "b", "c"}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_is_no_configuration(kind, tmp_path, capsys):
    text, message = TEXTS[kind]
    path = tmp_path / "it.yaml"
    path.write_text(text)
    before = time.monotonic()
    assert main(["fit", "--config", str(path)]) == 2
    took = time.monotonic() - before
    told = capsys.readouterr().err
    assert message in told and "it.yaml" in told and "SECRET" not in told and len(told) < 1000
    assert took < 10  # one second, on a machine that does nothing else


@pytest.mark.parametrize("kind", ["folder", "FIFO", "circle", "/dev/zero", "latin", "huge"])
def test_files_that_are_no_configuration(kind, tmp_path, capsys):
    path = tmp_path / "it.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind in ("circle", "/dev/zero"):
        path.symlink_to("it.yaml" if kind == "circle" else kind)
    elif kind == "latin":
        path.write_bytes("model: ä\n".encode("latin-1"))
    else:
        path.write_bytes(b"#" * (configuration.MOST_BYTES + 1))
    assert main(["fit", f"--config={path}"]) == 2
    assert f"{path} cannot be read: " in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["fit", "-c", str(tmp_path / "nowhere.yaml")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_line_of_commands_has_the_same_bounds(capsys):
    assert main(["fit", f"--config={BOMB}"]) == 2
    assert "`--config` cannot be read: it stands for more than 50000 values" in capsys.readouterr().err
    text = BOMB.partition("model:")[2]
    assert make_parser("fit").parse_args([f"--model={text}"]).model == text  # no more than a name that is long


def test_aliases_and_merges_of_a_usual_size_are_read():
    text = "model: &m {class_path: a}\ndata: {eval_dataset: *m, train_dataset: {<<: *m, init_args: {n: 5e-5}}}\n"
    loaded = configuration.load(text)
    assert loaded["data"] == {
        "eval_dataset": {"class_path": "a"},
        "train_dataset": {"class_path": "a", "init_args": {"n": 5e-5}},
    }
    assert len(configuration.load(f"[{', '.join(['x'] * 49_000)}]")) == 49_000


@pytest.mark.parametrize(
    ("loaded", "told"),
    [
        ({"model": "A", "args": {"seed": 1}, "data": None, "callbacks": [1] * 1000}, None),
        ({"args": {"names": [1] * 1000}, "data": {"set": [1] * 1001}, "model": {"a": [1] * 1001}}, None),
        ({"trainer": None, "modl": 1}, "`modl`, which is not known.*did you mean `model`"),
        ({"zzz": 1}, "`zzz`, which is not known.*lists the keys"),
        ({"args": {"sed": 1}}, "`args.sed`, which is not known.*did you mean `args.seed`"),
        ({"args": [1]}, "`args` is a list, not a mapping"),
        ({"data": "x"}, "`data` is a str, not a mapping"),
        ({"callbacks": [1] * 1001}, "`callbacks` has 1001 items"),
        ({"args": {"names": [1] * 1001}}, "`args.names` has 1001 items"),
        ({"args": {"names": dict.fromkeys(range(1001))}}, "`args.names` has 1001 items"),
        ({"args": {"names": "x" * 1001}}, None),
    ],
)
def test_the_keys_of_a_configuration_are_known(loaded, told):
    parser = ArgumentParser()
    for name in ("model", "callbacks", "args.seed", "args.names", "data.set", "trainer.profiler"):
        parser.add_argument(f"--{name}")
    with pytest.raises(ArgumentError, match=f"(?s){told}") if told else contextlib.nullcontext():
        assert configuration._check_keys("it", loaded, parser) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {b: 1, c: [1, 2]}", None),
        ("{1: a, '1': b}", None),
        ("a: 1\nb: {c: 1, c: 2}", "it has the key 'c' twice, line 2"),
        ("[{a: 1, a: 2}]", "it has the key 'a' twice, line 1"),
        ("? [1]\n: 1\n? [1]\n: 2", None),
        (f"a: {'1' * 400}", "a number of 400 digits, line 1"),
        (f"a: 0x{'f' * 400}", "a number of 402 digits, line 1"),
        (f"a: {'1' * 399}", None),
        (f"a: '{'1' * 400}'", None),
        (f"a: x{'1' * 400}", None),
        ("[[[1]]]", None),
        ("[[[[1]]]]", "nests more than 3 levels"),
        ("[[[{}]]]", "nests more than 3 levels"),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9]", None),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "more than 10 values"),
        ("a: &a [1, 2]\nb: *a\n", None),
        ("a: &a [1, 2]\nb: *a\nc: *a\n", "more than 10 values"),
        ("", None),
    ],
)
def test_the_bounds_of_a_yaml_text(monkeypatch, text, told):
    monkeypatch.setattr(configuration, "MOST_LEVELS", 3)
    monkeypatch.setattr(configuration, "MOST_VALUES", 10)
    with pytest.raises(configuration.TooLarge, match=told) if told else contextlib.nullcontext():
        assert configuration.refuse_huge_yaml(text) is None
