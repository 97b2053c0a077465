"""The run's counts and what begins it, read off the Trainer before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

from hf_compat.hf.enums import IntervalStrategy, SaveStrategy
from hf_compat.plan.lightning_plan import RunCounts
from hf_compat.runtime.seeding import RandomStates, read_rng, set_seed, write_rng
from hf_compat.tools.ejection.data_part import DataPart, same_random_states
from hf_compat.tools.ejection.findings import Findings
from hf_compat.tools.ejection.loss_part import LossPart
from hf_compat.tools.ejection.own_part import OwnPart
from hf_compat.tools.until_train import CapturedTrain
from hf_compat.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RunPart:
    """How long the run is, and how its updates are made.

    Args:
        counts: Its counts.
        window: Micro-batches of an update.
        windows: Whether updates are made by hand: where Lightning's accumulation would divide by something else.
        logging_steps: Updates between logs.
        eval_steps: Updates between evaluations.
        save_steps: Updates between checkpoints.
        saves_at_end: Whether the last update has a checkpoint besides those at regular intervals.
    """

    counts: RunCounts
    window: int
    windows: bool
    logging_steps: int
    eval_steps: int
    save_steps: int
    saves_at_end: bool

    @property
    def whole_epochs(self) -> int | None:
        """Epochs of the run, where they are whole ones."""
        per_epoch, updates = self.counts.updates_per_epoch, self.counts.max_updates
        return None if self.counts.is_endless or updates % per_epoch else updates // per_epoch


def prepare(captured: CapturedTrain, findings: Findings) -> RandomStates | None:
    """Bring the model to where training would begin; return the random states then, where no seed says them."""
    trainer = captured.trainer
    if captured.keywords.get("trial") is not None:
        findings.forbid(
            "The script searches for hyperparameters, and a project is one run.",
            "write the values that were found into the arguments, and call `train()`.",
        )
    elif captured.positional or {name for name, value in captured.keywords.items() if value}:
        findings.tell("The script resumes a checkpoint; the project begins with the weights of a new run.")
    trainer._set_use_cache()
    trainer._prepare_model_for_training(None, None)
    states = read_rng()
    set_seed(trainer.args.seed)
    is_seeded = same_random_states(states, read_rng())
    write_rng(states)
    return None if is_seeded else states


def describe_run(trainer: Trainer, data: DataPart, loss: LossPart, own: OwnPart) -> RunPart:
    """Return the counts of the run."""
    counts = trainer.run_counts(trainer.args, trainer.get_train_dataloader())
    trainer.state.compute_steps(trainer.args, counts.max_updates)
    window = trainer.args.gradient_accumulation_steps
    even = not counts.is_endless and counts.micro_batches_per_epoch % window == 0
    exact = even and loss.divides and not loss.counts_items
    save_steps = int(trainer.state.save_steps or 0)
    is_saved_by_step = trainer.args.save_strategy == SaveStrategy.STEPS and save_steps > 0
    return RunPart(
        counts=counts,
        window=window,
        windows=(window > 1 and (not exact or data.reads_random)) or "training_step" in own.seams,
        logging_steps=int(trainer.state.logging_steps or 1),
        eval_steps=int(trainer.state.eval_steps or 0),
        save_steps=save_steps,
        saves_at_end=is_saved_by_step and counts.max_updates % save_steps != 0,
    )


def evaluation_interval(trainer: Trainer, run: RunPart) -> tuple[int | None, bool]:
    """Return the batches of Lightning between evaluations (None: each epoch), and whether the end needs its own."""
    strategy, updates = trainer.args.eval_strategy, run.counts.max_updates
    if strategy == IntervalStrategy.STEPS:
        per_update = 1 if run.windows else run.window
        return run.eval_steps * per_update, updates % run.eval_steps != 0
    return None, strategy == IntervalStrategy.EPOCH and updates % run.counts.updates_per_epoch != 0
