"""What hf_compat knows of the names of transformers and Lightning, and what the installed releases have.

python tests/house/upstream_names.py            # what is new, and what is gone
python tests/house/upstream_names.py --write    # take the installed releases as known
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning
import lightning.pytorch as pl
import transformers
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

KNOWN = Path(__file__).with_suffix(".json")
# For each kind of name, what has to know a new one.
PLACES = {
    "fields of transformers.TrainingArguments": "hf_compat/hf: declare the field; write docs/arguments.md",
    "fields of transformers.Seq2SeqTrainingArguments": "hf_compat/hf/fields.py",
    "fields of transformers.TrainerState": "hf_compat/hf/state.py",
    "methods of transformers.Trainer": "hf_compat/trainer_methods, or TrainerBase where it cannot be called",
    "events of transformers.TrainerCallback": "hf_compat/hf/callbacks.py: add a method with its row",
    "optimizers of transformers": "hf_compat/optim/optimizers.py",
    "schedules of transformers": "hf_compat/optim/lr_schedulers.py",
    "hooks of lightning.Callback": "hf_compat/callbacks/callback_set.py and lightning_in_hf.py",
    "hooks of lightning.LightningModule": "hf_compat/native/overrides.py",
    "options of lightning.Trainer": "hf_compat/plan/argument_support.py",
    "private names of Lightning that hf_compat uses": "hf_compat/engine: internals.py and window_trainer.py",
}


def installed() -> dict[str, list[str]]:
    """Return the names of each kind that the installed releases have."""
    from house.test_lightning_internals import HOMES, INTERNALS, accesses

    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    def methods(kind: type) -> set[str]:
        return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("__")}

    own = {
        name for base in pl.LightningModule.__mro__ if base.__module__.startswith("lightning") for name in vars(base)
    }
    used = {name for home in HOMES for _, name in accesses(home)}
    if KNOWN.is_file():
        used |= set(json.loads(KNOWN.read_text())["private names of Lightning that hf_compat uses"]) & INTERNALS
    found = (
        fields(transformers.TrainingArguments),
        fields(transformers.Seq2SeqTrainingArguments) - fields(transformers.TrainingArguments),
        fields(transformers.TrainerState),
        methods(transformers.Trainer),
        methods(transformers.TrainerCallback),
        {str(one.value) for one in OptimizerNames},
        {str(one.value) for one in SchedulerType},
        methods(pl.Callback),
        {name for name in own if name.startswith("on_")},
        set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"},
        used,
    )
    return {kind: sorted(names) for kind, names in zip(PLACES, found, strict=True)}


def differences() -> list[str]:
    """List what the installed releases have besides, or have no longer, with the place that has to know it."""
    known, found = json.loads(KNOWN.read_text()), installed()
    lines = []
    for kind, place in PLACES.items():
        new, gone = sorted(set(found[kind]) - set(known[kind])), sorted(set(known[kind]) - set(found[kind]))
        if new or gone:
            told = [f"new: {', '.join(new)}"] * bool(new) + [f"gone: {', '.join(gone)}"] * bool(gone)
            lines.append(f"{kind}: {'; '.join(told)}\n    see {place}")
    if lines:
        lines.insert(0, f"transformers {transformers.__version__}, lightning {lightning.__version__}:")
    return lines


if __name__ == "__main__":
    if "--write" in sys.argv:
        KNOWN.write_text(json.dumps(installed(), indent=1) + "\n")
    else:
        print("\n".join(differences()) or "nothing is new, and nothing is gone")
