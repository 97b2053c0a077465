"""`hf-compat fit`: a GLUE-like script as YAML gives the script's losses; mistakes are told before anything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from jsonargparse import Namespace

from hf_compat.cli import fit
from hf_compat.errors import ArgumentError

TESTS = Path(__file__).resolve().parent.parent

# What a project has in its own module: metrics and a way to its data.
PROJECT = """
import datasets, numpy as np, torch

def sentences(part, tokenizer, file):
    data = datasets.load_dataset("json", data_files=file, split=part)
    return data.map(lambda row: tokenizer(row["sentence"], truncation=True, max_length=24))

def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

class Stamp:
    def on_train_end(self, args, state, control, **kwargs):
        open(args.output_dir + "/stamp", "w").write(str(state.global_step))
"""

SCRIPT = """
import sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from hf_compat import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainingArguments
from project import accuracy, sentences

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)
tokenizer = AutoTokenizer.from_pretrained("model")
trainer = Trainer(
    model, args, train_dataset=sentences("train", tokenizer, "train.jsonl"),
    eval_dataset=sentences("train", tokenizer, "eval.jsonl"), processing_class=tokenizer,
    compute_metrics=accuracy, callbacks=[EarlyStoppingCallback(3)],
)
result = trainer.train()
trainer.save_model()
trainer.save_metrics("train", result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
trainer.save_metrics("eval", metrics)
"""

TOKENIZER = {
    "class_path": "transformers.AutoTokenizer.from_pretrained",
    "init_args": {"pretrained_model_name_or_path": "model"},
}
CONFIG = {
    "model": {
        "class_path": "transformers.AutoModelForSequenceClassification.from_pretrained",
        "init_args": {"pretrained_model_name_or_path": "model", "num_labels": 2},
    },
    "data": {
        "train_dataset": {
            "class_path": "project.sentences",
            "init_args": {"part": "train", "tokenizer": TOKENIZER, "file": "train.jsonl"},
        },
        "eval_dataset": {
            "class_path": "project.sentences",
            "init_args": {"part": "train", "tokenizer": TOKENIZER, "file": "eval.jsonl"},
        },
        "processing_class": TOKENIZER,
    },
    "compute_metrics": "project.accuracy",
    "callbacks": [
        {"class_path": "EarlyStoppingCallback", "init_args": {"early_stopping_patience": 3}},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
        "project.Stamp",
    ],
}
ARGUMENTS = {
    "learning_rate": 5e-4,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "seed": 7,
    "use_cpu": True,
    "disable_tqdm": True,
}
TIMED = ("_runtime", "_per_second", "_time")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a small pretrained model, sentences from the standard library, and the project's module."""
    from pydoc_data.topics import topics

    sys.path.insert(0, str(TESTS))
    from helpers.toy import tiny_bert, tiny_tokenizer

    folder = tmp_path_factory.mktemp("project")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_bert(2).save_pretrained(folder / "model")
    lines = [line.strip() for text in topics.values() for line in text.splitlines() if len(line) > 40][:60]
    words = [" ".join(f"w{len(w) % 30}" for w in line.split()) for line in lines]
    rows = [{"sentence": text, "label": int("the" in line)} for text, line in zip(words, lines, strict=True)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:40])))
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows[40:])))
    (folder / "project.py").write_text(PROJECT)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "args": ARGUMENTS}))
    return folder


def run(folder, *words, status=0, script=None):
    command = [sys.executable, script] if script else [sys.executable, "-m", "hf_compat.cli.main"]
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


def history(folder):
    logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    kept = [{k: v for k, v in log.items() if not k.endswith(TIMED)} for log in logs]
    return [log for log in kept if not any(key.startswith("lr-") for key in log)]


def weights(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def equal(one, other):
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)


def test_a_script_as_yaml_gives_the_scripts_losses_bit_for_bit(project):
    line = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    run(project, *line, "--output_dir", "by_script", script="script.py")
    run(project, "fit", "--config", "run.yaml", "--output_dir", "by_yaml")
    assert history(project / "by_yaml") == history(project / "by_script")
    assert equal(project / "by_yaml", project / "by_script")
    evaluated = [json.loads((project / f / "eval_results.json").read_text()) for f in ("by_yaml", "by_script")]
    assert evaluated[0]["eval_accuracy"] == evaluated[1]["eval_accuracy"]
    assert (project / "by_yaml" / "stamp").read_text() == "10", "the project's own callback was called"

    printed = run(project, "fit", "--config", "run.yaml", "--output_dir", "again", "--print_config").stdout
    (project / "printed.yaml").write_text(printed)
    run(project, "fit", "--config", "printed.yaml")
    assert history(project / "again") == history(project / "by_script") and equal(
        project / "again", project / "by_script"
    )
    kept = yaml.safe_load((project / "again" / "config.yaml").read_text())
    assert kept["args"]["learning_rate"] == 5e-4 and kept["model"] == CONFIG["model"]
    run(project, "fit", "--config", "again/config.yaml", "--output_dir", "third")
    assert history(project / "third") == history(project / "by_script")


def test_validate_test_and_predict(project):
    tests = {**CONFIG["data"], "test_dataset": CONFIG["data"]["eval_dataset"]}
    (project / "test.yaml").write_text(yaml.safe_dump({**CONFIG, "data": tests, "args": ARGUMENTS}))
    for command in ("validate", "test", "predict"):
        run(project, command, "--config", "test.yaml", "--output_dir", f"out_{command}")
    evaluated = json.loads((project / "out_validate" / "eval_results.json").read_text())
    tested = json.loads((project / "out_test" / "test_results.json").read_text())
    assert evaluated["eval_loss"] == tested["test_loss"]
    predicted = np.load(project / "out_predict" / "predictions.npz")
    accuracy = float((predicted["predictions"].argmax(-1) == predicted["labels"]).mean())
    assert accuracy == tested["test_accuracy"]


def test_words_of_an_hf_command_line_are_arguments(project):
    words = ["--evaluation_strategy", "no", "--save_strategy=no", "--load_best_model_at_end", "false"]
    run(
        project, "fit", "--config", "run.yaml", "--output_dir", "words", *words,
        "--max-steps", "2", "--logging_steps", "1", "--bf16", "--no_dataloader_pin_memory",
        "--label_names", "labels", "--metric_for_best_model=accuracy", "--callbacks", "[]",
    )  # fmt: skip
    kept = yaml.safe_load((project / "words" / "config.yaml").read_text())["args"]
    assert (kept["max_steps"], kept["bf16"], kept["dataloader_pin_memory"]) == (2, True, False)
    assert kept["label_names"] == ["labels"]
    assert len([log for log in history(project / "words") if "loss" in log]) == 2


def test_callbacks_of_the_command_line_are_added(project):
    timer = {"class_path": "lightning.pytorch.callbacks.Timer"}
    words = ["--callbacks+=PrinterCallback", f"--callbacks+={json.dumps(timer)}"]
    printed = yaml.safe_load(run(project, "fit", "--config", "run.yaml", "--print_config", *words).stdout)
    assert printed["callbacks"] == [*CONFIG["callbacks"], "PrinterCallback", timer]


def test_the_trainer_section_says_the_same_in_lightnings_words(project):
    arguments = {k: v for k, v in ARGUMENTS.items() if k not in ("num_train_epochs", "use_cpu", "logging_steps")}
    trainer = {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 2, "profiler": "simple"}
    (project / "trainer.yaml").write_text(yaml.safe_dump({**CONFIG, "args": arguments, "trainer": trainer}))
    done = run(project, "fit", "--config", "trainer.yaml", "--output_dir", "by_trainer")
    run(project, "fit", "--config", "run.yaml", "--output_dir", "by_args")
    assert history(project / "by_trainer") == history(project / "by_args")
    assert "run_training_batch" in done.stdout + done.stderr, "the profiler reports"


@pytest.mark.parametrize(
    ("change", "words", "parts"),
    [
        ({"trainer": {"max_epochs": 5}}, [], ["trainer.max_epochs=5", "args.num_train_epochs=2", "keep one"]),
        ({"trainer": {"precision": "bf16-mixed"}}, ["--fp16"], ["trainer.precision='bf16-mixed'", "args.fp16=True"]),
        ({"trainer": {"strategy": "ddp"}}, [], ["trainer.strategy='ddp'", "counterpart is the arguments"]),
        ({"trainer": {"max_epoch": 5}}, [], ["max_epoch"]),
        ({"args": {**ARGUMENTS, "learning_rat": 1}}, [], ["learning_rat"]),
        ({"args": {**ARGUMENTS, "learning_rate": "fast"}}, [], ["learning_rate", "float"]),
        ({"compute_metrics": "project.accurracy"}, [], ["did you mean project.accuracy"]),
        ({"model": {"class_path": "nowhere.Model"}}, [], ["no module named 'nowhere'"]),
        ({"model": {"class_path": "toy.Classifier", "init_args": {"feature": 3}}}, [], ["did you mean 'features'"]),
        ({"model": None}, [], ["has no `model`", "class_path"]),
        ({"callbacks": ["EarlyStopingCallback"]}, [], ["there is no 'EarlyStopingCallback'", "whole path"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_a_way_out(project, change, words, parts):
    (project / "wrong.yaml").write_text(yaml.safe_dump({**CONFIG, "args": ARGUMENTS, **change}))
    (project / "toy.py").write_text((TESTS / "helpers" / "toy.py").read_text())
    done = run(project, "fit", "--config", "wrong.yaml", "--output_dir", "wrong", *words, status=2)
    for part in parts:
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (project / "wrong").exists()


@pytest.mark.matrix
@pytest.mark.real_python
def test_plain_lightning_cli_takes_our_module_and_data(tmp_path):
    (tmp_path / "cli.py").write_text(
        f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from lightning.pytorch.cli import LightningCLI
from hf_compat import HFDataModule, HFModule

class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int = 16, seed: int = 0):
        from helpers.toy import rows
        self.rows = rows(count, seed)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

if __name__ == "__main__":
    cli = LightningCLI(HFModule, HFDataModule)
    print("updates", cli.trainer.global_step, sorted(cli.trainer.callback_metrics))
    optimizer = cli.model.steps.optimizer.optimizer
    print("optimizer", type(optimizer).__name__, optimizer.param_groups[0]["lr"])
"""
    )
    config = {
        "seed_everything": 3,
        "model": {
            "model": {"class_path": "helpers.toy.Classifier", "init_args": {"features": 8}},
            "args": {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                     "use_cpu": True},
            "compute_metrics": {"class_path": "torchmetrics.classification.MulticlassAccuracy",
                                "init_args": {"num_classes": 3}},
        },
        "data": {
            "args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True},
            "train_dataset": {"class_path": "__main__.Rows", "init_args": {"count": 16}},
            "eval_dataset": {"class_path": "__main__.Rows", "init_args": {"count": 8, "seed": 1}},
        },
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                    "callbacks": [{"class_path": "hf_compat.HFCallbackAdapter", "init_args": {
                        "callbacks": [{"class_path": "hf_compat.PrinterCallback"}]}}]},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = run(tmp_path, "fit", "--config", "run.yaml", script="cli.py")
    assert "updates 4" in done.stdout and "eval_MulticlassAccuracy" in done.stdout
    printed = run(tmp_path, "fit", "--config", "run.yaml", "--print_config", script="cli.py").stdout
    (tmp_path / "printed.yaml").write_text(printed)
    words = ["--config", "printed.yaml", "--trainer.default_root_dir", "again"]
    assert "updates 4" in run(tmp_path, "fit", *words, script="cli.py").stdout
    words = ["--config", "run.yaml", "--optimizer", "SGD", "--optimizer.lr", "0.5", "--lr_scheduler", "StepLR"]
    words += [
        "--lr_scheduler.step_size",
        "1",
        "--trainer.default_root_dir",
        "sgd",
    ]  # once an epoch, as Lightning has it
    assert "optimizer SGD 0.005" in run(tmp_path, "fit", *words, script="cli.py").stdout


def command_of(tmp_path, is_first=True, **facts):
    """A command whose trainer notes what is asked of it."""
    done, result = [], SimpleNamespace(metrics=1)
    trainer = SimpleNamespace(
        is_world_process_zero=lambda: is_first,
        train=lambda resume_from_checkpoint: done.append(("train", resume_from_checkpoint)) or result,
        evaluate=lambda: done.append("evaluate") or 2,
        predict=lambda samples, metric_key_prefix: done.append((samples, metric_key_prefix)) or facts["output"],
        eval_dataset=facts.get("eval_dataset"),
    )  # fmt: skip
    for name in ("save_model", "save_metrics", "save_state", "log_metrics"):
        setattr(trainer, name, lambda *given, name=name: done.append((name, *given)))
    run = object.__new__(fit.Run)
    args = SimpleNamespace(output_dir=tmp_path / "out", should_save=is_first, do_eval=facts.get("do_eval", False))
    held = {
        "command": "fit",
        "checkpoint": None,
        "is_named": True,
        "text": "text",
        "test_dataset": None,
        "config": None,
    }
    held["config"] = SimpleNamespace(model="toy.Model")
    vars(run).update(held | {name: value for name, value in facts.items() if name in held}, trainer=trainer, args=args)
    return run, done


@pytest.mark.parametrize(
    ("checkpoint", "resumes"), [(None, None), ("checkpoint-2", "checkpoint-2"), ("last", True), ("best", "best")]
)
@pytest.mark.parametrize("do_eval", [False, True])
@pytest.mark.parametrize("eval_dataset", [None, []])
def test_fit_trains_saves_and_evaluates(tmp_path, checkpoint, resumes, do_eval, eval_dataset):
    run, done = command_of(tmp_path, checkpoint=checkpoint, do_eval=do_eval, eval_dataset=eval_dataset)
    run.fit()
    evaluated = ["evaluate", ("log_metrics", "eval", 2), ("save_metrics", "eval", 2)]
    assert done == [
        ("train", resumes), ("save_model",), ("save_metrics", "train", 1), ("save_state",),
        *(evaluated if do_eval and eval_dataset is not None else []),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("there", "is_first", "written"),
    [
        ({}, True, "config.yaml"),
        ({}, False, None),
        ({"config.yaml": "text"}, True, "config.yaml"),
        ({"config.yaml": "another"}, True, "config-2.yaml"),
        ({"config.yaml": "another", "config-2.yaml": "a third"}, True, "config-3.yaml"),
        ({"config.yaml": "another", "config-2.yaml": "text"}, True, "config-2.yaml"),
        ({"config.yaml": None}, True, "config-2.yaml"),  # a folder
    ],
)
def test_fit_writes_its_configuration_beside_others(tmp_path, there, is_first, written):
    run, _ = command_of(tmp_path, is_first)
    for name, content in there.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if content is None else path.write_text(content)
    run.fit()
    found = {path.name: path.read_text() for path in tmp_path.glob("out/*") if path.is_file()}
    expected = {name: content for name, content in there.items() if content} | ({written: "text"} if written else {})
    assert found == expected and (tmp_path / "out").exists() is bool(expected)


ONE, TWO = np.ones(2), np.zeros(3)


@pytest.mark.parametrize(
    ("predictions", "labels", "written"),
    [
        (ONE, None, {"predictions": ONE}),
        (ONE, TWO, {"predictions": ONE, "labels": TWO}),
        (ONE, (TWO, TWO), {"predictions": ONE}),
        ((ONE, TWO), TWO, {"predictions": ONE, "predictions_1": TWO, "labels": TWO}),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_predict_writes_arrays_and_metrics(tmp_path, capsys, predictions, labels, written, is_first):
    output = SimpleNamespace(predictions=predictions, label_ids=labels, metrics={"a": 1})
    run, done = command_of(tmp_path, is_first, output=output, test_dataset="rows", command="predict")
    run.execute()
    assert done == [
        ("rows", "predict"), *[("log_metrics", "predict", {"a": 1}), ("save_metrics", "predict", {"a": 1})] * is_first
    ]  # fmt: skip
    path = tmp_path / "out" / "predictions.npz"
    told = "weights: those that `model` makes; no checkpoint of a run is loaded (`--ckpt_path`)\n"
    assert capsys.readouterr().out == (f"{told}written: {path} ({', '.join(written)})\n" if is_first else "")
    assert path.exists() is is_first
    if is_first:
        with np.load(path) as found:
            assert {name: found[name].tolist() for name in found} == {n: one.tolist() for n, one in written.items()}


@pytest.mark.parametrize("metrics", [None, {"a": 1}])
@pytest.mark.parametrize("test_dataset", [None, "rows"])
def test_test_reports_the_metrics_of_the_test_data(tmp_path, metrics, test_dataset):
    output = SimpleNamespace(metrics=metrics)
    run, done = command_of(tmp_path, output=output, test_dataset=test_dataset, command="test")
    if test_dataset is None:
        with pytest.raises(ArgumentError, match="`hf-compat test` has no `data"):
            run.execute()
        return
    run.execute()
    assert done == [("rows", "test"), ("log_metrics", "test", metrics or {}), ("save_metrics", "test", metrics or {})]


@pytest.mark.parametrize(
    ("checkpoint", "model", "told"),
    [
        ("checkpoint-2", "toy.Model", "weights: checkpoint-2"),
        (None, "toy.Model", "weights: those that `model` makes; "),
        (None, "toy.Model.from_pretrained", "weights: those of toy.Model.from_pretrained; "),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_weights_are_loaded_before_they_are_scored(tmp_path, monkeypatch, capsys, checkpoint, model, told, is_named):
    config = SimpleNamespace(model=model)
    run, done = command_of(tmp_path, checkpoint=checkpoint, config=config, command="validate", is_named=is_named)
    monkeypatch.setattr(fit, "load_weights", lambda trainer, path, is_named: done.append(("load", path, is_named)))
    run.execute()
    loads = [("load", checkpoint, is_named)] * (checkpoint is not None)
    assert done == [*loads, "evaluate", ("log_metrics", "eval", 2), ("save_metrics", "eval", 2)]
    assert capsys.readouterr().out.startswith(told)


@pytest.mark.parametrize(
    ("values", "line", "found"),
    [
        ({"warmup_ratio": 0.1}, ["--args.warmup_ratio=0.1"], {"warmup_steps"}),
        ({"warmup_ratio": 0.1}, ["--args.warmup_ratio=0.1", "--args.warmup_steps=3"], set()),
        ({"warmup_ratio": 0.1}, ["--warmup_ratio=0.1"], set()),  # not of the section
        ({"warmup_ratio": 0.1}, ["--args.seed=3"], set()),  # of a file
        ({"no_cuda": True}, ["--args.no_cuda", "--args.seed=3"], {"use_cpu"}),
    ],
)
def test_old_names_of_a_command_line_replace_values_of_a_file(values, line, found):
    args = Namespace(warmup_steps=7, use_cpu="of a file", **values)
    assert fit._override(args, line) == found
    assert args.warmup_steps == (0 if "warmup_steps" in found else 7)
    assert args.use_cpu == (False if "use_cpu" in found else "of a file")


@pytest.mark.parametrize("word", [*fit._HELP, None])
def test_a_section_is_described_and_nothing_is_run(monkeypatch, capsys, word):
    done = []
    monkeypatch.setattr(
        fit, "Run", lambda command, words: SimpleNamespace(execute=lambda: done.append((command, words)))
    )
    monkeypatch.setattr(sys, "path", ["before"])
    words = ["--seed", "3", *([word] if word else [])]
    assert fit.main("validate", words) == 0
    assert done == ([] if word else [("validate", words)])
    assert sys.path == (["before"] if word else [os.getcwd(), "before"])
    assert capsys.readouterr().out == (fit._HELP[word]() if word else "")


def test_unset_values_are_left_out_of_the_sections_whose_keys_are_known():
    inner = Namespace(width=None)
    section = Namespace(
        model=Namespace(init_args=inner), ckpt_path=None, args=Namespace(seed=3, optim=None), trainer="text",
        data=Namespace(train_dataset=None, own=Namespace(a=None)),
    )  # fmt: skip
    fit._drop_unset(section)
    assert section == Namespace(
        model=Namespace(init_args=Namespace(width=None)), args=Namespace(seed=3), trainer="text",
        data=Namespace(own=Namespace(a=None)),
    )  # fmt: skip
