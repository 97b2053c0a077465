"""Packages that optimizers come from, made up: a class for every name that the table knows, in modules of its own."""

import importlib.metadata
import sys
import types

import torch
import transformers.trainer_optimizer as upstream

from hf_compat.optim.optimizers import OPTIMIZERS

# Every module and class that transformers imports for an optimizer.
CLASSES = {
    "torch_xla.amp.syncfree": ("AdamW",),
    "torch_npu.optim": ("NpuFusedAdamW",),
    "torchdistx.optimizers": ("AnyPrecisionAdamW",),
    "bitsandbytes.optim": ("AdamW", "Lion", "RMSprop", "AdEMAMix"),
    "galore_torch": ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"),
    "apollo_torch": ("APOLLOAdamW",),
    "lomo_optim": ("AdaLomo", "Lomo"),
    "grokadamw": ("GrokAdamW",),
    "torchao.optim": ("AdamW4bit", "AdamW8bit"),
    "schedulefree": ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
    "optimi": ("StableAdamW",),
}
_ASKED = (
    "apollo_torch",
    "bitsandbytes",
    "galore_torch",
    "grokadamw",
    "lomo",
    "schedulefree",
    "torch_optimi",
    "torchao",
)


class StandIn(torch.optim.SGD):
    """An optimizer that takes whatever keywords it is given, and keeps them."""

    def __init__(self, params, **keywords):
        self.keywords = keywords
        super().__init__(params, lr=keywords.get("lr", 1e-3))


def install(monkeypatch, optim):
    """Put the package of one optimizer in place for one test, for us and for transformers.

    Only that one, and after the arguments are made: transformers remembers for good whether there is a `torch_npu`.
    """
    package = OPTIMIZERS[optim].path.partition(".")[0]
    for module, names in CLASSES.items():
        if module.partition(".")[0] != package:
            continue
        parent = None
        for part in module.split("."):
            full = part if parent is None else f"{parent.__name__}.{part}"
            made = types.ModuleType(full)
            made.__path__ = []  # a package, so that modules within it are looked for
            monkeypatch.setitem(sys.modules, full, made)
            if parent is not None:
                setattr(parent, part, made)
            parent = made
        for name in names:
            setattr(parent, name, type(name, (StandIn,), {"__module__": module}))
    for asked in _ASKED:
        monkeypatch.setattr(upstream, f"is_{asked}_available", lambda *version: True)
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.0" if name == "torchao" else known(name))


def remove(monkeypatch):
    """Make every one of the packages one that cannot be imported."""
    for module in CLASSES:
        monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, module, None)
