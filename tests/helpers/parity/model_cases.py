"""Cases of models that change (noise, bfloat16, compiling), and of what accelerators gather; `cases.py` says more."""

from __future__ import annotations

import torch

from helpers import toy
from helpers.parity.cases import EVAL, LM, METRICS, SAVE, callback, case, subclass

# NEFTune -------------------------------------------------------------------------------------------------------------
NOISE = {"neftune_noise_alpha": 5.0, **EVAL}


def _forward_in_train_mode(trainer) -> torch.Tensor:
    """Return what the model gives in training mode: there is no noise any more."""
    torch.manual_seed(3)
    inputs = torch.arange(8, device=next(trainer.model.parameters()).device).reshape(2, 4)
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


MADE = {**LM, "model": None, "extra": lambda api: {"model": None, "model_init": lambda: toy.tiny_gpt2()}}


def evaluate_first(trainer):
    output = trainer.predict(toy.blocks(7))
    return [trainer.evaluate(), str(output.predictions.dtype), output.predictions, output.metrics]


def _stronger_noise(self, args, state, control, model=None, **kwargs):
    model.get_input_embeddings().neftune_noise_alpha = float(state.global_step)


case("neftune", {**NOISE, "gradient_accumulation_steps": 3}, **LM, after=_train_again)
case("neftune_of_nothing", {**NOISE, "neftune_noise_alpha": 0.0}, **LM)
case("neftune_bf16", {**NOISE, **SAVE, "bf16": True}, **LM)
case("neftune_set_on_the_trainer", {**EVAL}, **LM, before=_evaluate_with)
case("neftune_grows", {**NOISE}, **LM, extra=callback(on_step_begin=_stronger_noise))
case("neftune_lora", {**NOISE, **SAVE}, **{**LM, "model": lora})
case("neftune_lora_on_embeddings", {**NOISE}, **{**LM, "model": _lora_on_embeddings})
case("neftune_model_init", {**NOISE}, **MADE, after=_train_again)

# Half precision on the CPU -------------------------------------------------------------------------------------------
case("fp16_on_the_cpu", {"fp16": True, "gradient_accumulation_steps": 2, **EVAL, **SAVE}, **LM, after=evaluate_first)
case("fp16_full_eval", {"fp16_full_eval": True}, **LM, before=evaluate_first, after=evaluate_first)
case("bf16_and_bf16_full_eval", {"bf16": True, "bf16_full_eval": True}, **LM, after=evaluate_first)
case("fp16_full_eval_model_init", {"fp16_full_eval": True, **EVAL}, **MADE, before=evaluate_first, after=evaluate_first)

# Compiling -----------------------------------------------------------------------------------------------------------
EAGER = {"torch_compile": True, "torch_compile_backend": "eager", **EVAL}


def _forms(trainer) -> list[str]:
    """Return what the model is, and what steps call; and how often torch has compiled anything."""
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [type(trainer.model).__name__, type(trainer.model_wrapped).__name__, counted > 0]


def _evaluate_and_predict(trainer):
    found = [_forms(trainer), trainer.evaluate(), trainer.predict(trainer.eval_dataset).predictions]
    return [*found, _forms(trainer)]


def _train_once_more(trainer):
    return [*_evaluate_and_predict(trainer), trainer.train().training_loss, _forms(trainer)]


def _one_layer():
    return toy.tiny_gpt2(n_layer=1)


# A model of transformers takes seconds to compile for each layer and each shape of a batch.
SMALL = {**LM, "model": _one_layer}
EVEN = {**SMALL, "eval": lambda: toy.blocks(8, seed=9)}
AGAIN = {**EAGER, "eval_strategy": "no"}  # there a second training measures `eval_model_preparation_time` anew
ACCUMULATING = {**EAGER, **SAVE, "gradient_accumulation_steps": 3}
case("compiled", ACCUMULATING, **SMALL, before=_forms, after=_evaluate_and_predict)
case("compiled_accumulating", ACCUMULATING)
case("compiled_twice", AGAIN, after=_train_once_more)
case("compiled_by_its_backend", {"torch_compile_backend": "AOT_EAGER"}, after=_forms)
case("compiled_by_its_mode", {**AGAIN, "torch_compile_mode": "reduce-overhead"}, after=_forms)
case("compiled_bf16", {**EAGER, "bf16": True}, after=_forms)
case("evaluated_compiled", AGAIN, before=_evaluate_and_predict, after=_evaluate_and_predict)
case(
    "compiled_model_init",
    EAGER,
    model=None,
    extra=lambda api: {"model_init": lambda: toy.Classifier()},
    before=_forms,
    after=_train_once_more,
)
case("compiled_lora", {**EAGER, **SAVE}, **{**EVEN, "model": lambda: lora(_one_layer)}, after=_forms)
case("compiled_neftune", {**EAGER, **NOISE}, **EVEN, after=_forms)
case("compiled_by_nothing", {"torch_compile_backend": "no"}, after=_forms)

# The accelerator -----------------------------------------------------------------------------------------------------


def _gathering_loss(api):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = api.Trainer.compute_loss(self, model, inputs, return_outputs=True)
        accelerator, state = self.accelerator, self.accelerator.gradient_state
        kinds = (outputs["logits"].detach().argmax(-1), loss.detach(), ["a", "b", "c"])
        self.__dict__.setdefault("gathered", []).append(
            [model.training, state.in_dataloader, state.end_of_dataloader, state.remainder]
            + [accelerator.gather_for_metrics(kind) for kind in kinds]
        )
        return (loss, outputs) if return_outputs else loss

    return compute_loss


case(
    "gathered_in_the_loss",  # as libraries count what is right while they train
    {**EVAL, "gradient_accumulation_steps": 2},
    trainer=subclass(compute_loss=_gathering_loss),
    extra=lambda api: METRICS,
    after=lambda trainer: [trainer.evaluate(), trainer.predict(toy.rows(6)).metrics, trainer.gathered],
)
