"""The documented differences: for each, what our result has to be instead of transformers', made from transformers'.

Where a bug of transformers makes the difference, the expectation is transformers with that bug mended (`MENDED`: cases
that run under transformers only). Where a resumed run reports otherwise, it is transformers' uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from helpers.parity.cases import CASES

TIMED_IN_SEVERAL = "eval_model_preparation_time"


@dataclass(frozen=True)
class Difference:
    """What differs: the heading of its row on the differences page, and our result, from transformers' results."""

    heading: str
    expect: Callable[[dict, dict | None], dict]
    mended: str | None = None


def _own_loader_mended(api):
    """An evaluation that does not take the training loader's state for its own."""
    plain = CASES["own_eval_loader"]["trainer"](api)

    class Mended(plain):
        def evaluation_loop(self, *args, **kwargs):
            state = self.accelerator.gradient_state
            loaders = state.dataloader_references
            state.dataloader_references = [*loaders, None]
            held = vars(state).get("active_dataloader")  # of an older Accelerate; today's reads the last reference
            if held is not None:
                state.active_dataloader = None
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                state.dataloader_references = loaders
                if held is not None:
                    state.active_dataloader = held

    return Mended


def _evaluate_and_wrap_again(trainer):
    """Let the training wrap the model, although an evaluation prepared it."""
    found = CASES["evaluate_before_training"]["before"](trainer)
    del trainer.model._is_accelerate_prepared
    trainer.accelerator._models.clear()
    return found


MENDED = {
    "own_eval_loader_mended": {**CASES["own_eval_loader"], "trainer": _own_loader_mended},
    "evaluate_before_training_mended": {
        **CASES["evaluate_before_training"],
        "before": _evaluate_and_wrap_again,
    },
}


def _mended(theirs: dict, mended: dict | None) -> dict:
    return mended


def _uninterrupted(theirs: dict, mended: dict | None) -> dict:
    """What the resumed run logs is the log of the run that it goes on with; what comes after it stays."""
    logs, first = theirs["log_history"], theirs["first_log"]
    loss = first[-1]["train_loss"]
    after = loss if isinstance(theirs["after"], float) else theirs["after"]
    return {**theirs, "log_history": [*first, *logs[len(first) :]], "after": after}


def _uninterrupted_in_several_processes(theirs: dict, mended: dict | None) -> dict:
    """So are the events: the checkpoint was written by the last update of an epoch, whose end is still to come."""
    expected = _without_preparation_time(_uninterrupted(theirs, mended))
    trace = theirs["trace"]
    names = [event for event, *_ in trace]
    first_end, begun = names.index("on_train_end"), names.index("on_train_begin", names.index("on_train_end"))
    resumed_end = names.index("on_train_end", begun)
    opening = trace[begun : begun + 2]
    rest = trace[names.index("on_epoch_end") : first_end]
    return {**expected, "trace": [*trace[:begun], *opening, *rest, *trace[resumed_end:]]}


def _without_preparation_time(value):
    """Leave out a duration that transformers measures again after a training in several processes."""
    if isinstance(value, dict):
        return {k: _without_preparation_time(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_preparation_time(v) for v in value if not (isinstance(v, str) and v == TIMED_IN_SEVERAL)]
    return value


def resumed(expect=_uninterrupted) -> Difference:
    """What a resumed run tells of the run that it goes on with."""
    return Difference("The loss that a resumed run reports", expect)


OWN_LOADER = Difference("Evaluation on a loader of your own", _mended, "own_eval_loader_mended")
IN_ONE_PROCESS = {
    "own_eval_loader": OWN_LOADER,
    "resume_within_an_epoch": resumed(),
    "resume_at_an_epoch_end": resumed(),
    "resume_early_stopping": resumed(),
    "resume_last_ignoring_data": resumed(),
    "seq2seq_resume": resumed(),
}
IN_TWO_PROCESSES = {
    "own_eval_loader": OWN_LOADER,
    "evaluate_before_training": Difference(
        "Evaluating before training, in several processes", _mended, "evaluate_before_training_mended"
    ),
    "resume_within_an_epoch": resumed(_uninterrupted_in_several_processes),
}


def names_to_run(api: str, names: list[str], differences: dict[str, Difference]) -> list[str]:
    """List the cases of one side: transformers also runs those with its bugs mended."""
    mended = [d.mended for d in differences.values() if d.mended] if api == "transformers" else []
    return [*names, *mended]
