"""The tables of the migration guide agree with the package; `tests/docs/test_blocks.py` runs its code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import lightning
import torch
import transformers

import hf_compat
from hf_compat import TrainerCallback, TrainingArguments
from hf_compat.plan.argument_support import EQUIVALENTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading, each cell as the list of what it puts between backticks."""
    text = PAGE.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in line] for line in lines[2:]]


def test_settings_are_those_that_the_package_translates():
    named = [
        ({name.split("=")[0] for name in hf}, {name.split("=")[0] for name in pl}) for hf, pl, _ in rows("Settings")
    ]
    values = {"precision": "32", "val_check_interval": 5, "check_val_every_n_epoch": 1, "accelerator": "cpu"}
    for setting, translate in EQUIVALENTS.items():
        arguments = set(translate(values.get(setting, True)))
        assert any(arguments & hf for hf, pl in named if setting in pl), setting


def test_the_names_in_the_settings_exist():
    known = {field.name for field in fields(TrainingArguments)} | {"global_step", "EarlyStoppingCallback(3)"}
    of_trainer = set(inspect.signature(lightning.Trainer).parameters)
    for hf, pl, _ in rows("Settings"):
        assert {name.split("=")[0] for name in hf} <= known
        words = {name.split("=")[0] for name in pl if re.fullmatch(r"[a-z_]+(=.*)?", name)}
        assert words <= of_trainer | {
            "batch_size",
            "num_workers",
            "configure_optimizers",
            "seed_everything",
            "ckpt_path",
        }


def test_events_and_hooks_exist_and_the_table_has_every_event():
    named = rows("Events and hooks")
    assert {name for hf, _, _ in named for name in hf} == {
        name for name in vars(transformers.TrainerCallback) if name.startswith("on_")
    } - {"on_predict", "on_push_begin"}
    for _, hooks, _ in named:
        assert all(hasattr(lightning.Callback, hook) for hook in hooks)


def test_flags_are_all_there():
    flags = [name for hf, _ in rows("Flags of `TrainerControl`") for name in hf]
    assert flags and sorted(flags) == sorted(name for name in vars(hf_compat.TrainerControl()) if name[:7] == "should_")


def test_an_event_and_its_hook_come_together(make_args):
    """Both callbacks write down what they are called for; each pair of the table has equal counts and one moment."""
    pairs = [(hf[0], pl[0]) for hf, pl, _ in rows("Events and hooks") if pl and "on_save" not in hf]
    seen: list[tuple[str, int]] = []

    def note(name, step_of):
        return lambda self, *words, **rest: seen.append((name, step_of(*words)))

    by_event = {hf: note(hf, lambda args, state, control: state.global_step) for hf, _ in pairs}
    by_hook = {f"{pl}": note(f"pl:{pl}", lambda trainer, *_: trainer.global_step) for _, pl in pairs}
    model = torch.nn.Linear(2, 1)
    model.forward = lambda x: ((torch.nn.functional.linear(x, model.weight) ** 2).mean(), x)
    data = [{"x": torch.ones(2)}] * 12
    both = [type("Events", (TrainerCallback,), by_event)(), type("Hooks", (lightning.Callback,), by_hook)()]
    args = make_args(eval_strategy="epoch", gradient_accumulation_steps=2)
    hf_compat.Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=both).train()
    for event, hook in pairs:
        moments = [step for name, step in seen if name == event]
        assert moments and moments == [step for name, step in seen if name == f"pl:{hook}"], (event, hook)
