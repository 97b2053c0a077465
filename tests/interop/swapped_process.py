"""A process that holds transformers' own Trainer, patches, trains, unpatches and trains: what it finds, as JSON.

python swapped_process.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch
import transformers
from transformers import Trainer as Original
from transformers import TrainingArguments as OriginalArguments

import hf_compat
from helpers.toy import blocks, tiny_gpt2
from hf_compat.interop.patching import HOMES

torch.set_num_threads(1)


class MadeBefore(Original):
    pass


def train(kind, arguments, folder, resume=None, **changes):
    torch.manual_seed(0)
    values = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "disable_tqdm": True, "use_cpu": True, **changes}
    args = arguments(folder, report_to=[], **values)
    trainer = kind(tiny_gpt2(), args, train_dataset=blocks(16))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def snapshot():
    """Return what each module of transformers holds, and the content of its lists and dicts."""
    held = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers":
            held[name] = dict(vars(module))
            contents = {k: v for k, v in vars(module).items() if type(v) in (list, dict) and not k.startswith("__")}
            for key, value in contents.items():
                items = value.items() if type(value) is dict else enumerate(value)
                held[f"{name}.{key}"] = dict(items)
    return held


def changes(before, after):
    """Return what is another object than before, or came; not what a lazy module loaded of its own."""
    return [
        f"{place}.{name}"
        for place, names in before.items()
        for name in names.keys() | after[place].keys()
        if names.get(name) is not after[place].get(name) and (name in names or is_ours(after[place][name]))
    ]


def is_ours(value):
    return str(getattr(value, "__module__", "")).startswith("hf_compat.")


def ours_in(module):
    return sorted(name for name, value in vars(module).items() if is_ours(value))


def main(folder):
    found = {"theirs": train(Original, OriginalArguments, f"{folder}/theirs")[1]}
    for home in ("transformers.processing_utils", *HOMES):
        __import__(home)
    before = snapshot()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hf_compat.patch()
        found.setdefault("advice", []).append([str(one.message) for one in caught])
        found.setdefault("changed", []).append(sorted(changes(before, snapshot())))
    found["at_home"] = {home: ours_in(sys.modules[home]) for home in HOMES}
    found["top_level"] = [n for n in hf_compat.__all__ if hasattr(transformers, n)]
    found["other"] = [n for n in found["top_level"] if getattr(transformers, n) is not getattr(hf_compat, n)]
    trainer, found["ours"] = train(transformers.Trainer, transformers.TrainingArguments, f"{folder}/ours")
    _, found["resumed"] = train(
        transformers.Trainer, transformers.TrainingArguments, f"{folder}/more", f"{folder}/ours/checkpoint-2"
    )
    _, found["made_before"] = train(MadeBefore, OriginalArguments, f"{folder}/before", save_strategy="no")

    class MadeSince(transformers.Trainer):
        pass

    since, _ = train(MadeSince, OriginalArguments, f"{folder}/since", max_steps=1)
    found["kin"] = [isinstance(one, kind) for one in (trainer, since) for kind in (transformers.Trainer, Original)]
    trackers = transformers.integrations.MLflowCallback, transformers.integrations.CodeCarbonCallback
    jit = sys.modules["transformers.trainer_jit_checkpoint"].JITCheckpointCallback
    found["subclasses_of"] = [issubclass(kind, transformers.TrainerCallback) for kind in (*trackers, jit)]
    found["leaks"] = [n for n in ("_run_epoch", "_mixed_mesh_grad_norm", "nowhere") if hasattr(trainer, n)]
    hf_compat.unpatch()
    hf_compat.unpatch()
    after = snapshot()
    found["left"] = changes(before, {name: after[name] for name in before})
    found["loaded_since"] = [name for name in after.keys() - before.keys() if ours_in(sys.modules.get(name, sys))]
    found["kin_after"] = [isinstance(trainer, transformers.Trainer), isinstance(trainer, hf_compat.Trainer)]
    found["is_original"] = transformers.Trainer is Original and transformers.trainer.Trainer is Original
    again, found["again"] = train(transformers.Trainer, transformers.TrainingArguments, f"{folder}/again")
    found["again_module"] = type(again).__module__
    hf_compat.patch()
    found["third"] = transformers.Trainer is hf_compat.Trainer
    print("FOUND" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
