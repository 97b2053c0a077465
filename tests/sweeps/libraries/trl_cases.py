"""TRL's trainers, small; each case makes one from a folder of models and the arguments of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from peft import LoraConfig

from sweeps.libraries import toys

TRAIN, EVAL = 60, 12  # 15 micro-batches: the last update of an epoch has one


def lora() -> dict[str, Any]:
    return {
        "peft_config": LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    }


def sft(models: Path, args: dict, data=toys.texts, extra=dict, **options):
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**args, **{"max_length": 48, **options})
    rows = {"train_dataset": data(TRAIN), "eval_dataset": data(EVAL, TRAIN)}
    return SFTTrainer(str(models / "llama"), args=config, **rows, **extra())


def dpo(models: Path, args: dict, extra=dict, **options):
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**args, **{"max_length": 48, **options})
    rows = {"train_dataset": toys.preferences(TRAIN), "eval_dataset": toys.preferences(EVAL, TRAIN)}
    return DPOTrainer(str(models / "llama"), args=config, **rows, **extra())


def explicit_reference() -> dict[str, Any]:
    return {"ref_model": toys.llama()}


def kto(models: Path, args: dict, extra=dict, **options):
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(**args, **{"max_length": 48, **options})
    rows = {"train_dataset": toys.judged(TRAIN), "eval_dataset": toys.judged(EVAL, TRAIN)}
    return KTOTrainer(str(models / "llama"), args=config, **rows, **extra())


def reward(models: Path, args: dict, **options):
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(**args, **{"max_length": 48, **options})
    rows = {"train_dataset": toys.preferences(TRAIN), "eval_dataset": toys.preferences(EVAL, TRAIN)}
    return RewardTrainer(str(models / "reward"), args=config, **rows)


def vowels(completions, **kwargs):
    """Reward the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in completions]


def online(models: Path, args: dict, kind: str, extra=dict, **options):
    import trl

    config = getattr(trl, f"{kind}Config")(
        **args, **{"num_generations": 4, "max_completion_length": 12, "temperature": 1.0, **options}
    )
    rows = {"train_dataset": toys.prompts(TRAIN), "eval_dataset": toys.prompts(4, TRAIN)}
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(str(models / "llama"), args=config, reward_funcs=vowels, **rows, **extra())


grpo, rloo = partial(online, kind="GRPO"), partial(online, kind="RLOO")

# name → (trainer, variant, what makes it)
CASES = {
    "sft": ("SFTTrainer", "plain text", sft),
    "sft-lora": ("SFTTrainer", "LoRA", partial(sft, extra=lora)),
    "sft-packing": ("SFTTrainer", "packing (wrapped)", partial(sft, packing=True, packing_strategy="wrapped")),
    "sft-bfd": ("SFTTrainer", "packing (best fit), no padding", partial(sft, packing=True)),
    "sft-assistant": (
        "SFTTrainer",
        "assistant-only loss",
        partial(sft, data=toys.conversations, assistant_only_loss=True),
    ),
    "sft-completion": ("SFTTrainer", "prompt and completion", partial(sft, data=toys.completions)),
    "sft-full-text": (
        "SFTTrainer",
        "prompt and completion, loss on both",
        partial(sft, data=toys.completions, completion_only_loss=False),
    ),
    "sft-chunked": ("SFTTrainer", "chunked loss", partial(sft, loss_type="chunked_nll")),
    "sft-nll": ("SFTTrainer", "NLL loss", partial(sft, loss_type="nll")),
    "sft-dft": ("SFTTrainer", "DFT loss", partial(sft, loss_type="dft")),
    "sft-neftune": ("SFTTrainer", "NEFTune", partial(sft, neftune_noise_alpha=5.0)),
    "sft-checkpointing": (
        "SFTTrainer",
        "LoRA, gradient checkpointing",
        partial(sft, extra=lora, gradient_checkpointing=True),
    ),
    "dpo": ("DPOTrainer", "automatic reference model", dpo),
    "dpo-explicit": ("DPOTrainer", "explicit reference model", partial(dpo, extra=explicit_reference)),
    "dpo-lora": ("DPOTrainer", "LoRA", partial(dpo, extra=lora)),
    "dpo-ipo": ("DPOTrainer", "IPO loss", partial(dpo, loss_type="ipo")),
    "dpo-sigmoid-sft": (
        "DPOTrainer",
        "two losses",
        partial(dpo, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    ),
    "dpo-hinge": ("DPOTrainer", "hinge loss", partial(dpo, loss_type="hinge")),
    "dpo-robust": ("DPOTrainer", "robust loss, label smoothing", partial(dpo, loss_type="robust", label_smoothing=0.1)),
    "dpo-precomputed": ("DPOTrainer", "precomputed reference", partial(dpo, precompute_ref_log_probs=True)),
    "dpo-sync": ("DPOTrainer", "reference sync", partial(dpo, sync_ref_model=True, ref_model_sync_steps=5)),
    "kto": ("KTOTrainer", "automatic reference model", kto),
    "kto-lora": ("KTOTrainer", "LoRA", partial(kto, extra=lora)),
    "kto-apo": ("KTOTrainer", "APO loss", partial(kto, loss_type="apo_zero_unpaired")),
    "reward": ("RewardTrainer", "plain", reward),
    "reward-centered": ("RewardTrainer", "centred rewards", partial(reward, center_rewards_coefficient=0.01)),
    "grpo": ("GRPOTrainer", "plain", grpo),
    "grpo-kl": ("GRPOTrainer", "KL, two iterations", partial(grpo, beta=0.1, num_iterations=2)),
    "grpo-sync": (
        "GRPOTrainer",
        "KL, reference sync",
        partial(grpo, beta=0.1, sync_ref_model=True, ref_model_sync_steps=5),
    ),
    "grpo-lora": ("GRPOTrainer", "LoRA, KL", partial(grpo, beta=0.1, extra=lora)),
    "rloo": ("RLOOTrainer", "plain", rloo),
    "rloo-lora": ("RLOOTrainer", "LoRA", partial(rloo, extra=lora)),
}
