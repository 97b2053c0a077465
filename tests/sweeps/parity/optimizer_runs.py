"""Every optimizer that runs on this machine, under transformers and under hf_compat: 20 updates, bit for bit.

A run accumulates two micro-batches an update, evaluates every five updates, saves every ten, and is resumed from the
middle. `python tests/sweeps/parity/optimizer_runs.py [NAME …]` runs them all (or these) and prints the table of
`docs/optimizers.md`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hf_compat
from hf_compat.hf.enums import OptimizerNames
from hf_compat.optim.optimizers import OPTIMIZERS, check_request

UPDATES, MIDDLE = 20, 10
# transformers writes a checkpoint of these that it does not read again: their state holds objects.
NOT_RESUMED_THERE = ("galore", "apollo")
# `tests/trainer_methods/test_changed_steps.py` has those that change the step: most refuse the accumulation.
STEPS_AS_TORCH = [
    name.value for name in OptimizerNames if not any(word in name.value for word in ("schedule_free", "lomo", "wise"))
]
# Small ranks and gaps, so that the projection changes within the run.
OPTIONS = {"galore": "rank=8,update_proj_gap=3", "apollo": "rank=8,update_proj_gap=3"}
TIMES = ("runtime", "per_second", "flos", "memory")


class Model(nn.Module):
    """Two layers above an embedding; its weights are large enough for states of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.inner = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(96, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.dropout(self.norm(torch.relu(self.inner(self.embedding(input_ids).mean(dim=1)))))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Samples that can be learnt: the label depends on the first token."""
    tokens = torch.randint(0, 100, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def settings_of(name: str) -> dict[str, Any]:
    """The arguments that a name needs."""
    family = next((family for family in OPTIONS if name.startswith(family)), None)
    return {"optim_target_modules": ["inner"], "optim_args": OPTIONS[family]} if family else {}


def train(library: Any, name: str, folder: Path, resume_from: Path | None = None) -> Any:
    """Train once; return the Trainer."""
    args = library.TrainingArguments(
        output_dir=str(folder),
        optim=name,
        max_steps=UPDATES,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=MIDDLE,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **settings_of(name),
    )
    torch.manual_seed(1 if resume_from is None else 2)
    trainer = library.Trainer(Model(), args, train_dataset=rows(44), eval_dataset=rows(9))
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer


def without_train_loss(result: Any) -> Any:
    """An outcome of a resumed run: there train_loss is the mean of its own part, here of the whole run."""
    return [{key: value for key, value in entry.items() if key != "train_loss"} for entry in result[0]], result[1]


def outcome(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What was logged, without times, and the weights."""
    logs = [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)}
        for entry in trainer.state.log_history
    ]
    return logs, dict(trainer.model.state_dict())


def difference(ours: Any, theirs: Any) -> str:
    """The first difference of two outcomes; empty where they are equal bit for bit."""
    for mine, other in zip(ours[0], theirs[0], strict=True):
        if mine != other:
            return f"{mine} is not {other}"
    unequal = [key for key, weight in ours[1].items() if not torch.equal(weight, theirs[1][key])]
    return f"weights differ: {unequal}" if unequal else ""


def compare(name: str, folder: Path) -> str:
    """Return what differs between the libraries, in a whole run or in one resumed from the middle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the optimizers' packages
        theirs = outcome(train(transformers, name, folder / "theirs"))
        ours = outcome(train(hf_compat, name, folder / "ours"))
        checkpoint = f"checkpoint-{MIDDLE}"
        whole = difference(ours, theirs)
        resumed = outcome(train(hf_compat, name, folder / "ours", folder / "ours" / checkpoint))
        if not name.startswith(NOT_RESUMED_THERE):
            theirs = outcome(train(transformers, name, folder / "theirs", folder / "theirs" / checkpoint))
    return whole or difference(without_train_loss(resumed), without_train_loss(theirs))


def can_run(name: str) -> str:
    """Return why a name does not run here; empty where it does."""
    args = hf_compat.TrainingArguments("unused", optim=name, use_cpu=True, **settings_of(name))
    try:
        check_request(args)
    except (ImportError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return ""


def main(names: list[str]) -> int:
    """Run names and print a table; the exit status is the number of those that differ."""
    torch.set_num_threads(1)
    failed = 0
    for name in STEPS_AS_TORCH:
        if names and name not in names:
            continue
        entry = OPTIMIZERS[name]
        why_not = can_run(name)
        with tempfile.TemporaryDirectory() as folder:
            differs = "" if why_not else compare(name, Path(folder))
        failed += bool(differs)
        equal = "equal" if name.startswith(NOT_RESUMED_THERE) is False else "equal; transformers cannot resume it"
        result = differs or ("stand-in only" if why_not else equal)
        print(f"| `{name}` | {entry.install} | {result} |", why_not, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
