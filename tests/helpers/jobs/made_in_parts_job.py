"""A model that is made in parts for ZeRO 3, trained by transformers' Trainer or by ours.

made_in_parts_job.py FOLDER ours|theirs WAY [name=value …]

WAY is `loaded` (`from_pretrained` after the arguments), `made` (`from_config`), or `by_hand` (under a configuration of
the script's own). `resume` names a checkpoint, `stage` is that of the arguments, `tied` ties the embeddings, and
`adapters` trains LoRA's alone.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import peft
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig, deepspeed_config, is_deepspeed_zero3_enabled

SECTION = {"stage3_param_persistence_threshold": 20, "stage3_gather_16bit_weights_on_model_save": True}
FILLED_IN = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Job:
    def __init__(self, folder: Path, api: str, way: str, options: dict) -> None:
        self.folder, self.api, self.way, self.options = folder, api, way, options
        self.stage, self.adapters, self.seen = options.pop("stage", 3), options.pop("adapters", False), []
        self.config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=options.pop("tied", False),
        )  # fmt: skip
        self.base = folder / f"base{os.environ['RANK']}"  # each rank writes the same
        transformers.set_seed(1)
        transformers.LlamaForCausalLM(self.config).save_pretrained(self.base)
        self.rows = [{"input_ids": (row := torch.arange(i, i + 8) % 32), "labels": row} for i in range(32)]

    def make_args(self):
        zero = {"zero_optimization": {"stage": self.stage, **SECTION}, **dict.fromkeys(FILLED_IN, "auto")}
        if self.api == "hf_compat":  # transformers reads it before there is a process group, on CPUs
            zero["train_batch_size"] = "auto"
        zero["bf16"] = {"enabled": "auto"}
        given = {
            "max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
        }  # fmt: skip
        options = {**given, "deepspeed": zero, **self.options}
        return sys.modules[self.api].TrainingArguments(f"{self.folder}/{self.api}", **options)

    def trainer(self):
        """Make the model, in this order: upstream's scripts parse their arguments first."""
        if self.way == "by_hand":
            import deepspeed

            deepspeed.init_distributed("gloo")
            self.alive = HfDeepSpeedConfig(
                {"zero_optimization": {"stage": 3, **SECTION}, "train_micro_batch_size_per_gpu": 2}
            )
        args = None if self.way == "by_hand" else self.make_args()
        told = [is_deepspeed_zero3_enabled(), (deepspeed_config() or {}).get("train_micro_batch_size_per_gpu")]
        if self.way == "made":
            transformers.set_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(self.base)
        self.seen.append([*told, sorted({tuple(parameter.shape) for parameter in model.parameters()})])
        args = args or self.make_args()
        if self.adapters:
            transformers.set_seed(1)
            layers = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, layers)
        return sys.modules[self.api].Trainer(model, args, train_dataset=self.rows, eval_dataset=self.rows[:16])

    def train(self, resume: str | None, first: bool) -> dict:
        trainer, before = self.trainer(), None
        if first:  # transformers cannot train after that
            before = trainer.evaluate()["eval_loss"]
            trainer.save_model(f"{self.folder}/first")
        trainer.train(resume_from_checkpoint=resume)
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{self.folder}/{self.api}/final")
        logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        size = trainer.get_num_trainable_parameters()
        flos = trainer.state.total_flos
        return {"logs": logs, "eval_loss": evaluated, "before": before, "parameters": size, "flos": flos}


def main() -> None:
    torch.set_num_threads(1)
    folder, api, way, *words = sys.argv[1:]
    options = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in words)}
    resume = options.pop("resume", None)
    if api == "hf_compat":
        import hf_compat  # noqa: F401 - found among the modules
    job = Job(Path(folder), api, way, options)
    found = [job.train(resume, False)]
    if api == "hf_compat" and resume is None:
        found.append(job.train(f"{folder}/{api}/checkpoint-3", True))
    if int(os.environ["RANK"]) == 0:
        (Path(folder) / "result.json").write_text(json.dumps({"runs": found, "seen": job.seen}))


if __name__ == "__main__":
    main()
