"""Runs with a tracker, one after another, each in a fork of this process, which has imported wandb.

    python tracked_runs.py TRACKER '[["transformers", FOLDER, WHAT ELSE, …], …]'

What else is done: `die` at an evaluation, `resume` from the last checkpoint, `predict` at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from helpers.toy import blocks, tiny_gpt2


def run(package: str, tracker: str, *more: str) -> None:
    api = importlib.import_module(package)
    api.set_seed(3)
    args = api.TrainingArguments(
        output_dir="out", report_to=tracker, run_name="a-run", per_device_train_batch_size=4, num_train_epochs=2,
        logging_steps=2, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=5, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip

    class Die(api.TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            if "die" in more and state.global_step == 8:
                if tracker == "wandb":
                    importlib.import_module("wandb").finish()
                os._exit(9)

    sets = {"train_dataset": blocks(24), "eval_dataset": blocks(8, seed=9)}
    trainer = api.Trainer(tiny_gpt2(), args, callbacks=[Die()], **sets)
    trainer.train(resume_from_checkpoint="resume" in more or None)
    if "predict" in more:
        trainer.predict(blocks(8, seed=10))


def main() -> None:
    tracker, runs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if tracker == "wandb":
        importlib.import_module("wandb.sdk.launch")  # takes seconds
    for package, folder, *more in runs:
        if os.fork() == 0:
            os.makedirs(folder, exist_ok=True)
            os.chdir(folder)
            run(package, tracker, *more)
            sys.exit()
        status = os.waitstatus_to_exitcode(os.wait()[1])
        assert status == (9 if "die" in more else 0), (folder, status)


if __name__ == "__main__":
    main()
