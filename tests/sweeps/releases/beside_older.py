"""Train, beside a transformers that lacks what an older release lacks, in a process of its own.

python tests/sweeps/releases/beside_older.py RELEASE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import transformers

from helpers import toy
from sweeps.releases import names

QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 2, "max_steps": 4}


def train(package, folder: str, **further):
    args = package.TrainingArguments(folder, save_steps=2, **QUIET)
    tokenizer = toy.tiny_tokenizer()
    data = {"train_dataset": toy.tokenized(), "processing_class": tokenizer}
    trainer = package.Trainer(toy.tiny_bert(), args, **data, **further)
    trainer.train()
    return trainer


def main() -> None:
    release, folder = sys.argv[1:]
    transformers.Trainer, transformers.Seq2SeqTrainer  # noqa: B018 - loaded before names are hidden
    adopted = transformers.TrainingArguments(f"{folder}/adopted", **QUIET)
    names.hide(release)
    import hf_compat

    class Own(transformers.TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    callback = Own()
    collator = transformers.DataCollatorWithPadding(toy.tiny_tokenizer())
    trainer = train(hf_compat, f"{folder}/plain", callbacks=[callback], data_collator=collator)
    assert callback.steps == trainer.state.global_step == 4
    trainer.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-2")
    hf_compat.Trainer(toy.tiny_bert(), adopted, train_dataset=toy.tokenized(), data_collator=collator).train()
    hf_compat.patch()
    patched = train(transformers, f"{folder}/patched")
    assert isinstance(patched, hf_compat.Trainer) and Path(folder, "patched/checkpoint-4/manifest.json").exists()
    print("trained", patched.state.global_step)


if __name__ == "__main__":
    main()
