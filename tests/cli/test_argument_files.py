"""Files of arguments are bounded: what is none of them is told within a second, by the file's name."""

from __future__ import annotations

import json
import os
import time

import pytest

from hf_compat import HfArgumentParser, TrainingArguments
from hf_compat.errors import ArgumentError

LEVELS = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
BOMB = "\n".join(["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]", *LEVELS])
WRONG = {
    "aliases": (BOMB, "more than 50000 values", False),
    "deep": ("[" * 5000, "", True),
    "a list": ("[1, 2]", "not names of arguments", True),
    "empty": ("null", "not names of arguments", True),
    "numbers for names": ("{1: 2}", "", True),
    "cut off": ('{"output_dir": "o', "", True),
    "digits": ('{"max_steps": ' + "9" * 9000 + "}", "", True),
    "large": ('{"a": "' + "x" * 5_000_000 + '"}', "more than 4194304 bytes", True),
    "twice": ('{"max_steps": 1, "max_steps": 2}', "twice", False),
    "a tag": ("a: !!python/object/apply:os.system [touch x]", "", False),
    "bytes": (b"\xff\xfe\x00", "cannot be read", True),
}


def read(kind, path):
    parser = HfArgumentParser(TrainingArguments)
    return parser.parse_yaml_file(path) if kind == "yaml" else parser.parse_json_file(path)


@pytest.mark.parametrize("kind", ["yaml", "json"])
@pytest.mark.parametrize("what", list(WRONG))
def test_what_is_no_file_of_arguments_is_refused_by_name(tmp_path, kind, what):
    content, message, in_both = WRONG[what]
    if kind == "json" and not in_both:
        content, message = "&", "no valid JSON"
    path = tmp_path / f"it.{kind}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    began = time.monotonic()
    with pytest.raises(ArgumentError) as caught:
        read(kind, path)
    assert f"it.{kind}" in str(caught.value) and message in str(caught.value)
    assert len(str(caught.value)) < 600 and time.monotonic() - began < 2


@pytest.mark.parametrize("kind", ["yaml", "json"])
@pytest.mark.parametrize("what", ["missing", "a folder", "a FIFO", "a device", "NUL", "a circle"])
def test_what_is_no_file_keeps_nobody_waiting(tmp_path, kind, what):
    path = tmp_path / "it"
    if what == "a folder":
        path.mkdir()
    elif what == "a FIFO":
        os.mkfifo(path)
    elif what in ("a device", "a circle"):
        path.symlink_to("/dev/zero" if what == "a device" else "it")
    with pytest.raises(ArgumentError, match="it"):
        read(kind, "it\0" if what == "NUL" else path)
    if what == "missing":
        with pytest.raises(FileNotFoundError):  # as upstream
            read(kind, path)


def test_good_files_are_read(tmp_path):
    (tmp_path / "it.json").write_text(json.dumps({"output_dir": "o", "max_steps": 3}))
    (tmp_path / "it.yaml").write_text("output_dir: o\nmax_steps: 3\nlearning_rate: 5e-5\n")
    assert read("json", str(tmp_path / "it.json"))[0].max_steps == 3
    assert read("yaml", tmp_path / "it.yaml")[0].learning_rate == 5e-5
