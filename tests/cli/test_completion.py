"""Completion in real shells at a terminal, and the schema of configurations beside the files that are shipped."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from hf_compat.cli import completion, configuration
from hf_compat.cli.main import COMMANDS, main, parser_of
from hf_compat.cli.schema import _NUMBER, _values
from hf_compat.errors import ArgumentError
from hf_compat.hf.value_types import Unreadable, ValueType

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("completion"), {}
    for shell in SHELLS:
        paths[shell] = folder / shell
        with pytest.MonkeyPatch.context() as patched, open(paths[shell], "w") as file:
            patched.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return paths


class Terminal:
    """A shell that a person would type into."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.main, end = pty.openpty()
        variables = {**os.environ, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null", "HOME": str(folder)}
        self.process = subprocess.Popen(
            SHELLS[shell], stdin=end, stdout=end, stderr=end, cwd=folder, env=variables, start_new_session=True
        )
        os.close(end)

    def type(self, text: str, until: str) -> str:
        """Type a text, and read until the shell has shown what is expected."""
        os.write(self.main, text.encode())
        shown, deadline = "", time.monotonic() + 60
        while not re.search(until, shown):
            assert time.monotonic() < deadline, f"{until!r} is not in {shown!r}"
            if select.select([self.main], [], [], 1)[0]:
                shown += os.read(self.main, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell == "bash" or shutil.which(shell)])
def test_a_shell_completes_commands_options_and_words(shell, scripts, tmp_path):
    (tmp_path / "train.py").touch()
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type(f"source '{scripts[shell]}'; echo rea''dy\n", r"ready\r?\n")
        for typed, completed in {
            "hf-compat mig": "migrate ",
            "hf-compat help plo": "plot ",
            "hf-compat plot --wat": "--watch ",
            "hf-compat plot --kind htm": "html ",
            "hf-compat fit --per_device_ev": "--per_device_eval_batch_size ",
            "hf-compat fit --optim grokad": "grokadamw ",
            "hf-compat fit --data.train_d": "--data.train_dataset ",
            "hf-compat run --node-r": "--node-rank ",
            "hf-compat run tra": "train.py ",  # files, where no word is known
        }.items():
            begun = typed.rpartition(" ")[2]
            terminal.type(f"{typed}\t", rf"{re.escape(begun)}.*?{re.escape(completed.removeprefix(begun))}")
            terminal.type("\x15", "")  # an empty line again
    finally:
        terminal.close()


def test_the_words_after_a_script_are_not_the_commands(scripts):
    def completed(words):
        place = f"COMP_WORDS=(hf-compat {words}); COMP_CWORD={len(words.split())}"
        asked = f"source '{scripts['bash']}'; {place}; _hf_compat; echo $COMPREPLY"
        return subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.strip()

    assert completed("run --no") == "--nodes" and completed("run train.py --no") == ""
    assert completed("fit --optim = lom") == "lomo"  # as bash divides `--optim=lom`


@pytest.fixture(scope="module")
def schema():
    with pytest.MonkeyPatch.context() as patched:
        lines = []
        patched.setattr("builtins.print", lambda text, **_: lines.append(text))
        assert main(["schema"]) == 0
    found = json.loads("".join(lines))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def wrong(schema, text):
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(yaml.safe_load(text))]


def shipped():
    blocks = re.findall(
        r"^```yaml title=[^\n]*\n(.*?)^```", (ROOT / "docs" / "command_fit.md").read_text(), re.S | re.M
    )
    assert len(blocks) == 1
    return {"digits.yaml": (ROOT / "examples" / "digits.yaml").read_text(), "command_fit.md": blocks[0]}


@pytest.mark.parametrize("name", ["digits.yaml", "command_fit.md"])
def test_the_schema_knows_the_shipped_configurations(name, schema):
    text = shipped()[name]
    assert wrong(schema, text) == []
    assert "'lerning_rate' was unexpected" in wrong(schema, text.replace(" learning_rate:", " lerning_rate:"))[0]
    assert "'calbacks' was unexpected" in wrong(schema, text.replace("callbacks:", "calbacks:"))[0]
    assert wrong(schema, text.replace("eval_strategy: epoch", "eval_strategy: epochs")) != []


def test_each_part_of_the_schema_that_another_names_is_there(schema):
    def named(part):
        if isinstance(part, dict):
            yield from ([part["$ref"]] if "$ref" in part else [])
            part = list(part.values())
        for inner in part if isinstance(part, list) else ():
            yield from named(inner)

    found = set(named(schema))
    assert found == {f"#/$defs/{name}" for name in schema["$defs"]}
    objects = ("model: {class_path: a.B, init_args: {c: 1}}", "model: a.B", "callbacks: [{class_path: a.B}, a.C]")
    assert [wrong(schema, text) for text in objects] == [[]] * 3
    assert wrong(schema, "model: {init_args: {c: 1}}") != [] and wrong(schema, "callbacks: [[a.C]]") != []


def test_the_arguments_of_lightnings_command_line_have_the_schema_of_theirs(schema):
    args = yaml.safe_load((ROOT / "examples" / "lightning_cli.yaml").read_text())["model"]["args"]
    assert len(args) > 3 and wrong({**schema["$defs"]["arguments"]}, json.dumps(args)) == []


@pytest.mark.parametrize(("how", "says_unset"), [("", True), ("=skip_unset", False)])
def test_the_schema_takes_a_printed_configuration(schema, capsys, how, says_unset):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(ROOT / "examples" / "digits.yaml"), f"--print_config{how}"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "per_device_train_batch_size: 32" in text and wrong(schema, text) == []
    assert (": null" in text) is says_unset


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("learning_rate: 5e-5", True),  # a text to YAML 1.1
        ("learning_rate: fast", False),
        ("bf16: yes", True),
        ("bf16: maybe", False),
        ("bf16: 'on'", True),  # a text to YAML 1.2, too
        ("bf16: '5e-5'", False),
        ("max_steps: 1.5", False),
        ("run_name: 2024", True),
        ("report_to: [wandb, tensorboard]", True),
        ("report_to: [wandbb]", False),
        ("fsdp: full_shard auto_wrap", True),
        ("fsdp_config: {min_num_params: 1}", True),
        ("save_strategy: best", True),
        ("evaluation_strategy: epoch", True),  # of an earlier release
    ],
)
def test_the_schema_judges_a_value_as_the_arguments_do(line, is_right, schema):
    assert (wrong(schema, f"args: {{{line}}}") == []) is is_right


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_says_what_the_exit_status_means(command):
    assert "Exit status:" in " ".join(parser_of(command).format_help().split())


NUMBER = {"type": "string", "pattern": _NUMBER}
SWITCH = {"enum": ["true", "false", "yes", "no", "on", "off"]}
AB = ["a", "b"]


def taking(*samples, expected="a value", takes_text=False):
    def read(value):
        if value == "told":
            raise ArgumentError("it is refused")
        if repr(value) not in map(repr, samples):
            raise Unreadable

    return ValueType(expected, read, takes_text)


@pytest.mark.parametrize(
    ("kind", "words", "is_unset", "expected"),
    [
        (None, [], True, {}),
        (taking(None), [], False, {"type": ["null"]}),
        (taking({}), [], True, {"type": ["null", "object"]}),
        (taking(2), [], False, {"anyOf": [{"type": ["integer"]}, NUMBER]}),
        (taking(0.5), [], False, {"anyOf": [{"type": ["number"]}, NUMBER]}),
        (taking(0.5, 2), [], False, {"anyOf": [{"type": ["number"]}, NUMBER]}),
        (taking(2, takes_text=True), [], False, {"type": ["integer", "string"]}),
        (taking(True), [], False, {"type": ["boolean"]}),
        (taking(False), [], False, {"type": ["boolean"]}),
        (taking(False, "true"), [], False, {"anyOf": [{"type": ["boolean"]}, SWITCH]}),
        (taking(False, "true", 2), [], False, {"anyOf": [{"type": ["boolean", "integer"]}, NUMBER]}),
        (taking(False, "true", takes_text=True), [], False, {"type": ["boolean", "string"]}),
        (taking("true", "", None), [], False, {"type": ["null"]}),
        (taking(expected="a path"), [], False, {"type": ["string"]}),
        (taking(expected="JSON"), [], False, {"type": ["string"]}),
        (taking(["a"]), [], False, {"type": ["array"]}),
        (taking([0.5], []), [], False, {"type": ["array"]}),
        (taking([0.5], "told", takes_text=True), AB, False, {"enum": AB}),
        (taking(expected="a path", takes_text=True), AB, True, {"anyOf": [{"type": ["null"]}, {"enum": AB}]}),
        (taking(""), ["a"], False, {"enum": ["a", ""]}),
        (taking(["a"]), AB, False, {"anyOf": [{"enum": AB}, {"type": "array", "items": {"enum": AB}}]}),
        (taking("a b"), AB, False, {"anyOf": [{"enum": AB}, {"type": "string", "pattern": "^(a|b)( (a|b))*$"}]}),
        (taking("a"), ["a"], False, {"enum": ["a"]}),
        (taking("told", None), ["told"], False, {"anyOf": [{"type": ["null"]}, {"enum": ["told"]}]}),
    ],
)
def test_the_schema_of_values_is_found_by_samples(kind, words, is_unset, expected):
    assert _values(kind, words, is_unset) == expected


def test_the_options_of_a_command_with_their_words(monkeypatch):
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plain")
    parser.add_argument("--words", choices=("a", "b"))
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    for name in ("no_cuda", "lr_scheduler_type", "own"):
        parser.add_argument(f"--args.{name}", choices=["1"])
    parser.add_argument("--optim", choices=["1"])  # an option of the command itself
    parser.add_argument("file")
    monkeypatch.setattr(completion, "parser_of", lambda command: parser if command == "a-command" else None)
    monkeypatch.setattr(configuration, "choices_of", lambda name: [name, "x"])
    assert completion._options_of("a-command") == {
        "--help": [], "--plain": [], "--words": ["a", "b"], "--lr_scheduler_type": ["lr_scheduler_type", "x"],
        "--own": ["1"], "--optim": ["1"],
    }  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_names_commands_options_and_words(monkeypatch, capsys, shell):
    options = {"one": {"--a": ["x", "y"], "--b": []}, "two": {}}
    monkeypatch.setattr(completion, "COMMANDS", {"one": 1, "two": 2})
    monkeypatch.setattr(completion, "_options_of", options.get)
    assert completion.main([shell]) == 0
    printed = capsys.readouterr().out
    assert [line.strip() for line in printed.splitlines() if "known=" in line][1:] == [
        'known="one two help"', '"one --a") known="x y" ;;', 'one) known="--a --b" ;;', 'two) known="" ;;',
    ]  # fmt: skip
    assert printed.startswith("autoload") is (shell == "zsh") and printed.endswith("hf-compat\n")
