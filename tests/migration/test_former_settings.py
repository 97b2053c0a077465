"""Settings, members of tokenizers, caches, names of torch and NumPy: those that are told are gone."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import importlib
import inspect

import numpy
import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from helpers.migrated import today
from hf_compat.tools.migration.gone_names import FORMER_SETTINGS, GONE_OF_TORCH, REFUSED_SETTINGS, WITHOUT_EFFECT
from hf_compat.tools.migration.installed_names import installed_names
from hf_compat.tools.migration.python_source import rewrite_python
from hf_compat.tools.migration.report import Target

IS_4 = transformers.__version__.startswith("4.")
of_5 = pytest.mark.skipif(IS_4, reason="gone in 5.0")
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
HEAD = (
    "import torch\nimport numpy as np\nfrom torch.optim.lr_scheduler import *\n"
    "from transformers import AutoConfig, AutoModel, BertConfig, EncoderDecoderModel, LlamaConfig, Trainer\n"
)


def told(source, target=Target.HF_COMPAT):
    return [(one.what, one.effect.value) for one in rewrite_python(f"{HEAD}{source}\n", target).findings]


@of_5
@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(config.rope_theta)", ("config.rope_theta", "fails")),
        ("print(self.config.is_decoder)", ("self.config.is_decoder", "to look at")),
        ("print(model.config.torchscript)", ("model.config.torchscript", "to look at")),
        ("config.rope_theta = 5e5", ("config.rope_theta", "differs silently")),
        ('config.position_embedding_type = "relative_key"', ("config.position_embedding_type", "differs silently")),
        ('config.rope_scaling = {"type": "linear"}', ("config.rope_scaling", "fails")),
        ("AutoConfig.from_pretrained(x, rope_theta=3.0)", ("AutoConfig.from_pretrained(rope_theta=…)", "differs silently")),
        ("BertConfig(pruned_heads=heads)", ("BertConfig(pruned_heads=…)", "differs silently")),
        (
            "EncoderDecoderModel.from_encoder_decoder_pretrained(x, x, tie_encoder_decoder=True)",
            ("EncoderDecoderModel.from_encoder_decoder_pretrained(tie_encoder_decoder=…)", "differs silently"),
        ),
        ("AutoModel.from_pretrained(x, torchscript=True)", ("AutoModel.from_pretrained(torchscript=…)", "fails")),
        ("AutoModel.from_pretrained(x, max_length=9)", ("AutoModel.from_pretrained(max_length=…)", "fails")),
        ("print(tokenizer.max_len)", ("tokenizer.max_len", "fails")),
        ("print(self.tokenizer.encoder)", ("self.tokenizer.encoder", "to look at")),
        ("n = outputs.past_key_values[0][0].shape", ("outputs.past_key_values", "fails")),
        ("past_key_values = x.permute([2, 0]).split(2)", ("past_key_values", "fails")),
        ("loss = self.model(x, masked_lm_labels=y)", ("self.model(masked_lm_labels=…)", "fails")),
        # what is set first, asked for, another's, or as it is without it
        ("config.finetuning_task = 1\nprint(config.finetuning_task)", None),
        ('if hasattr(config, "rope_theta"):\n    print(config.rope_theta)', None),
        ("print(args.rope_theta)", None),
        ('config.rope_scaling = {"type": "linear", "rope_theta": 1e4}', None),
        ("config.rope_scaling = None", None),
        ("LlamaConfig(rope_theta=3.0)", None),
        ('BertConfig(position_embedding_type="absolute", pruned_heads={})', None),
        ("AutoConfig.from_pretrained(x, finetuning_task=task)", None),
        ("AutoModel.from_pretrained(x, num_labels=2)", None),
        ("print(args.max_len, block.encoder)", None),
        ("tokenizer.max_len = 9", None),
        ("print(self.past_key_values[0])", None),
        ("past_key_values = DynamicCache(x)\npast_key_values = x.split(2)", None),
        ("loss = own(x, masked_lm_labels=y)", None),
    ],
)  # fmt: skip
def test_what_is_told(source, expected, target):
    assert told(source, target) == ([expected] if expected else [])


@of_5
def test_a_former_setting_is_in_no_configuration_of_5_that_does_not_set_it():
    bare = transformers.PreTrainedConfig()
    assert [name for name in FORMER_SETTINGS if hasattr(bare, name)] == []


@of_5
def test_settings_without_effect_leave_weights_and_positions_as_they_are():
    llama = transformers.LlamaConfig(**SIZES)
    llama.rope_theta = 3.0
    frequencies = transformers.LlamaModel(llama).rotary_emb.inv_freq
    assert frequencies.equal(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).rotary_emb.inv_freq)
    given = {"position_embedding_type": "relative_key", "pruned_heads": {0: [1]}, "tie_encoder_decoder": True}
    assert {*given, "rope_theta"} == set(WITHOUT_EFFECT)
    shapes = [
        {name: one.shape for name, one in transformers.BertModel(config).state_dict().items()}
        for config in (transformers.BertConfig(**SIZES), transformers.BertConfig(**SIZES, **given))
    ]
    assert shapes[0] == shapes[1]
    llama = transformers.LlamaConfig(**SIZES)
    with pytest.warns(FutureWarning, match="rope_theta"):
        llama.rope_scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(TypeError, match="NoneType"):
        transformers.LlamaModel(llama)


@of_5
@pytest.mark.parametrize("name", sorted(REFUSED_SETTINGS))
def test_a_model_refuses_the_settings(name, tmp_path):
    config = transformers.BertConfig(**SIZES)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=name):
        transformers.BertModel.from_pretrained(tmp_path, **{name: 1})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._six import inf", "from torch._six import inf"),
        ("import torch._six", "import torch._six"),
        ("from torch.utils.data.dataset import T_co", "from torch.utils.data.dataset import T_co"),
        ("from torch.optim.optimizer import Optimizer, required", None),
        ("from torch.optim.lr_scheduler import SAVE_STATE_WARNING", "from torch.optim.lr_scheduler import SAVE_STATE_WARNING"),
        ("torch.symeig(x)", "torch.symeig"),
        ("class S(torch.utils.data.Sampler):\n    def __init__(self, d):\n        super().__init__(d)", "super().__init__"),
        (
            "from torch.utils.data import Sampler as B\nclass S(B):\n    def __init__(self, d):\n        B.__init__(self, d)",
            "B.__init__",
        ),
        (
            "from torch.optim.lr_scheduler import LRScheduler\nclass S(LRScheduler):\n    def __init__(self, o, n, verbose):\n"
            "        super(S, self).__init__(o, n, verbose)",
            "super(S, self).__init__",
        ),
        ("x.masked_fill_(mask.byte(), 0)", "x.masked_fill_"),
        ("torch.stft(x, 16)", "stft"),
        ("y = np.float(x)", "np.float"),
        ("y = np.Inf", "np.Inf"),
        ("from numpy import product", "from numpy import product"),
        ("try:\n    from torch._six import inf\nexcept ImportError:\n    inf = 0", None),
        ("class S(torch.utils.data.Sampler):\n    def __init__(self, d):\n        super().__init__()", None),
        ("class S(torch.utils.data.RandomSampler):\n    def __init__(self, d):\n        super().__init__(d)", None),
        ("x.masked_fill_(mask == 0, 0)\nx.masked_fill(mask, 0)", None),
        ("torch.stft(x, 16, return_complex=True)", None),
        ("torch.stft(x, **settings)", None),
        ("torch.stft(*given)", None),
        ("class S(torch.utils.data.Sampler):\n    def __init__(self, *a):\n        super().__init__(*a)", None),
        ("class S(torch.optim.lr_scheduler.LRScheduler):\n    def __init__(self, o):\n        super().__init__(o, 0)", None),
        ("y = np.inf, np.random.choice(x), torch.linalg.eigh(x)", None),
    ],
)  # fmt: skip
def test_what_torch_and_numpy_dropped_is_told(source, expected):
    assert told(source) == ([(expected, "fails")] if expected else [])


@pytest.mark.parametrize("path", sorted(GONE_OF_TORCH))
def test_a_name_of_torch_is_gone_or_raises(path):
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        with pytest.raises(ImportError):
            importlib.import_module(path)
    else:
        with pytest.raises(RuntimeError, match="is now removed"):
            found(
                *[torch.eye(2)]
                * len([one for one in inspect.signature(found).parameters.values() if one.default is one.empty])
            )


def test_verbose_is_taken_out_of_schedulers_which_refuse_it():
    kinds = [
        kind
        for kind in vars(lr_scheduler).values()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    ]
    assert len(kinds) > 12 and all("verbose" not in inspect.signature(kind).parameters for kind in kinds)
    head = "from torch.optim import lr_scheduler\nfrom transformers import set_seed as s\n"
    for kind in kinds:
        source = f"{head}l = lr_scheduler.{kind.__name__}(o, 0.9, verbose=True)\n"
        [mended] = rewrite_python(source, Target.HF_COMPAT).mended
        assert mended.effect.value == "fails" and today(source).endswith("(o, 0.9)\n")
    assert "verbose" in today(f"{head}l = own.StepLR(o, verbose=True)\n")


def test_names_that_numpy_takes_from_compiled_modules_and_loops_are_found():
    names = installed_names("numpy")
    assert all(names.can_import(f"numpy.random.{one}") for one in dir(numpy.random) if not one.startswith("_"))
    assert not names.can_import("numpy.testing.nobody_has_this")
