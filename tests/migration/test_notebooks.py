"""Notebooks: code cells are rewritten together, everything else stays as it is."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import difflib
import json

import nbformat
import pytest

from hf_compat.cli.main import main

CELLS = [
    ("markdown", "# Old\nfrom transformers import Trainer"),
    ("code", "%pip install -q transformers==4.46 \\\n    datasets\n!ls\nimport torch\nfrom transformers import AutoModel, Trainer, TrainingArguments"),
    ("code", "%%bash\necho --evaluation_strategy"),
    ("code", "%%time\nfiles = !ls {x}\nfor x in range(2):\n    %timeit x\n    args = TrainingArguments('é', evaluation_strategy='no', tp_size=8)\nargs?"),
    ("code", ""),
    ("code", "def broken(:"),
    ("code", "await thing\nTrainer(args=args, tokenizer=None).args.no_cuda  # the last"),
]  # fmt: skip


def notebook(indent=1, ascii_only=False, as_text=False):
    cells = [
        {
            "cell_type": kind,
            "metadata": {"tags": []},
            "source": source if as_text else source.splitlines(keepends=True),
            **({"outputs": [{"name": "stdout", "output_type": "stream", "text": ["é no_cuda\n"]}]} if kind == "code" else {}),
            **({"execution_count": 3} if kind == "code" else {}),
        }
        for kind, source in CELLS
    ]  # fmt: skip
    metadata = {"kernelspec": {"name": "python3", "display_name": "P", "language": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=indent, ensure_ascii=ascii_only) + "\n"


@pytest.mark.parametrize(
    "form",
    [{}, {"indent": 4, "ascii_only": True}, {"as_text": True}, {"indent": None}, {"indent": None, "as_text": True}],
)
def test_a_notebook(form, tmp_path, capsys):
    file = tmp_path / "old.ipynb"
    before = notebook(**form)
    file.write_text(before, encoding="utf-8")
    assert main(["migrate", "--write", str(file)]) == 0
    err = capsys.readouterr().err
    assert f"{file}:cell 4:5: tp_size=8: taken out" in err and f"{file}:cell 6:1: def broken(:: a syntax error" in err
    after = file.read_text(encoding="utf-8")
    nbformat.validate(nbformat.reads(after, as_version=4))
    sources = ["".join(cell["source"]) for cell in json.loads(after)["cells"]]
    expected = [source for _, source in CELLS]
    expected[1] = expected[1].replace(
        "import torch\nfrom transformers import AutoModel, Trainer, TrainingArguments",
        "import torch\nfrom hf_compat import Trainer, TrainingArguments\nfrom transformers import AutoModel",
    )
    expected[3] = expected[3].replace("evaluation_strategy='no', tp_size=8", "eval_strategy='no'")
    expected[6] = expected[6].replace("tokenizer", "processing_class").replace("no_cuda", "use_cpu")
    assert sources == expected
    unlike = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    assert form.get("indent", 1) is None or form.get("as_text") or len(unlike) == 2 + 2 + 3
    assert main(["migrate", str(file)]) == 0 and file.read_text(encoding="utf-8") == after


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("indent", "separators"), [(1, None), (2, None), ("\t", None), (None, (", ", ": ")), (None, (",", ":"))]
)
def test_the_layout_of_a_file_stays_byte_for_byte(indent, separators, newline, tmp_path):
    def written(source):
        output = {"output_type": "stream", "name": "stdout", "text": ["é no_cuda\n", "0.1\t1e-05"]}
        cell = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [output], "source": [source]}
        whole = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        text = json.dumps(whole, indent=indent, separators=separators, ensure_ascii=False) + "\n"
        return text.replace("\n", newline).encode()

    file = tmp_path / "x.ipynb"
    file.write_bytes(written("from transformers import Trainer"))
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_bytes() == written("from hf_compat import Trainer")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "not json"])
def test_what_is_no_notebook_is_one_line(text, tmp_path, capsys):
    file = tmp_path / "x.ipynb"
    file.write_text(text)
    assert main(["migrate", "--write", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"error: {file}: it is not a notebook" in err and "Traceback" not in err and file.read_text() == text


def test_notebooks_of_other_languages_stay(tmp_path):
    file = tmp_path / "x.ipynb"
    text = notebook().replace('"language": "python"', '"language": "R"')
    file.write_text(text)
    assert main(["migrate", str(file)]) == 0
