"""`hf-compat doctor` and `migrate` on the kinds of 4.x scripts that are most copied, each with the trap of its kind."""

from __future__ import annotations

import ast
import json

import pytest

from helpers.migrated import SCRIPTS
from hf_compat.cli.main import main
from hf_compat.tools.migration.installed_names import installed_names
from hf_compat.tools.migration.migrate import migrate
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, FileChange, Spot, Target

KINDS = SCRIPTS / "kinds"
DIFFERS, FAILS, LOOK = Effect.DIFFERS, Effect.FAILS, Effect.LOOK
# What the script as it stands comes to under `hf-compat run`, and the gravest under transformers 5.
EXPECTED: dict[str, tuple[list[tuple[Effect, int, str]], str]] = {
    "cache": ([(FAILS, 7, "ModelArguments.use_cache")], "fails"),
    "chat": ([(DIFFERS, 10, "local_rank == 0"), (DIFFERS, 20, "training_args.local_rank == 0")], "differs silently"),
    "clm": ([], "fails"),
    "deepspeed": (
        [(DIFFERS, 9, "trainer.args.local_rank in (0,)"), (LOOK, 4, 'sharded_ddp="simple"')],
        "differs silently",
    ),
    "distillation": ([], "fails"),
    "embedding": ([(LOOK, 5, "SentenceTransformerTrainer")], "fine"),
    "glue": ([], "fails"),
    "half_migrated": (
        [(DIFFERS, 7, "isinstance(args, TrainingArguments)"), (DIFFERS, 10, "DPOTrainer")],
        "fine",
    ),
    "image": ([(FAILS, 1, "from transformers import ViTFeatureExtractor")], "fails"),
    "instruct": ([], "fails"),
    "lora": ([(LOOK, 10, "save_safetensors=False"), (LOOK, 18, "trainer.args.save_safetensors")], "fails"),
    "mlm": ([(FAILS, 1, "from transformers import DataCollatorForWholeWordMask")], "fails"),
    "multitask": ([(DIFFERS, 11, "MultitaskTrainer.prediction_loop")], "differs silently"),
    "preference": ([(LOOK, 10, "SFTTrainer")], "fails"),
    "pruning": (
        [
            (FAILS, 1, "from transformers import AdamW"),
            (FAILS, 2, "from transformers.modeling_utils import find_pruneable_heads_and_indices"),
            (LOOK, 1, "AdamW"),
            (LOOK, 4, "AdamW(correct_bias=…)"),
        ],
        "fails",
    ),
    "quantized": (
        [(LOOK, 11, "TrainingArguments.group_by_length"), (LOOK, 12, "TrainingArguments.warmup_ratio")],
        "differs silently",
    ),
    "question_answering": (
        [(LOOK, 15, "self.args.use_legacy_prediction_loop")],
        "fails",
    ),
    "reward": ([(LOOK, 16, "MarginTrainer.compute_loss")], "fails"),
    "speech": ([], "fails"),
    "stars": ([(LOOK, 1, "from transformers import *"), (LOOK, 2, "from transformers.trainer import *")], "fails"),
    "summarization": ([(LOOK, 2, "from transformers.file_utils import is_offline_mode")], "fails"),
    "vendored": ([(FAILS, 7, "class Trainer")], "fails"),
    "vision_language": ([], "fails"),
}


def test_each_kind_has_its_row():
    assert len(EXPECTED) > 20 and sorted(EXPECTED) == sorted(path.stem for path in KINDS.glob("*.py"))


@pytest.mark.parametrize("kind", EXPECTED)
def test_what_becomes_of_a_kind(kind):
    path = KINDS / f"{kind}.py"
    under_run, in_5 = EXPECTED[kind]
    (script,) = migrate([str(path)]).files
    assert sorted((one.effect, one.line, one.what) for one in script.by_gravity) == sorted(under_run)
    assert [one.effect.gravity for one in script.by_gravity] == sorted(one.effect.gravity for one in script.by_gravity)
    (script,) = migrate([str(path)], Target.TRANSFORMERS_5).files
    assert script.verdict == in_5
    for target in Target:
        resolves_after_migration(path.read_text(), target)


def resolves_after_migration(text: str, target: Target) -> None:
    """Each import of transformers that is left is there, or listed; a second run changes nothing."""
    names = installed_names("transformers")
    assert names is not None
    result = rewrite_python(text, target)
    assert rewrite_python(result.text, target).text == result.text
    listed = {one.what for one in result.findings}
    tree = ast.parse(result.text)
    caught = {inner for one in ast.walk(tree) if isinstance(one, ast.Try) for inner in ast.walk(one)}
    if any(what.startswith("class ") for what in listed):  # a copy, told as a whole
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers") and node not in caught:
            for alias in node.names:
                is_there = alias.name == "*" or names.has(f"{node.module}.{alias.name}")
                assert (
                    is_there
                    or f"from {node.module} import {alias.name}" in listed
                    or any(what.startswith("from ") and what.endswith(f" import {alias.name}") for what in listed)
                ), alias.name


def migrated(kind: str, target: Target = Target.HF_COMPAT) -> str:
    return rewrite_python((KINDS / f"{kind}.py").read_text(), target).text


def test_a_star_that_is_kept_binds_over_nothing_of_ours():
    lines = migrated("stars").splitlines()
    ours = [n for n, line in enumerate(lines) if line.startswith("from hf_compat")]
    assert max(n for n, line in enumerate(lines) if line.endswith("import *")) < min(ours)
    assert 'eval_strategy="epoch"' in migrated("stars") and "Trainer" in "".join(lines[n] for n in ours)


def test_a_trainer_of_another_library_keeps_its_classes():
    for kind in ("preference", "embedding"):
        assert "hf_compat" not in migrated(kind)
    assert 'eval_strategy="no"' in migrated("preference")


def test_a_class_that_takes_its_own_keyword_keeps_it():
    assert 'tokenizer="words")' in migrated("distillation")


def test_a_copy_of_the_trainer_is_one_note_and_stays():
    assert migrated("vendored") == (KINDS / "vendored.py").read_text()


def test_what_transformers_5_refuses_is_written_otherwise():
    assert 'report_to="all"' in migrated("lora", Target.TRANSFORMERS_5), "None meant all trackers in 4.x"
    assert "inputs, return_outputs=False, num_items_in_batch=None)" in migrated("reward", Target.TRANSFORMERS_5)


def test_findings_of_one_line_are_in_the_order_of_their_text():
    texts = ["no_cuda", "adafactor", "fp16_backend", "evaluation_strategy", "tokenizer", "warmup_ratio", "logging_dir"]
    found = tuple(Spot(3, text, "gone", effect=FAILS) for text in texts)
    change = FileChange(path="a.py", before=b"", after=b"", diff="", findings=found[:3], mended=found[3:])
    assert [one.what for one in change.by_gravity] == sorted(texts)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in ("glue", "image", "chat"):
        (tmp_path / f"{kind}.py").write_text((KINDS / f"{kind}.py").read_text())
    assert main(["doctor", "."]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("chat", "glue", "image"))] == [
        "chat.py: differs silently",
        "image.py: fails",
        "glue.py: fine",
    ]
    assert "3 files: 1 differs silently, 1 fails, 1 fine; names looked up in transformers 5." in lines[-1]
    assert main(["doctor", "glue.py"]) == 0 and main(["doctor", "--to", "transformers-5", "glue.py"]) == 1
    capsys.readouterr()
    assert main(["doctor", "--json", ".", "none.py"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert [script["verdict"] for script in told["scripts"]] == ["differs silently", "fails", "fine"]
    assert told["errors"][0]["path"] == "none.py" and told["scripts"][0]["findings"][0]["line"] == 10
    assert (tmp_path / "chat.py").read_text() == (KINDS / "chat.py").read_text()
