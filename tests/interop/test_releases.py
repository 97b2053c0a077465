"""Beside older releases of transformers: what they lack is not asked for. `tests/matrix.py` runs the real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy
import transformers

from hf_compat.interop import releases

STAND_IN = Path(__file__).resolve().parents[1] / "releases" / "beside_older.py"


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
    releases.align_tokens(model, tokenizer)
    assert model.config.pad_token_id is None, "4.46 leaves a configuration alone"

    def of_4_57(trainer):
        trainer.model.config.pad_token_id = trainer.processing_class.pad_token_id

    monkeypatch.setattr(transformers.Trainer, "_align_special_tokens", of_4_57, raising=False)
    releases.align_tokens(model, tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0


def test_a_warning_of_an_older_release_refuses_a_generation_config():
    class OfAnOlderRelease(transformers.GenerationConfig):
        def validate(self, is_init=False):
            return transformers.GenerationConfig.validate(self)

    config = OfAnOlderRelease(num_beams=1)
    releases.validate_strictly(config)
    config.num_return_sequences = 4
    with pytest.raises(ValueError, match="num_return_sequences"):
        releases.validate_strictly(config)
