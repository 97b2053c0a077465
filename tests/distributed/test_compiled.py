"""`torch_compile` under FSDP 2 and ZeRO 2: the same losses as without, on two CPU processes."""

from __future__ import annotations

import json

import pytest

from helpers.launching import result, series

WORDS = ("model=plain", "samples=32", "num_train_epochs=1", "save_strategy=no")
COMPILED = ("torch_compile=True", "torch_compile_backend=eager")
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_losses_are_those_of_the_plain_model(tmp_path, strategy):
    config = tmp_path / "zero.json"
    config.write_text(json.dumps(ZERO))
    words = {
        "fsdp": ["fsdp=True"],
        "deepspeed": [f"deepspeed={config}"],
    }[strategy]
    plain = result(tmp_path / "plain", *WORDS, *words)
    compiled = result(tmp_path / "compiled", *WORDS, *words, *COMPILED)
    assert series(compiled, "loss") == pytest.approx(series(plain, "loss"), abs=1e-6)
    assert len(series(plain, "loss")) == 4
