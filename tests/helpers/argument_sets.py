"""Argument sets as scripts of five generations write them: each is constructed, read back, and trains two updates.

    python tests/helpers/argument_sets.py

prints, for each generation, how many train here and how many of the same sets transformers' own class refuses.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.data import DataCollatorWithPadding
from hf_compat.errors import HfCompatError

OF_3_5 = [
    {"num_train_epochs": 3, "per_device_train_batch_size": 4, "warmup_steps": 500, "weight_decay": 0.01,
     "evaluate_during_training": True, "logging_dir": "./logs", "logging_steps": 10},
    {"overwrite_output_dir": True, "num_train_epochs": 1, "per_gpu_train_batch_size": 8, "save_steps": 10_000,
     "save_total_limit": 2, "prediction_loss_only": True},
    {"do_train": True, "do_eval": True, "evaluation_strategy": "epoch", "per_device_eval_batch_size": 64,
     "load_best_model_at_end": False, "metric_for_best_model": "loss"},
    {"evaluation_strategy": "steps", "eval_steps": 1, "logging_first_step": True, "run_name": "first", "seed": 1,
     "past_index": -1, "disable_tqdm": True},
    {"overwrite_output_dir": True, "do_train": True, "evaluate_during_training": False, "learning_rate": 3e-5,
     "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "fp16": False, "fp16_opt_level": "O1", "local_rank": -1},
    {"no_cuda": True, "gradient_accumulation_steps": 2, "per_gpu_train_batch_size": 2, "per_gpu_eval_batch_size": 2},
    {"tpu_num_cores": None, "tpu_metrics_debug": False, "debug": False, "dataloader_drop_last": True},
    {"evaluation_strategy": "epoch", "label_names": ["labels"], "remove_unused_columns": True, "eval_steps": 1000},
    {"evaluate_during_training": True, "eval_steps": 1, "save_steps": -1, "logging_steps": 1, "logging_dir": "runs"},
    {"do_train": True, "do_eval": None, "do_predict": False, "dataloader_num_workers": 0, "logging_dir": "tb",
     "overwrite_output_dir": True, "save_total_limit": None, "greater_is_better": None},
]  # fmt: skip
OF_4_19 = [
    {"evaluation_strategy": "epoch", "save_strategy": "epoch", "learning_rate": 2e-5, "weight_decay": 0.01,
     "per_device_train_batch_size": 4, "load_best_model_at_end": True, "push_to_hub": False},
    {"evaluation_strategy": "steps", "eval_steps": 1, "save_steps": 1, "logging_steps": 1, "warmup_ratio": 0.1,
     "lr_scheduler_type": "cosine", "group_by_length": True, "overwrite_output_dir": True},
    {"fp16": False, "fp16_backend": "auto", "half_precision_backend": "amp", "sharded_ddp": "", "adafactor": True},
    {"use_legacy_prediction_loop": False, "past_index": -1, "mp_parameters": "", "optim": "adamw_hf",
     "no_cuda": True},
    {"include_inputs_for_metrics": True, "evaluation_strategy": "epoch", "log_level": "info"},
    {"push_to_hub_model_id": "it", "push_to_hub_organization": None, "push_to_hub_token": None, "hub_strategy": "end"},
    {"per_gpu_train_batch_size": None, "per_gpu_eval_batch_size": None, "logging_dir": "logs", "xpu_backend": None,
     "fsdp": "", "fsdp_min_num_params": 0, "deepspeed": None, "label_smoothing_factor": 0.1},
    {"group_by_length": True, "length_column_name": "length", "warmup_ratio": 0.03, "report_to": ["tensorboard"],
     "gradient_accumulation_steps": 2},
    {"evaluation_strategy": "no", "do_train": True, "logging_strategy": "epoch", "skip_memory_metrics": True,
     "tpu_metrics_debug": False, "debug": "", "sharded_ddp": []},
    {"overwrite_output_dir": True, "eval_accumulation_steps": 1, "evaluation_strategy": "steps", "eval_steps": 2,
     "logging_first_step": True, "optim": "adamw_torch", "adafactor": False, "full_determinism": False},
]  # fmt: skip
OF_4_46 = [
    {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_dir": "logs", "save_safetensors": True},
    {"evaluation_strategy": "steps", "eval_steps": 1, "no_cuda": True, "warmup_ratio": 0.05, "optim": "adamw_torch"},
    {"use_cpu": True, "dispatch_batches": None, "split_batches": None, "include_tokens_per_second": True},
    {"eval_strategy": "steps", "eval_steps": 0.5, "include_num_input_tokens_seen": True, "jit_mode_eval": False},
    {"use_ipex": False, "torchdynamo": None, "use_mps_device": False, "ray_scope": "last", "group_by_length": True},
    {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "warmup_ratio": 0.1},
    {"eval_strategy": "epoch", "include_inputs_for_metrics": False, "include_for_metrics": ["loss"],
     "batch_eval_metrics": False, "overwrite_output_dir": True},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "warmup_ratio": 0.1},
    {"average_tokens_across_devices": False, "fsdp": "", "fsdp_transformer_layer_cls_to_wrap": None,
     "accelerator_config": {"split_batches": False}, "logging_dir": None},
    {"push_to_hub": False, "hub_private_repo": False, "hub_token": None, "push_to_hub_token": None,
     "save_only_model": True, "save_safetensors": True, "eval_on_start": True, "evaluation_strategy": "epoch"},
]  # fmt: skip
OF_4_57 = [
    {"eval_strategy": "steps", "eval_steps": 1, "logging_dir": "./logs", "save_safetensors": True, "bf16": False},
    {"warmup_ratio": 0.1, "group_by_length": True, "overwrite_output_dir": True, "report_to": "none"},
    {"fp16_full_eval": False, "half_precision_backend": "auto", "use_legacy_prediction_loop": False},
    {"per_gpu_train_batch_size": None, "include_tokens_per_second": False, "include_num_input_tokens_seen": False},
    {"average_tokens_across_devices": True, "tpu_num_cores": None, "trackio_space_id": "trackio", "project": "mine"},
    {"optim": "adamw_torch_fused", "adafactor": False, "ddp_timeout": 1800, "torchdynamo": None, "ray_scope": "last"},
    {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch", "logging_dir": "runs"},
    {"push_to_hub_model_id": None, "push_to_hub_organization": None, "mp_parameters": "", "no_cuda": True},
    {"gradient_accumulation_steps": 2, "warmup_ratio": 0.03, "lr_scheduler_type": "cosine", "save_safetensors": True},
    {"eval_strategy": "epoch", "include_inputs_for_metrics": True, "past_index": -1, "jit_mode_eval": False},
]  # fmt: skip
OF_5_2 = [
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "report_to": "none"},
    {"warmup_ratio": 0.1, "eval_strategy": "steps", "eval_steps": 1},
    {"group_by_length": True, "logging_dir": "./logs"},
    {"use_cache": False, "optim": "adamw_torch", "learning_rate": 1e-4},
    {"warmup_steps": 0.1, "lr_scheduler_type": "cosine"},
    {"enable_jit_checkpoint": False, "logging_dir": "logs", "logging_steps": 1},
    {"gradient_checkpointing": False, "include_num_input_tokens_seen": "all"},
    {"warmup_ratio": None, "gradient_accumulation_steps": 2, "average_tokens_across_devices": True},
    {"place_model_on_device": True, "save_only_model": True},
    {"length_column_name": "length", "group_by_length": False, "dataloader_persistent_workers": False},
]  # fmt: skip
SETS = {"3.5": OF_3_5, "4.19": OF_4_19, "4.46": OF_4_46, "4.57": OF_4_57, "5.2": OF_5_2}
ALWAYS = {"max_steps": 2, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}


def settings(folder: Path, values: dict) -> dict:
    """Return a set as it is, and what keeps the run short and on the CPU."""
    chosen = {"output_dir": str(folder), **{n: v for n, v in ALWAYS.items() if n not in values}, **values}
    chosen["max_steps"] = 2
    if "logging_dir" in values and values["logging_dir"] is not None:
        chosen["logging_dir"] = str(folder / values["logging_dir"])
    return chosen if "no_cuda" in values else {"use_cpu": True, **chosen}


def trained(args: TrainingArguments) -> Trainer:
    """Train two updates."""
    collator = DataCollatorWithPadding(toy.tiny_tokenizer())
    rows = toy.tokenized(16)
    trainer = Trainer(toy.tiny_bert(), args, collator, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    return trainer


def is_refused_by_transformers(values: dict) -> bool:
    """Return whether transformers' own class refuses a set."""
    import transformers

    try:
        transformers.TrainingArguments(**values)
    except (TypeError, ValueError):
        return True
    return False


def main() -> int:
    """Print the table; the status is 1 where a set does not train here."""
    import transformers

    warnings.simplefilter("ignore")
    failed = []
    print(f"generation  sets  train here  refused by transformers {transformers.__version__}")
    for generation, sets in SETS.items():
        good = refused = 0
        for number, values in enumerate(sets):
            with tempfile.TemporaryDirectory() as folder:
                chosen = settings(Path(folder), values)
                refused += is_refused_by_transformers(chosen)
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        good += trained(TrainingArguments(**chosen)).state.global_step == 2
                except HfCompatError as error:
                    failed.append(f"{generation} #{number}: {error}")
        print(f"{generation:<10}  {len(sets):>4}  {good:>10}  {refused:>7}")
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
