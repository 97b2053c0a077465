"""What a script has read from the environment is read there again; its secrets are written nowhere."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from hf_compat.tools.ejection.expressions import Expressions, ProjectFiles
from hf_compat.tools.ejection.recording import Recorder
from hf_compat.tools.ejection.secrets import looks_secret, secrets_in, without_secrets

HUB = "hf_" + "aB3dE5gH7j" * 4
SCRIPT = f"""
import os
from pathlib import Path

token = os.environ["A_HUB_OF_A_TEST"]
short = os.getenv("A_SHORT_ONE", "9")
folder = os.environ.get("A_FOLDER_OF_A_TEST")
missing = os.environ.get("NOT_SET_IN_A_TEST", "a default of the script")
LITERAL = "ghp_{"x1Y2" * 9}"


class Client:
    def __init__(self, api_key, where):
        self.api_key, self.where = api_key, where

    def header(self):
        return {{"Authorization": "Bearer " + token}}


client = Client("kept-in-a-file", Path(folder) / "data")


def score(prediction):
    return {{"score": len(client.header()) + len(LITERAL), "pad_token": "<padding>"}}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("A_HUB_OF_A_TEST", HUB)
    monkeypatch.setenv("A_SHORT_ONE", "77")
    monkeypatch.setenv("A_FOLDER_OF_A_TEST", "/somewhere/else")
    path = tmp_path / "script_of_a_test_of_secrets.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    recorder = Recorder(tmp_path)
    with recorder.listening():
        spec.loader.exec_module(module)
    yield module, Expressions(recorder, ProjectFiles())
    del sys.modules[path.stem]


def test_what_was_read_is_read_again(script):
    module, write = script
    assert write.of(module.token) == 'os.environ["A_HUB_OF_A_TEST"]'
    assert write.of(f"Bearer {module.token}!") == '"Bearer " + os.environ["A_HUB_OF_A_TEST"] + "!"'
    assert write.of([module.short, "77"]) == '[os.environ["A_SHORT_ONE"], "77"]'  # the same text by chance
    assert write.of(module.client.where) == 'Path(os.environ["A_FOLDER_OF_A_TEST"] + "/data")'
    assert write.of(module.missing) == '"a default of the script"'
    assert write.files.secrets == set()


def test_a_secret_stands_nowhere(script, monkeypatch):
    module, write = script
    expression = write.of(module.score)
    text = write.code.text()
    assert HUB not in text and "ghp_" not in text and "kept-in-a-file" not in text and "<padding>" in text
    assert write.files.secrets == {"API_KEY", "SECRET"}
    for name, value in (("API_KEY", "kept-in-a-file"), ("SECRET", module.LITERAL)):
        monkeypatch.setenv(name, value)
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert eval(expression, namespace)(None) == module.score(None)


def test_secrets_within_code_are_read_from_the_environment():
    token = "sk-proj-" + "Ab12" * 8
    source = (
        f'login(user="me", password="correct-horse")  # {token}\nkeys = {{"hub_token": "abcdefgh", "a": f"{token}"}}\n'
    )
    text, names = without_secrets(source)
    assert text == (
        'login(user="me", password=os.environ["PASSWORD"])  # <masked>\n'
        'keys = {"hub_token": os.environ["HUB_TOKEN"], "a": f"<masked>"}\n'
    )
    assert names == ["HUB_TOKEN", "PASSWORD"]


@pytest.mark.parametrize(
    "token",
    [
        "AKIAABCDEFGHIJKLMNOP", "gho_" + "a1B2" * 9, "github_pat_" + "a1B2_" * 8, "AIza" + "a" * 35,
        "xoxb-123456789012",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_def", "glpat-" + "a1" * 10, "sk_live_" + "a1" * 12,
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "sk-ant-api03-" + "a1B2" * 6,
    ],
)  # fmt: skip
def test_well_known_shapes(token):
    assert secrets_in(f"before {token}, after") == [token]
    assert secrets_in("postgres://me:word@host/base") == ["me:word"]


def test_ordinary_texts_are_no_secrets():
    for text in ("bert-base-uncased", "/data/run-3/checkpoint-100", "d41d8cd98f00b204e9800998ecf8427e", "hf_compat"):
        assert secrets_in(text) == []
    for name, value in (("pad_token", "<pad>"), ("stop_token", "</s>"), ("label_key", "labels_of_all"), ("token", "")):
        assert not looks_secret(name, value)
    assert looks_secret("AWS_SECRET_ACCESS_KEY", "abcd/efgh+1") and looks_secret("db_password", "correct-horse")
