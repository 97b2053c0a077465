"""Models whose files hold other names, or other tensors, than the model itself does: GPT-NeoX, mixtures of experts."""

import lightning
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments
from hf_compat.interop.transformers_models import as_held

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGS = {
    "a head of another name": GPTNeoXConfig(**SIZES),
    "experts in one tensor": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2),
}
MODELS = {GPTNeoXConfig: GPTNeoXForCausalLM, MixtralConfig: MixtralForCausalLM}
kinds = pytest.mark.parametrize("kind", CONFIGS)


class OfTheUser(MixtralForCausalLM):
    def __init__(self, config, words):
        super().__init__(config)
        self.scores = torch.nn.Linear(config.hidden_size, words)


def make(config):
    torch.manual_seed(0)
    return MODELS[type(config)](config)


def train(folder, config, resume=None, **arguments):
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(8, 4).repeat(4, 1)]
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, **arguments}
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    trainer = Trainer(make(config), args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@kinds
def test_a_resumed_run_is_the_whole_run(kind, tmp_path, caplog):
    whole = train(tmp_path, CONFIGS[kind])
    resumed = train(tmp_path, CONFIGS[kind], resume=str(tmp_path / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    assert "issing key" not in caplog.text and "nexpected key" not in caplog.text


@kinds
def test_the_best_model_is_loaded_whole(kind, tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = train(tmp_path, CONFIGS[kind], metric_for_best_model="eval_loss", **best)
    scores = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert trainer.state.best_model_checkpoint.endswith(f"-{max(scores, key=scores.get)}") and scores[2] > scores[4]
    assert trainer.evaluate()["eval_loss"] == scores[2]


@kinds
def test_a_lightning_trainer_of_ones_own_reads_the_folder_whole(kind, tmp_path, caplog):
    trained = train(tmp_path, CONFIGS[kind], max_steps=2)
    module = HFModule(make(CONFIGS[kind]), trained.args)
    data = HFDataModule(trained.args, None, trained.eval_dataset)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(module, data, ckpt_path=str(tmp_path / "checkpoint-2"), verbose=False)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], tensor), name
    assert "issing key" not in caplog.text


def test_loading_draws_no_random_numbers_and_leaves_what_is_missing_alone():
    model = make(CONFIGS["a head of another name"])
    files = {name.replace("lm_head", "embed_out"): tensor for name, tensor in model.state_dict().items()}
    gone = next(name for name in files if name.endswith("dense.weight"))
    del files[gone]
    state = torch.get_rng_state()
    held = as_held(model, {**files, "of_another_model": torch.zeros(1)})
    assert torch.equal(torch.get_rng_state(), state)
    assert set(held) == set(model.state_dict()) - {gone} | {"of_another_model"}


def test_a_users_class_is_read_by_the_class_it_comes_from(tmp_path):
    model = OfTheUser(CONFIGS["experts in one tensor"], words=3)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    own = model.state_dict()
    assert files.keys() != own.keys()
    held = as_held(model, files)
    assert held.keys() == own.keys() and all(torch.equal(held[name], own[name]) for name in own)


def test_weights_under_their_own_names_are_as_they_are():
    model = make(CONFIGS["experts in one tensor"])
    weights = model.state_dict()
    assert as_held(model, weights) is weights
