"""The scripts of `tests/scripts`: written for transformers, on data that ships with packages, a few seconds each.

Each takes `--output_dir`, trains on a CPU as it stands, and reads nothing from a network.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "scripts"
# Name → the words of its command line, besides `--output_dir`.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "language_model": (),
    "classification": (),
    "token_classification": (),
    "seq2seq": (),
    "lora": (),
    "custom_loss": (),
    "plain_module": (),
    "accumulation": (),
    "early_stopping": (),
    "streaming": (),
    "own_optimizer": (),
    "instructions": (),
    "two_processes": ("--use_cpu",),
    "resumed": (),
}
PROCESSES = {"two_processes": 2}  # one for all others
TRAININGS = {"resumed": 2}


def path_of(name: str) -> str:
    return str(FOLDER / f"{name}.py")
