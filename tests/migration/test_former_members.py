"""What models, tokenizers and trainers of 4.x had and took: told, or written as transformers 5 has it."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
from pathlib import Path

import pytest

import hf_compat.tools.migration.names as names_of_today
from helpers.migrated import left, today
from hf_compat.interop.former_names import REFUSED_OVERRIDES
from hf_compat.tools.migration.imports import NEIGHBOURS
from hf_compat.tools.migration.installed_names import InstalledNames, installed_names
from hf_compat.tools.migration.migrate import migrate
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Effect, Target

TARGETS = list(Target)
_BY_PLACE_OR_NAME, _BY_NAME, _ANY_NAME = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD,
)  # fmt: skip
HEAD = "from transformers import AutoModel, AutoTokenizer, BertPreTrainedModel, Trainer\n"
ATTRIBUTES = Path(__file__).parents[1] / "sweeps" / "releases" / "attributes.json"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("with tokenizer.as_target_tokenizer(): pass", "tokenizer.as_target_tokenizer"),
        ("ids = self.tokenizer.encode_plus('a')", "self.tokenizer.encode_plus"),
        ("class M(BertPreTrainedModel):\n    def f(self, m):\n        return self.get_head_mask(m, 2)", "self.get_head_mask"),
        ("model.parallelize()", "model.parallelize"),
        ("model.freeze_feature_extractor()", "model.freeze_feature_extractor"),
        ("cache = DynamicCache.from_legacy_cache(past)", "DynamicCache.from_legacy_cache"),
        ("model.config.max_length = 10", "model.config.max_length"),
        ("print(self.model.config.num_beams)", "self.model.config.num_beams"),
        ("m = AutoModel.from_pretrained('x', load_in_8bit=True)", "AutoModel.from_pretrained(load_in_8bit=…)"),
        ("m = AutoModel.from_pretrained('x', gradient_checkpointing=True)", "AutoModel.from_pretrained(gradient_checkpointing=…)"),
        ("m = AutoModel.from_pretrained('x', use_flash_attention_2=flash)", "AutoModel.from_pretrained(use_flash_attention_2=…)"),
        ("from datasets import load_metric", "from datasets import load_metric"),
        ("from accelerate.no_such import x", "from accelerate.no_such import x"),
        # what is another's, what is asked for first, what is put there
        ("spark.parallelize([1])", None),
        ("processor.freeze_feature_extractor()", None),
        ("if model_args.freeze_feature_extractor: pass", None),
        ("class W:\n    def freeze_feature_extractor(self): ...\nmodel = W()\nmodel.freeze_feature_extractor()", None),
        ("if hasattr(tokenizer, 'as_target_tokenizer'):\n    tokenizer.as_target_tokenizer()", None),
        ("class W:\n    def encode_plus(self): ...\nW().encode_plus()", None),
        ("tokenizer.additional_special_tokens = ['a']", None),
        ("model.config.forced_bos_token_id = None", None),
        ("model.generation_config.max_length = 10", None),
        ("args.config.max_length = 10", None),
        ("m = Own.from_pretrained('x', load_in_8bit=True)", None),
        ("m = AutoModel.from_pretrained('x', torch_dtype='auto', cache_dir=None)", None),
        ("try:\n    from datasets import load_metric\nexcept ImportError:\n    load_metric = None", None),
        ("import typing\nif typing.TYPE_CHECKING:\n    from datasets import load_metric", None),
        ("from typing import TYPE_CHECKING as T\nif T:\n    from datasets import load_metric", None),
        ("if not TYPE_CHECKING:\n    from datasets import load_metric", "from datasets import load_metric"),
        ("from datasets import Dataset, load_dataset", None),
    ],
)  # fmt: skip
def test_what_is_told(source, expected, target):
    line = source.count("\n", 0, max(source.find((expected or "").partition("(")[0]), 0)) + 2
    assert left(f"{HEAD}{source}\n", target) == ([(line, expected)] if expected else [])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'x', use_auth_token=True if a else None, revision=b", "'x', token=True if a else None, revision=b"),
        ("'x', use_auth_token=a, token=b", "'x', use_auth_token=a, token=b"),
        ("'x', resume_download=True", "'x'"),
        ("'x', load_in_4bit=False, use_flash_attention_2=True", "'x', attn_implementation=\"flash_attention_2\""),
    ],
)
def test_what_is_written(old, new, target):
    for owner in ("AutoModel", "Mine"):
        made = f"{HEAD}class Mine(BertPreTrainedModel): ...\nm = {owner}.from_pretrained"
        result = today(f"{made}({old})\n", target)
        assert result.endswith(f"from_pretrained({new})\n")


def test_a_release_of_4_has_all_of_it(tmp_path, monkeypatch):
    root = tmp_path / "transformers"
    root.mkdir()
    (root / "__init__.py").write_text('__version__ = "4.46.3"\n_import_structure = {"x": ["AutoModel", "Trainer"]}\n')
    monkeypatch.setattr(names_of_today, "installed_names", lambda package: InstalledNames(root))
    script = tmp_path / "script.py"
    lines = (
        "tokenizer.encode_plus(1)",
        "model.config.max_length = 1",
        "AutoModel.from_pretrained('x', load_in_8bit=1)",
    )
    script.write_text("from transformers import AutoModel\n" + "\n".join(lines) + "\n")
    (under_run,) = migrate([str(script)]).files
    (in_5,) = migrate([str(script)], Target.TRANSFORMERS_5).files
    assert under_run.by_gravity == [] and [one.line for one in in_5.by_gravity] == [2, 3, 4]


def gone_from_trainers():
    """Return the names that an instance of 4.x's Trainer has, and one of 5.23's has not."""
    rows = json.loads(ATTRIBUTES.read_text())["Trainer"]
    return [name for name, row in rows.items() if any(one.startswith("4") for one in row) and "5.23" not in row]


def test_each_name_that_trainers_of_4_had_is_told():
    names = gone_from_trainers()
    assert len(names) > 20
    for name in names:
        source = f"{HEAD}class T(Trainer):\n    def f(self):\n        return self.{name}\n"
        is_told = left(source, Target.TRANSFORMERS_5) == [(4, f"self.{name}")]
        assert is_told or f"self.{name}" not in today(source, Target.TRANSFORMERS_5), name


def test_overrides_that_nothing_calls(tmp_path):
    def verdicts(*names, rest="", target=Target.HF_COMPAT):
        body = "".join(f"    def {name}(self, *args): ...\n" for name in names)
        (tmp_path / "script.py").write_text(f"{HEAD}class T(Trainer):\n{body}{rest}")
        (script,) = migrate([str(tmp_path / "script.py")], target).files
        return {one.what.removeprefix("T."): one.effect.value for one in script.by_gravity}

    assert verdicts(*REFUSED_OVERRIDES) == dict.fromkeys(REFUSED_OVERRIDES, "fails")
    former = ("ipex_optimize_model", "_gather_and_numpify", "prediction_loop")
    for target in Target:
        assert verdicts(*former, target=target) == dict.fromkeys(former, "differs silently")
    called = (
        "    def evaluate(self, *args, **kwargs):\n        return self.prediction_loop(self._rotate_checkpoints())\n"
    )
    rotation = ("_rotate_checkpoints", "_sorted_checkpoints")
    assert verdicts("prediction_loop", rest=called) == {} == verdicts(*rotation)  # called here, as 4.57 does
    assert verdicts(*rotation, target=Target.TRANSFORMERS_5) == dict.fromkeys(rotation, "differs silently")


def test_a_name_without_machinery_here_is_told():
    source = (
        f"{HEAD}class T(Trainer):\n    def f(self):\n        self._save_tpu()\n        return self._nested_gather(1)\n"
    )
    assert left(source) == [(4, "self._save_tpu")]
    assert left(source, Target.TRANSFORMERS_5) == [(4, "self._save_tpu"), (5, "self._nested_gather")]


@pytest.mark.parametrize("package", NEIGHBOURS)
def test_no_name_of_a_neighbour_is_taken_for_absent(package):
    """All that a package really has at its top level is found in its sources."""
    names = installed_names(package)
    if names is None:
        assert package == "evaluate"  # no test needs it
        return
    module = importlib.import_module(package)
    expired = importlib.import_module("numpy._expired_attrs_2_0").__expired_attributes__
    put_back = expired if package == "numpy" else {}  # torchmetrics sets `numpy.Inf`
    listed = {*dir(module), *getattr(module, "__all__", ())} - put_back.keys()
    there = sorted(name for name in listed if not name.startswith("_"))
    assert len(there) > 15 and [name for name in there if not names.has(f"{package}.{name}")] == []


@pytest.mark.parametrize("package", NEIGHBOURS)
def test_no_keyword_that_a_neighbour_takes_is_told(package):
    names = installed_names(package)
    if names is None:
        assert package == "evaluate"
        return
    module = importlib.import_module(package)
    makers = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    wrong, read = [], 0
    for name, maker in makers.items():
        known = names.keywords_of(f"{package}.{name}") if inspect.isclass(maker) or inspect.isfunction(maker) else None
        if known is not None:
            read += 1
            taken = inspect.signature(maker).parameters.values()
            named = {
                one.name
                for one in taken
                if one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
            }
            wrong += [name] if named - known else []
    assert wrong == [] and read >= 5


@pytest.mark.parametrize(
    ("line", "told"),
    [
        *(
            (f"from accelerate import Accelerator\nAccelerator({one}=1)", [f"Accelerator({one}=…)"])
            for one in ("dispatch_batches", "even_batches", "use_seedable_sampler", "logging_dir", "fp16")
        ),
        ("import accelerate as a\na.Accelerator(fp16=True, cpu=True)", ["Accelerator(fp16=…)"]),
        ("from accelerate import Accelerator\nAccelerator(split_batches=True, **options)", []),
        ("from trl import SFTTrainer\nSFTTrainer(tokenizer=t)", ["SFTTrainer(tokenizer=…)"]),
        ("from trl import SFTTrainer\nSFTTrainer(max_seq_length=9)", ["SFTTrainer(max_seq_length=…)"]),
        ("from datasets import load_dataset\nload_dataset('x', anything=1)", []),  # it takes any keyword
        ("from accelerate import Accelerator\ntry:\n    Accelerator(fp16=1)\nexcept TypeError:\n    pass", []),
        ("class Accelerator: pass\nAccelerator(fp16=True)", []),
        ("import numpy as np\nnp.log(x, out=y)\nnp.zeros(3, like=x)\nnp.equal(x, y, dtype=object)", []),  # C functions
    ],
)
def test_a_keyword_that_a_neighbour_refuses_fails(line, told):
    findings = rewrite_python(f"{HEAD}{line}\n", Target.HF_COMPAT).findings
    assert [one.what for one in findings if one.effect is Effect.FAILS] == told


@pytest.mark.parametrize("package", ["accelerate", "accelerate.utils", "datasets", "peft", "trl"])
def test_keywords_that_are_read_off_the_sources_are_those_of_the_objects(package):
    """A keyword is called refused where the sources lack it, so they must lack none that Python knows."""
    names, module = installed_names(package.partition(".")[0]), importlib.import_module(package)
    told = 0
    for name in dir(module):
        path = f"{package}.{name}"
        is_called = callable(getattr(module, name)) and names.has(path)
        known = names.keywords_of(path) if is_called else None
        if known is not None:
            kinds = {one.name: one.kind for one in inspect.signature(getattr(module, name)).parameters.values()}
            real = {one for one, kind in kinds.items() if kind in (_BY_PLACE_OR_NAME, _BY_NAME)}
            assert real <= known and _ANY_NAME not in kinds.values(), path
            told += 1
    assert told > 10


def test_the_way_out_of_a_refused_keyword_is_told():
    line = "from accelerate import Accelerator\nAccelerator(even_batches=False, nonsense=1)\n"
    one, other = rewrite_python(f"{HEAD}{line}", Target.HF_COMPAT).findings
    start = f"accelerate {importlib.metadata.version('accelerate')} has no such keyword"
    assert one.reason == f"{start}: `dataloader_config=DataLoaderConfiguration(even_batches=…)`"
    assert other.reason == start


@pytest.mark.parametrize(
    ("line", "way_out"),
    [
        ("from trl import ORPOTrainer", "it is trl.experimental.orpo.ORPOTrainer today"),
        ("from trl import DataCollatorForCompletionOnlyLM", "`SFTConfig(completion_only_loss=True)`"),
        ("from trl.trainer import ConstantLengthDataset", "`SFTConfig(packing=True)`"),
        ("from peft import prepare_model_for_int8_training", "`prepare_model_for_kbit_training`"),
        ("from trl import NobodyHasThis", None),
    ],
)
def test_a_gone_name_of_a_neighbour_is_told_with_its_release_and_where_it_is(line, way_out):
    package = line.split()[1].partition(".")[0]
    [finding] = rewrite_python(f"{HEAD}{line}\n", Target.HF_COMPAT).findings
    start = f"{package} {importlib.metadata.version(package)} has no such name"
    assert finding.reason.startswith(f"{start}: {way_out}") if way_out else finding.reason == start


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ("ids = [] + tokenizer.apply_chat_template(rows)", True),
        ("ids = self.tok.apply_chat_template(rows, add_generation_prompt=True)\nprint(len(ids))", True),
        ("text = tokenizer.apply_chat_template(rows, tokenize=False)", False),
        ("text = tokenizer.apply_chat_template(rows, **options)", False),
        ("ids = tokenizer.apply_chat_template(rows, return_dict=False)", False),
        ("ids = tokenizer.apply_chat_template(rows)['input_ids']", False),
        ("taken = tokenizer.apply_chat_template(rows)\nids = taken.input_ids", False),
        ("taken = tokenizer.apply_chat_template(rows)\nmodel.generate(**taken)", False),
        ("text = processor.apply_chat_template(rows)", False),
    ],
)
def test_a_chat_template_gives_a_dict_in_5(source, is_told, target):
    """`PreTrainedTokenizerBase.apply_chat_template`: `return_dict` is True since 5.0, and was False."""
    told = [spot.what for spot in rewrite_python(HEAD + source + "\n", target).findings]
    assert told == ([source.split("= ")[1].split("(")[0].removeprefix("[] + ")] if is_told else [])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ('path = os.path.join(state.best_model_checkpoint, "adapter_model.bin")\nweights = torch.load(path)', True),
        ('model.load_state_dict(torch.load(f"{folder}/pytorch_model.bin", map_location="cpu"))', True),
        ("from peft.utils import WEIGHTS_NAME as NAME\npath = os.path.join(f, NAME)\ntorch.load(path)", True),
        ("from transformers.utils import WEIGHTS_NAME\ntorch.load(os.path.join(f, WEIGHTS_NAME))", True),
        ('torch.load(os.path.join(folder, "optimizer.pt"))', False),
        ('path = folder / "adapter_model.bin"\nif path.exists():\n    torch.load(path)', False),
        ('path = f"{f}/pytorch_model.bin"\nif os.path.exists(path):\n    torch.load(path)', False),
        ('torch.save(weights, "adapter_model.bin")\ntorch.load("adapter_model.bin")', False),
    ],
)
def test_files_of_weights_that_nothing_writes_today_are_told(source, is_told, target):
    """A checkpoint has `model.safetensors` since 4.35, an adapter `adapter_model.safetensors` since PEFT 0.7."""
    told = [
        spot.what.partition(" of ")[0]
        for spot in rewrite_python(f"import os, torch\n{HEAD}{source}\n", target).findings
    ]
    assert told == (["torch.load"] if is_told else [])


@pytest.mark.parametrize(("file", "loads"), [("adapter_model.bin", False), ("pytorch_model.bin", True)])
@pytest.mark.parametrize("target", TARGETS)
def test_safe_serialization_has_no_effect_on_a_model_of_5(file, loads, target):
    """`PreTrainedModel.save_pretrained` of 5.0 writes safetensors whatever it says. PEFT's obeys."""
    source = f"import torch\n{HEAD}m.save_pretrained(f, safe_serialization=False)\ntorch.load(f'{{f}}/{file}')\n"
    told = [spot.what for spot in rewrite_python(source, target).findings]
    expected = ["save_pretrained(safe_serialization=False)", *([f"torch.load of {file}"] if loads else [])]
    assert told == expected


@pytest.mark.parametrize(
    ("value", "effect"),
    [
        ("model.config.max_length", "fails"),
        ("length if length is not None else model.config.max_length", "to look at"),
        ("length or model.config.max_length", "to look at"),
        ("1)\nif args.do_eval:\n    print(model.config.max_length", "fails"),
        ("1)\nif length is None:\n    print(model.config.max_length", "to look at"),
    ],
)
def test_a_fallback_to_a_setting_of_the_model_depends(value, effect):
    (found,) = rewrite_python(f"{HEAD}print({value})\n", Target.TRANSFORMERS_5).findings
    assert (found.what, found.effect.value) == ("model.config.max_length", effect)


def test_generation_settings_of_4_0_are_told():
    source = (
        "from transformers import Seq2SeqTrainer\nclass T(Seq2SeqTrainer):\n"
        "    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):\n"
        "        return None, model.generate(**inputs, max_length=self._max_length), None\n"
    )
    for target in Target:
        (found,) = rewrite_python(source, target).findings
        assert (found.what, found.effect.value) == ("self._max_length", "fails") and "_gen_kwargs" in found.reason


@pytest.mark.parametrize("name", ["_max_length", "scaler", "use_amp", "_nested_gather", "is_world_master"])
def test_an_attribute_that_a_class_sets_is_its_own(name):
    source = f"{HEAD}class T(Trainer):\n    def f(self):\n        self.{name} = 1\n        return self.{name}\n"
    for target in Target:
        assert left(source, target) == [] and f"return self.{name}" in today(source, target)


def test_names_in_a_module_of_a_neighbour_are_looked_up():
    source = f"""{HEAD}import datasets
import datasets as d
from datasets import Dataset

metric = d.load_metric("glue")
datasets.set_caching_enabled(False)
datasets.own = datasets.config.HF_DATASETS_OFFLINE
rows = [datasets.load_dataset("x"), Dataset.from_dict, datasets.Dataset.anything]
if hasattr(datasets, "use_cache"):
    datasets.use_cache()

def read(paths):
    datasets = []
    datasets.append(paths)
"""
    findings = rewrite_python(source, Target.HF_COMPAT).findings
    assert [(one.what, one.effect.value) for one in findings] == [
        ("d.load_metric", "fails"),
        ("datasets.set_caching_enabled", "fails"),
    ]
    assert "`evaluate.load`" in findings[0].reason
