"""What a script logs and ends with under our Trainer, and what its ejected project does: compared number by number.

python tests/helpers/ejection_outcomes.py trained SCRIPT ARGS…     the script's, into the working folder
python tests/helpers/ejection_outcomes.py ejected                  the project's, in its own folder, without hf_compat
"""

import json
import sys
from pathlib import Path


def trained(script, arguments):
    """Run a script under our Trainer up to the end of its first training, and keep logs and weights."""
    import torch

    from hf_compat import Trainer
    from hf_compat.interop import patching
    from hf_compat.interop.user_script import run_script

    patching.patch()
    train = Trainer.train

    def train_and_leave(self, *positional, **named):
        train(self, *positional, **named)
        Path("trained.json").write_text(json.dumps(self.state.log_history))
        torch.save({name: value.cpu() for name, value in self.model.state_dict().items()}, "trained.pt")
        raise SystemExit(0)

    Trainer.train = train_and_leave
    run_script(script, arguments)


class _Blocked:
    """Refuses to import what an ejected project has to do without."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_compat":
            raise ImportError(f"{name} is not here")


def ejected():
    """Run the project that stands in the working folder, and keep what it logs and its weights."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_compat"]:
        del sys.modules[name]  # a warm process has them
    sys.meta_path.insert(0, _Blocked())
    sys.path.insert(0, ".")
    import torch
    from lightning.pytorch.loggers import CSVLogger
    from main import main

    logged = []
    keep = CSVLogger.log_metrics

    def log_metrics(self, metrics, step=None):
        logged.append({**{name: float(value) for name, value in metrics.items()}, "step": step})
        keep(self, metrics, step)

    CSVLogger.log_metrics = log_metrics
    command = main(["fit", "--config", "config.yaml", "--trainer.enable_progress_bar", "false"])
    assert not [name for name in sys.modules if name.startswith("hf_compat")]
    Path("ejected.json").write_text(json.dumps(logged))
    torch.save({name: value.cpu() for name, value in command.model.model.state_dict().items()}, "ejected.pt")


def differences(trained_folder, ejected_folder):
    """Return the largest difference of each logged quantity, and of the weights."""
    import torch

    theirs = json.loads((Path(trained_folder) / "trained.json").read_text())
    mine = json.loads((Path(ejected_folder) / "ejected.json").read_text())
    found = {}
    rows = {(name, row["step"]): value for row in mine for name, value in row.items()}
    skipped = ("epoch", "step", "runtime", "per_second", "total_flos", "train_loss", "input_tokens", "preparation")
    for row in theirs:
        for name, value in row.items():
            if any(word in name for word in skipped):
                continue
            other = rows.pop((name, row["step"]))  # a log that is missing is an error
            found[name] = max(found.get(name, 0.0), abs(value - other))
    left = [key for key in rows if key[0] not in ("step", "epoch")]
    assert not left, f"logged by the project alone: {left[:5]}"
    weights, others = (
        torch.load(Path(folder) / f"{name}.pt")
        for folder, name in ((trained_folder, "trained"), (ejected_folder, "ejected"))
    )
    assert weights.keys() == others.keys()
    found["weights"] = max(
        (weights[name].double() - others[name].double()).abs().max().item() for name in weights if weights[name].numel()
    )
    return found


if __name__ == "__main__":
    if sys.argv[1] == "trained":
        trained(sys.argv[2], sys.argv[3:])
    elif sys.argv[1] == "ejected":
        ejected()
    else:
        print(json.dumps(differences(*sys.argv[2:]), indent=1))
