"""A `Saver` without a training, and what stands in for the objects that it asks."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from hf_compat.checkpoint.run_lock import Owner
from hf_compat.training_run.saver import Saver


def make(overrides=(), **values):
    """A saver of a host that trains a model alone, with other values for some of its members."""
    args = {
        "async_save": False, "world_size": 1, "push_to_hub": False, "should_save": True, "process_index": 0,
        "output_dir": "out", "output_store": None, "save_total_limit": None, "save_on_each_node": False,
        "_launch": SimpleNamespace(nodes=1), "save_only_model": False,
    } | values.pop("args", {})  # fmt: skip
    agreement = SimpleNamespace(sources=SimpleNamespace(in_updates=False))
    run = {"flag_agreement": agreement, "run_id": "r", "checkpoint": None}
    ranks = SimpleNamespace(sharing=1)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, rank_slice=ranks, scaler=None)
    host = {
        "args": SimpleNamespace(**args),
        "accelerator": accelerator,
        "model": nn.Linear(2, 2), "processing_class": None, "data_collator": None, "is_in_train": False,
        "_model_state": SimpleNamespace(can_be_copied=True),
        "callback_handler": SimpleNamespace(hearing=lambda event: []),
        "_callbacks": SimpleNamespace(lightning=[]),
        "_run": SimpleNamespace(**run | values.pop("run", {})),
        "state": SimpleNamespace(global_step=3, total_flos=0, best_model_checkpoint=None),
        "_pushes": SimpleNamespace(unpushed=None, pushed=[]),
    } | values  # fmt: skip
    host = SimpleNamespace(**host)
    host._pushes.push_checkpoint = host._pushes.pushed.append
    made = Saver(host, lambda name: name in overrides)
    made._lacks_renames["out"] = False
    return made


class Folder:
    """Stands in for an output folder, and tells what was done with it."""

    def __init__(self):
        self.told = []
        self.owner = Owner()

    def hold(self, folder):
        self.told.append(("held", folder))

    def writer(self, run, folder, limit):
        self.told.append(("writer", folder, limit))
        return "writer"


class Background:
    """Stands in for the writer beside a training."""

    def __init__(self, error=None):
        self.error, self.told = error, []

    def submit(self, *parts):
        self.told.append("submitted")

    def wait(self):
        self.told.append("waited")

    def settle(self):
        self.told.append("settled")
        return self.error
