"""A model that `from_pretrained` shards (`distributed_config`), trained by transformers' Trainer or by ours.

loaded_job.py FOLDER ours|theirs [name=value …]

Two ranks share a copy, so four ranks train two copies. `resume=…` names a checkpoint. `tp=2` splits layers, and with
`whole=True` DeepSpeed divides the model, or one process has it. `further=True` adds metrics, the best model and a
generation. `running=True` computes these metrics batch by batch, with torchmetrics.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import accelerate
import torch
import torchmetrics


def count(prediction):
    """The samples that an evaluation has given, and which."""
    return {"samples": len(prediction.label_ids), "first": float(prediction.label_ids[:, 0].sum())}


class Counted(torchmetrics.Metric):
    """What `count` counts, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("samples", "first"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, logits, labels):
        self.samples += len(labels)
        self.first += labels[:, 0].sum()

    def compute(self):
        return {"samples": self.samples, "first": self.first}


def main() -> None:
    torch.set_num_threads(1)
    folder, api, *words = sys.argv[1:]
    options = {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in words)}
    import transformers

    package = transformers
    if api == "ours":
        import hf_compat as package
    else:  # Accelerate refuses split layers on CPUs, and nothing else stands in their way
        accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
    resume, split, is_whole = options.pop("resume", None), options.pop("tp", 1), options.pop("whole", False)
    further, is_running, metrics = options.pop("further", False), options.pop("running", False), None
    if further:
        options |= {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "load_best_model_at_end": True,
            "greater_is_better": True,
        }
        metrics = Counted if is_running else count
    base = Path(folder) / "base"
    if not (base / "config.json").exists():  # each rank makes the same
        transformers.set_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )  # fmt: skip
        whole = transformers.LlamaForCausalLM(config)
        own = base.with_name(f"base{os.environ['RANK']}")
        whole.save_pretrained(own)
        base = own
    world = int(os.environ["WORLD_SIZE"])
    from transformers.distributed import DistributedConfig

    way = None if is_whole else DistributedConfig(tp_size=split, fsdp_size=2 // split, dp_replicate_size=world // 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, distributed_config=way)
    rows = [{"input_ids": (row := torch.arange(i, i + 8) % 32), "labels": row} for i in range(32)]
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    saving = {"save_steps": 3} if api == "ours" else {"save_strategy": "no"}  # transformers refuses to resume these
    args = package.TrainingArguments(
        f"{folder}/{api}", max_steps=6, use_cpu=True, disable_tqdm=True, report_to="none", logging_steps=1,
        **usual | saving | options,
    )  # fmt: skip
    trainer = package.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:12], compute_metrics=metrics)
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    result = {"eval_loss": evaluated["eval_loss"]}
    if further:
        texts = trainer.model.generate(torch.arange(4)[None], max_new_tokens=6, do_sample=False)
        counted = [evaluated[f"eval_{name}"] for name in ("samples", "first")]
        result |= {"best": trainer.state.best_global_step, "counted": counted, "generated": texts.tolist()}
    if args.process_index == 0:
        logs = [(log["loss"], log.get("grad_norm")) for log in trainer.state.log_history if "loss" in log]
        (Path(folder) / "result.json").write_text(json.dumps({"logs": logs, **result}))


if __name__ == "__main__":
    main()
