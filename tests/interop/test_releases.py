"""Beside older releases of transformers: what they lack is not asked for.

`tests/sweeps/releases/matrix.py` runs the real ones.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.errors import ArgumentError, InertArgumentWarning
from hf_compat.interop import releases, transformers_models

STAND_IN = Path(__file__).resolve().parents[1] / "sweeps" / "releases" / "beside_older.py"


def test_trains_beside_what_a_release_of_2024_has(tmp_path):
    """The names of 5.23 that 4.46 has not are hidden: models, tokenizers, callbacks, arguments and `patch()` work."""
    done = subprocess.run(
        [sys.executable, str(STAND_IN), "4.46", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "trained 4" in done.stdout, done.stderr[-3000:]


@pytest.fixture
def older(monkeypatch):
    assert transformers.Trainer is not None  # loaded before names are taken away
    for name in ("validate_quantization_for_training", "align_special_tokens"):
        monkeypatch.delattr(f"transformers.trainer_utils.{name}")


@pytest.mark.parametrize(
    ("quantizer", "complaint"),
    [
        (None, "has no adapters"),
        (SimpleNamespace(is_qat_trainable=True, is_trainable=False), "cannot be trained"),
    ],
)
def test_a_quantized_model_is_refused_under_an_older_release_too(older, quantizer, complaint):
    model = toy.Classifier()
    releases.check_quantization(model)
    model.is_quantized, model.hf_quantizer = True, quantizer
    with pytest.raises(ValueError, match=complaint):
        releases.check_quantization(model)
    model._hf_peft_config_loaded = True
    releases.check_quantization(model)


def test_tokens_are_aligned_as_the_release_does(older, monkeypatch):
    model, tokenizer = toy.tiny_gpt2(), toy.tiny_tokenizer()
    transformers_models.align_special_tokens(model, tokenizer)
    assert model.config.pad_token_id is None, "4.46 leaves a configuration alone"

    def of_4_57(trainer):
        trainer.model.config.pad_token_id = trainer.processing_class.pad_token_id

    monkeypatch.setattr(transformers.Trainer, "_align_special_tokens", of_4_57, raising=False)
    transformers_models.align_special_tokens(model, tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0


def test_only_models_that_say_so_get_the_items_of_an_update_under_4_46(monkeypatch, tmp_path):
    class Counting(type(toy.tiny_gpt2())):
        def forward(self, input_ids=None, labels=None, **loss_kwargs):
            return super().forward(input_ids, labels=labels, **loss_kwargs)

    def accepts(model):
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        return Trainer(model, args, train_dataset=toy.blocks(4)).model_accepts_loss_kwargs

    other, counting = toy.tiny_gpt2(), Counting(toy.tiny_gpt2().config)
    assert accepts(other) and accepts(counting)
    monkeypatch.delattr("transformers.utils.TransformersKwargs")
    assert not accepts(other) and accepts(counting)


@pytest.mark.filterwarnings("ignore")  # classes of other tests in this process are made from the originals
@pytest.mark.parametrize(("module", "name"), [("trainer", "Trainer"), ("trainer_seq2seq", "Seq2SeqTrainer")])
def test_transformers_own_trainers_are_found_behind_ours(module, name):
    theirs = releases.of_installed(module, name)
    assert theirs is getattr(transformers, name)
    hf_compat.patch()
    try:
        assert getattr(transformers, name) is getattr(hf_compat, name)
        assert releases.of_installed(module, name) is releases.of_transformers(module, name, "a test") is theirs
    finally:
        hf_compat.unpatch()


@dataclass
class OfARelease(transformers.TrainingArguments):
    """What transformers 4.57 has besides: fields that are old names today. 4.46 has no default folder."""

    output_dir: str = field()
    no_cuda: bool = False
    group_by_length: bool = False
    warmup_ratio: float = 0.0
    include_inputs_for_metrics: bool = False
    save_safetensors: bool | None = True


OfARelease.__name__, OfARelease.__module__ = "TrainingArguments", "transformers.training_args"


def test_fields_of_an_older_release_do_their_work_and_defaults_ask_for_nothing(tmp_path):
    args = OfARelease(str(tmp_path), use_cpu=True, report_to="none", group_by_length=True, warmup_ratio=0.2)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
    assert trainer.args is args and args.use_cpu is True, "`no_cuda=False` is no answer to `use_cpu=True`"
    assert args.train_sampling_strategy == "group_by_length" and args.warmup_steps == 0.2
    assert args.group_by_length is True and args.warmup_ratio == 0.2 and args.no_cuda is True
    args.group_by_length = False
    assert args.train_sampling_strategy == "random" and args.group_by_length is False
    args.include_inputs_for_metrics = True
    assert args.include_for_metrics == ["inputs"]
    again = copy.deepcopy(args)
    assert again.warmup_ratio == 0.2 and again.group_by_length is False and again.use_cpu is True


def test_an_old_field_without_effect_is_warned_about(tmp_path):
    args = OfARelease(str(tmp_path), use_cpu=True, report_to="none", save_safetensors=False, warmup_steps=3)
    args.warmup_ratio = 0.2  # beside a count of updates, which wins
    with pytest.warns(InertArgumentWarning, match="save_safetensors=False"):
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(8))
    assert args.warmup_steps == 3


def test_a_module_that_a_release_has_made_without_a_spec_is_there(monkeypatch):
    """As `transformers.tokenization_utils` of 5.0, which keeps the name for the module that took its place."""
    monkeypatch.setitem(sys.modules, "transformers.of_a_former_name", types.ModuleType("transformers.of_a_former_name"))
    monkeypatch.setitem(sys.modules, "transformers.gone", None)
    there = releases.modules_there(("transformers.of_a_former_name", "transformers.gone", "transformers.nowhere"))
    assert [module.__name__ for module in there] == ["transformers.of_a_former_name"]


TOO_OLD = """
from pathlib import Path
import sys
package = Path(sys.argv[1]) / "transformers"
package.mkdir()
(package / "__init__.py").write_text("__version__ = '4.1.0'\\n__all__ = []\\n")
for module in ("trainer", "training_args", "integrations"):  # `integrations` became a folder later
    (package / f"{module}.py").write_text("class Trainer: pass\\n" if module == "trainer" else "")
sys.path.insert(0, sys.argv[1])
import hf_compat
hf_compat.patch()
"""


def test_a_release_without_what_is_needed_says_which_one_has_it(tmp_path):
    """A stand-in for an ancient release: one error, which names the release, what it lacks, and the way out."""
    done = subprocess.run([sys.executable, "-c", TOO_OLD, str(tmp_path)], capture_output=True, text=True, check=False)
    said = done.stderr.partition("MissingPackage: ")[2]
    assert "patch()` needs TrainingArguments, " in said and "4.1.0" in said, done.stderr[-2000:]
    assert "Releases 4.40.2 to 5.24 were run" in said and "pip install 'transformers>=4.40.2'" in said


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch, when its compiler is loaded
@pytest.mark.parametrize("release", ["today", "older"])
def test_a_compiled_quantized_model_is_refused_and_one_with_adapters_is_not(request, release, make_args):
    from peft import LoraConfig, get_peft_model

    if release == "older":
        request.getfixturevalue("older")
    model = toy.tiny_gpt2()
    model.is_quantized, model.hf_quantizer = True, SimpleNamespace(is_trainable=True)
    args = make_args()
    with pytest.raises(ValueError, match="adapters"):
        Trainer(model, args)
    adapted = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert Trainer(adapted, args).model is adapted
    with pytest.raises(ValueError, match="compile"):
        Trainer(torch.compile(adapted), args)


ABLE = {"is_trainable": True, "is_qat_trainable": False}
METHOD = SimpleNamespace(quant_method="of-a-kind")


@pytest.mark.parametrize(
    ("facts", "has_adapters", "said"),
    [
        ({}, False, ""),
        ({"is_quantized": True}, True, "quantized by its method"),
        ({"is_quantized": True, "hf_quantizer": ABLE}, True, ""),
        ({"is_quantized": True, "hf_quantizer": ABLE}, False, "has no adapters"),
        ({"is_quantized": True, "hf_quantizer": {}}, False, "has no adapters"),
        ({"is_quantized": True, "hf_quantizer": ABLE | {"is_qat_trainable": True}}, False, ""),
        ({"is_quantized": True, "hf_quantizer": {"is_qat_trainable": True}}, False, "quantized by its method"),
        ({"is_quantized": True, "hf_quantizer": {"quantization_config": METHOD}}, True, "by of-a-kind, which cannot"),
        ({"is_quantized": True, "hf_quantizer": ABLE, "_orig_mod": 1}, True, "quantized and compiled"),
        ({"is_quantized": True, "_hf_peft_config_loaded": True, "_orig_mod": 1}, False, ""),
        ({"is_quantized": False, "_orig_mod": 1}, False, ""),
    ],
)
def test_which_quantized_models_an_older_release_trains(monkeypatch, facts, has_adapters, said):
    monkeypatch.setattr(releases, "of_installed", lambda module, name: None)
    quantizer = facts.get("hf_quantizer")
    model = SimpleNamespace(**facts | ({} if quantizer is None else {"hf_quantizer": SimpleNamespace(**quantizer)}))
    with pytest.raises(ArgumentError, match=f"`model` is .*{said}") if said else contextlib.nullcontext():
        releases.check_quantization(model, has_adapters)


def test_the_release_itself_judges_a_quantized_model(monkeypatch):
    judged = []
    monkeypatch.setattr(releases, "of_installed", lambda module, name: judged.append)
    model = SimpleNamespace(is_quantized=True)
    releases.check_quantization(model)
    assert judged == [model]


@pytest.mark.parametrize(
    ("release", "values", "hints", "differ"),
    [
        ("5.23", {}, {}, {}),
        ("5.1", {"learning_rate": 0.5}, {}, {"learning_rate": 0.5}),
        ("5.1", {"learning_rate": "0.5"}, {}, {"learning_rate": 0.5}),
        ("5.1", {"learning_rate": "fast"}, {}, {}),  # another form of a value
        ("5.1", {"learning_rate": 5e-5, "unknown": 3}, {}, {}),  # ours, and an argument that we lack
        ("5.1", {"learning_rate": dataclasses.MISSING}, {}, {}),
        ("5.1", {"gradient_checkpointing": False}, {}, {}),
        ("5.1", {"fsdp": None}, {"fsdp": "list[str] | None"}, {"fsdp": []}),
        ("5.1", {"fsdp": None, "other": None}, {"fsdp": "bool | None", "other": "list"}, {}),
        ("4.57", {"report_to": None}, {}, {"report_to": "all", "trackio_space_id": "trackio", "use_cache": None}),
        ("4.46", {"report_to": "tensorboard"}, {}, {"report_to": "tensorboard", "trackio_space_id": "trackio"}),
        ("3.5", {}, {}, {}),
    ],
)
def test_defaults_of_a_release_that_differ_from_ours(monkeypatch, release, values, hints, differ):
    fields = [
        SimpleNamespace(name=name, default=value, type=hints.get(name, "object")) for name, value in values.items()
    ]
    stand_in = SimpleNamespace(fields=lambda kind: fields, MISSING=dataclasses.MISSING)
    monkeypatch.setattr(releases, "dataclasses", stand_in)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", release)
    found = releases.replaced_release(object)
    if release == "4.46":
        found.defaults.pop("use_cache")
    assert found.release == release and found.defaults == differ and [*found.defaults] == sorted(found.defaults)


@pytest.mark.parametrize(
    ("missing", "is_raised"),
    [("transformers", False), ("transformers.integrations", False), ("numpy_of_old", True)],
)
def test_a_module_that_a_release_lacks_is_left_out(monkeypatch, missing, is_raised):
    def find_spec(name):
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(releases.importlib.util, "find_spec", find_spec)
    with pytest.raises(ModuleNotFoundError) if is_raised else contextlib.nullcontext():
        assert releases.modules_there(("transformers.no_such_module",)) == []


@pytest.mark.parametrize(
    ("has_tokens", "has_config", "releases_way", "aligned"),
    [
        (True, True, "function", "function"),
        (True, True, "method", "method"),
        (True, True, "neither", None),
        (False, True, "function", None),
        (True, False, "function", None),
    ],
)
def test_special_tokens_are_aligned_by_the_release(monkeypatch, has_tokens, has_config, releases_way, aligned):
    done = []
    trainer = SimpleNamespace(
        _align_special_tokens=lambda own: done.append(("method", own.model, own.processing_class))
    )  # fmt: skip
    found = {
        "align_special_tokens": (lambda *given: done.append(("function", *given)))
        if releases_way == "function"
        else None,
        "Trainer": SimpleNamespace() if releases_way == "neither" else trainer,
    }
    monkeypatch.setattr(transformers_models, "of_installed", lambda module, name: found[name])
    monkeypatch.setattr(transformers_models, "_has_tokens", lambda one: has_tokens)
    model = SimpleNamespace(config=1) if has_config else SimpleNamespace()
    transformers_models.align_special_tokens(model, "tokenizer")
    assert done == ([] if aligned is None else [(aligned, model, "tokenizer")])


@pytest.mark.parametrize(
    ("generic", "name"),
    [
        (None, "past_key_values"),
        (SimpleNamespace(), "past_key_values"),
        (SimpleNamespace(ModelOutput=dict), "past_key_values"),
        (SimpleNamespace(ModelOutput=SimpleNamespace(cache_params=None)), "cache"),
    ],
    ids=["not loaded", "without outputs", "until 5.23", "since 5.24"],
)
def test_the_cache_has_the_name_of_the_installed_release(monkeypatch, generic, name):
    monkeypatch.setitem(sys.modules, "transformers.utils.generic", generic)
    assert releases.name_of_cache() == name
