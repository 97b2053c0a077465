"""Modules named as those of transformers: its public names are there, ours where we have them."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys

import pytest
import transformers

import hf_compat

MODULES = ["trainer_utils", "trainer_callback", "trainer_pt_utils", "training_args", "optimization", "data"]
MODULES += ["training_args_seq2seq", "trainer_seq2seq", "debug_utils"]
IMPORTS = {
    "trainer_utils": "get_last_checkpoint, EvaluationStrategy, EvalPrediction, BestRun, HubStrategy, set_seed",
    "trainer_callback": "TrainerCallback, TrainerState, TrainerControl, ExportableState, EarlyStoppingCallback",
    "trainer_pt_utils": "LabelSmoother, nested_concat, nested_detach, AcceleratorConfig, LengthGroupedSampler",
    "training_args": "TrainingArguments, OptimizerNames, ParallelMode",
    "training_args_seq2seq": "Seq2SeqTrainingArguments, TrainingArguments, GenerationConfig",
    "trainer_seq2seq": "Seq2SeqTrainer, Trainer, GenerationConfig",
    "optimization": "get_scheduler, get_cosine_schedule_with_warmup, Adafactor",
    "debug_utils": "DebugOption, DebugUnderflowOverflow, detect_overflow, get_abs_min_max",
    "data": "DataCollatorWithPadding, default_data_collator, DataCollatorForLanguageModeling",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_upstream_is_there(name):
    ours, theirs = (importlib.import_module(f"{package}.{name}") for package in ("hf_compat", "transformers"))
    public = [one for one in dir(theirs) if not one.startswith("_")]
    assert len(public) > 5 and all(getattr(ours, one) is not None for one in public if getattr(theirs, one) is not None)
    classes = [value for one in dir(ours) if isinstance(value := getattr(ours, one), type)]
    assert all(value.__module__.startswith("hf_compat.") for value in classes)


@pytest.mark.parametrize("name", [one for one in MODULES if not one.endswith("seq2seq") and one != "data"])
def test_helpers_take_upstreams_arguments_by_its_names(name):
    ours, theirs = (importlib.import_module(f"{package}.{name}") for package in ("hf_compat", "transformers"))
    differ = {}
    for one, value in vars(theirs).items():
        mine = getattr(ours, one, None)
        if one.startswith("_") or not callable(value) or getattr(value, "__module__", "") != theirs.__name__:
            continue
        wanted = [
            parameter.name
            for parameter in inspect.signature(value).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if list(inspect.signature(mine).parameters)[: len(wanted)] != wanted:
            differ[one] = wanted
    assert differ == {}


def test_a_module_needs_no_import_of_its_own():
    script = f"import hf_compat; print(*(getattr(hf_compat, name).__name__ for name in {MODULES!r}))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.split() == [f"hf_compat.{name}" for name in MODULES], said.stderr


def test_a_subclass_wraps_its_collator_as_upstreams_trainer_does(caplog):
    from hf_compat.trainer_utils import RemoveColumnsCollator

    caplog.set_level(logging.INFO)
    for logger, lines in ((logging.getLogger("of_a_script"), 1), (None, 0)):
        caplog.clear()
        collate = RemoveColumnsCollator(
            data_collator=list, signature_columns=["x"], logger=logger, model_name="Model", description="training"
        )
        assert collate([{"x": 1, "y": 2}, {"x": 3, "y": 4}]) == [{"x": 1}, {"x": 3}]
        assert [record.name for record in caplog.records] == ["of_a_script"] * lines


@pytest.mark.parametrize("name", MODULES)
def test_names_are_imported_as_people_do(name):
    namespace = {}
    exec(f"from hf_compat.{name} import {IMPORTS[name]}", namespace)
    assert {one.strip() for one in IMPORTS[name].split(",")} <= set(namespace)


@pytest.mark.parametrize("module", ["integrations", "integrations.integration_utils"])
def test_callbacks_are_imported_from_where_transformers_has_them(module):
    namespace = {}
    exec(f"from hf_compat.{module} import MLflowCallback, TensorBoardCallback, WandbCallback", namespace)
    assert namespace["TensorBoardCallback"] is hf_compat.TensorBoardCallback
    assert namespace["MLflowCallback"] is transformers.integrations.MLflowCallback


def test_one_class_under_all_names():
    from hf_compat.trainer_callback import TrainerCallback
    from hf_compat.trainer_utils import EvalPrediction
    from hf_compat.training_args import TrainingArguments

    assert TrainerCallback is hf_compat.TrainerCallback and EvalPrediction is hf_compat.EvalPrediction
    assert TrainingArguments is hf_compat.TrainingArguments


def test_a_name_that_nobody_has():
    with pytest.raises(ImportError, match="nonsense"):
        exec("from hf_compat.trainer_utils import nonsense")
    with pytest.raises(AttributeError, match="import it from transformers: `from transformers import AutoTokenizer`"):
        getattr(hf_compat, transformers.AutoTokenizer.__name__)


@pytest.mark.parametrize("first", ["", "import transformers\n"])
def test_an_import_of_what_is_transformers_says_where_it_is(first):
    code = first + "try: from hf_compat import Trainer, AutoTokenizer\nexcept ImportError as error: print(error)\n"
    code += "try: from hf_compat import nonsense\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known, unknown = done.stdout.splitlines()
    assert known.endswith("; import it from transformers: `from transformers import AutoTokenizer`")
    assert unknown == "cannot import name 'nonsense' from 'hf_compat'"


BREAKS = "raise AttributeError(\"module 'numpy' has no attribute 'bool8'\")\n"
LAZY = f"def __dir__(): return ['Known']\ndef __getattr__(name): {BREAKS}"
# What a package's `__getattr__` and those of the modules named as transformers' say of each name
IMPORTS_ALL = """
import hf_compat
from hf_compat.interop.mirrors import MIRRORS

OURS = [(f"hf_compat.{module}", name) for module, homes in MIRRORS.items() for name in homes]
OURS += [("hf_compat", name) for name in hf_compat.__all__]
THEIRS = [("hf_compat.trainer_utils", "anything"), ("hf_compat.integrations", "Known")]
failed = 0
for module, name in NAMES:
    try:
        exec(f"from {module} import {name}")
    except (ImportError, AttributeError) as error:
        text, root = str(error), error
        while root.__cause__ is not None:
            root = root.__cause__
        assert str(root) == "module 'numpy' has no attribute 'bool8'", (module, name, text)
        assert root is error or f" failed to load with AttributeError: {root}" in text, text
        failed += 1
assert not hasattr(hf_compat, "nope") and failed > ENOUGH, failed
"""


@pytest.mark.real_python
@pytest.mark.parametrize(
    ("names", "files"),
    [
        ("OURS", {"torch/__init__.py": BREAKS}),
        ("THEIRS", {"transformers/__init__.py": BREAKS}),
        (
            "THEIRS",
            {
                "transformers/__init__.py": "",
                "transformers/trainer_utils.py": BREAKS,
                "transformers/integrations.py": LAZY,
            },
        ),
    ],
    ids=["torch", "transformers", "a_module_of_transformers"],
)
def test_a_package_that_fails_to_load_is_told_with_its_cause(tmp_path, names, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).with_name("__init__.py").touch()
        (tmp_path / name).write_text(text)
    code = IMPORTS_ALL.replace("NAMES", names).replace("ENOUGH", "30" if names == "OURS" else "1")
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_a_misspelt_name_is_told_with_the_nearest_one():
    with pytest.raises(ImportError, match="'TrainingArgument' from 'hf_compat'; did you mean `TrainingArguments`"):
        exec("from hf_compat import TrainingArgument")


def test_ours_come_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\nfrom hf_compat.trainer_utils import BestRun, HPSearchBackend\n"
    )
    code += "import hf_compat.trainer_utils as u\ntry: u.FSDPOption\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'transformers>=" in done.stdout
