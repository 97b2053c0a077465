"""Configurations that change the model for a training: NEFTune's noise. `cases.py` says what a case is."""

from __future__ import annotations

import torch
import toy
from cases import EVAL, LM, SAVE, callback, case

# NEFTune -------------------------------------------------------------------------------------------------------------
NOISE = {"neftune_noise_alpha": 5.0, **EVAL}


def _forward_in_train_mode(trainer) -> torch.Tensor:
    """Return what the model gives in training mode: there is no noise any more."""
    torch.manual_seed(3)
    inputs = torch.arange(8).reshape(2, 4)
    return trainer.model.train()(input_ids=inputs).logits.detach()


def _train_again(trainer):
    embeddings = trainer.model.get_input_embeddings()
    names = [name for name in vars(embeddings) if "neftune" in name]
    found = [names, _forward_in_train_mode(trainer), trainer.evaluate()]
    trainer.neftune_noise_alpha = 2.0
    return [*found, trainer.train().training_loss, _forward_in_train_mode(trainer)]


def _evaluate_with(trainer):
    trainer.neftune_noise_alpha = 3
    return trainer.evaluate()


def lora(model=toy.tiny_gpt2):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def _lora_on_embeddings():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(toy.tiny_gpt2(), LoraConfig(r=2, target_modules=["wte"]))


def _stronger_noise(self, args, state, control, model=None, **kwargs):
    model.get_input_embeddings().neftune_noise_alpha = float(state.global_step)


case("neftune", {**NOISE, "gradient_accumulation_steps": 3}, **LM, after=_train_again)
case("neftune_of_nothing", {**NOISE, "neftune_noise_alpha": 0.0}, **LM)
case("neftune_bf16", {**NOISE, **SAVE, "bf16": True}, **LM)
case("neftune_set_on_the_trainer", {**EVAL}, **LM, before=_evaluate_with)
case("neftune_grows", {**NOISE}, **LM, extra=callback(on_step_begin=_stronger_noise))
case("neftune_lora", {**NOISE, **SAVE}, **{**LM, "model": lora})
case("neftune_lora_on_embeddings", {**NOISE}, **{**LM, "model": _lora_on_embeddings})
case(
    "neftune_model_init",
    {**NOISE},
    **{**LM, "model": None},
    extra=lambda api: {"model": None, "model_init": lambda: toy.tiny_gpt2()},
    after=_train_again,
)
