"""Train under DeepSpeed with each schedule of its own, by the Trainer of a package, and write what was logged.

python deepspeed_job.py transformers|hf_compat FOLDER ROWS
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from helpers import toy


def train(api, folder: Path, section: dict | None, stage: int, options: dict, resume: str | None = None) -> list:
    config = {
        "zero_optimization": {"stage": stage}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    } | ({"scheduler": section} if section else {})  # fmt: skip
    options = dict(options)
    for name, value in options.pop("config", {}).items():
        config[name] = {**config[name], **value} if isinstance(config.get(name), dict) else value
    config = {name: value for name, value in config.items() if value is not None}
    api.set_seed(1)
    base = {"per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "save_strategy": "no"}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    # upstream gives tokens alone to a model in half precision for which the configuration has no section
    reads_tokens = options.pop("reads_tokens", False)
    args = api.TrainingArguments(str(folder), deepspeed=config, **quiet, **base | options)
    model, data, collator = (toy.Tagger, toy.sequences, toy.pad) if reads_tokens else (toy.Classifier, toy.rows, None)
    trainer = api.Trainer(model(), args, collator, train_dataset=data())
    trainer.train(resume_from_checkpoint=resume)
    if options.get("bf16"):
        trainer.state.log_history.append({"loss": trainer.evaluate(data(8))["eval_loss"], "grad_norm": 0})
    names = ("loss", "grad_norm", "learning_rate")
    return [[log.get(name) for name in names] for log in trainer.state.log_history if "loss" in log]


def main() -> None:
    name, folder, rows = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    api = importlib.import_module(name)
    found = [train(api, folder / str(number), *row) for number, row in enumerate(rows)]
    if name == "hf_compat" and rows[0][0]:
        section, stage, options = rows[0]
        train(api, folder / "saved", section, stage, {**options, "save_strategy": "steps", "save_steps": 3})
        resume = str(folder / "saved" / "checkpoint-3")
        found.append(train(api, folder / "resumed", section, stage, options, resume))
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
