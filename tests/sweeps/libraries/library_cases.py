"""Every case of every library by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from sweeps.libraries import further_cases, other_cases, sentence_cases, seq2seq_cases, trl_cases


@dataclass(frozen=True)
class Case:
    """One trainer of one library; `make` takes the folder of models and the run's arguments."""

    library: str
    module: str
    trainer: str
    variant: str
    make: Callable

    def load(self) -> None:
        """Import the library, once for all processes that are forked."""
        importlib.import_module(self.module)


TABLES = (
    ("TRL", "trl", trl_cases.CASES),
    ("sentence-transformers", "sentence_transformers", sentence_cases.SENTENCES),
    ("SetFit", "setfit", sentence_cases.SETFIT),
    ("PEFT", "peft", other_cases.PEFT),
    ("datasets", "datasets", other_cases.DATASETS),
    ("evaluate", "evaluate", other_cases.EVALUATE),
    ("transformers", "transformers", seq2seq_cases.CASES),
    ("FlagEmbedding", "FlagEmbedding", further_cases.FLAG_EMBEDDING),
    ("GLiNER", "gliner", further_cases.GLINER),
    ("Chronos", "chronos", further_cases.CHRONOS),
    ("granite-tsfm", "tsfm_public", further_cases.TSFM),
    ("adaptive-trainer", "adaptive_trainer", further_cases.ADAPTIVE),
    ("as in optimum", "transformers", other_cases.OPTIMUM),
)
LIBRARIES = {name: Case(library, module, *case) for library, module, cases in TABLES for name, case in cases.items()}

# Cases that are known to differ: where, and why; docs/libraries.md tells it.
_GLINER = (
    "files",
    "equal bit for bit, written as safetensors here, as a pickle there; resumed, transformers draws other negatives",
)
DIFFERENCES = {
    "gliner": _GLINER,
    "gliner-rates": _GLINER,
    "chronos": (
        "resumed",
        "resumed, transformers reads other samples than uninterrupted; here they are the same",
    ),
    "datasets-streamed": (
        "resumed",
        "resumed, transformers reads other samples than uninterrupted; here they are the same",
    ),
    "datasets-shuffled": (
        "resumed",
        "resumed, transformers reads other samples than uninterrupted; here `datasets` refills its buffer",
    ),
    "seq2seq-best": (
        "resumed",
        "resumed, transformers draws the groups of equal length anew; here the order goes on",
    ),
}
