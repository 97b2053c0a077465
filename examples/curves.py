"""Draw the curves of a run from its `trainer_state.json`.

python examples/curves.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def series(history: list[dict], key: str) -> tuple[list[int], list[float]]:
    found = [(log["step"], log[key]) for log in history if key in log]
    return [step for step, _ in found], [value for _, value in found]


def draw(folder: Path) -> Path:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    figure, (losses, rest) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses.plot(*series(history, "loss"), label="training loss")
    losses.plot(*series(history, "eval_loss"), "o-", label="evaluation loss")
    losses.set(xlabel="update", ylabel="loss", title=folder.name)
    losses.legend()
    accuracy = series(history, "eval_accuracy")
    shown, name = (
        (accuracy, "evaluation accuracy") if accuracy[0] else (series(history, "learning_rate"), "learning rate")
    )
    rest.plot(*shown, "o-", color="tab:green")
    rest.set(xlabel="update", ylabel=name, title=name)
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
