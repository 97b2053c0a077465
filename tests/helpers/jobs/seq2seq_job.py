"""A run that generates before, within and after training, for tests with several processes; see job.py.

    seq2seq_job.py FOLDER [name=value …]

Generations end early on some ranks: many tokens are ends of sequences. The first process writes `result.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import GenerationConfig

from helpers.jobs.job import value
from helpers.parity import seq2seq_cases as cases
from hf_compat import Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

torch.set_num_threads(1)
ENDS = list(range(1, 32, 4))
ARGUMENTS = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1, "learning_rate": 1e-2,
    "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    "predict_with_generate": True, "report_to": "none",
}  # fmt: skip


def main():
    folder, *words = sys.argv[1:]
    given = {name: value(text) for name, text in (word.split("=", 1) for word in words)}
    config = GenerationConfig(max_length=8, eos_token_id=ENDS, pad_token_id=0, decoder_start_token_id=0)
    args = Seq2SeqTrainingArguments(folder, **{**ARGUMENTS, **given}, generation_config=config)
    set_seed(5)
    model = cases.tiny_t5(dropout_rate=0.0)
    samples = cases.pairs(16), cases.pairs(8, seed=4)
    trainer = Seq2SeqTrainer(model, args, cases.pad_pairs, *samples, compute_metrics=cases.exact)
    before = trainer.predict(samples[1]).predictions
    trainer.train()
    after = trainer.predict(samples[1], num_beams=2)
    if trainer.is_world_process_zero():
        found = {"before": before.tolist(), "after": after.predictions.tolist(), "loss": after.metrics["test_loss"]}
        found["within"] = [log["eval_sum"] for log in trainer.state.log_history if "eval_sum" in log]
        (Path(folder) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
