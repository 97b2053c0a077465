"""Resuming: which checkpoint, the state it brings, and where its run goes on. HF's method names."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint import manifest
from hf_compat.checkpoint.adapters import holds_whole_model, misfitting_adapters
from hf_compat.checkpoint.edits import no_checkpoint, problems_of_named, reading_edited, warn_of, way_out
from hf_compat.checkpoint.files import first_line, naming
from hf_compat.checkpoint.headers import misfitting_weights
from hf_compat.checkpoint.judging import holds_model_alone
from hf_compat.checkpoint.lightning_io import read_lightning, to_hf
from hf_compat.checkpoint.run_lock import Owner
from hf_compat.checkpoint.run_state import ResumePoint, RunState, resume_point
from hf_compat.errors import CheckpointError, CheckpointMismatch, HfCompatError
from hf_compat.hf.outputs import TrainOutput
from hf_compat.hf.state import INTERVALS, TrainerState, is_exportable
from hf_compat.interop.transformers_models import is_peft_model
from hf_compat.plan.run_counts import RunCounts
from hf_compat.runtime import slurm
from hf_compat.runtime.collectives import agree, broadcast_object
from hf_compat.trainer_methods.base import Loader, Trial
from hf_compat.trainer_methods.checkpoint_loading import read_state
from hf_compat.trainer_methods.checkpoints import CheckpointMethods
from hf_compat.trainer_methods.windows import WindowMethods
from hf_compat.training_run.loss_log import LossLog, LossLogState
from hf_compat.training_run.run import TrainingRun

logger = logging.getLogger(__name__)

_NONE: Mapping[str, str] = MappingProxyType({})


class ResumeMethods(WindowMethods, CheckpointMethods):
    """How a run begins: at its first update, or where a checkpoint stood."""

    def _with_checkpoint(self, wanted: str | bool | None, train: Callable[[str | None], TrainOutput]) -> TrainOutput:
        """Train from a checkpoint; the automatic resume goes on with an older one where one turns out to be damaged."""
        is_automatic, given_optimizer = wanted is True or not wanted, self.optimizer
        self._model_to_begin_with = None
        unloadable: dict[str, str] = {}
        while True:
            with self._resolved_checkpoint(wanted, unloadable) as checkpoint:
                try:
                    self._is_loading = checkpoint is not None
                    return train(checkpoint)
                except CheckpointError as error:
                    is_whole = isinstance(error, CheckpointMismatch)
                    if is_whole or not is_automatic or checkpoint is None or not self._is_loading:
                        raise
                    unloadable[checkpoint] = first_line(error).removesuffix(".")
                finally:
                    self._is_loading = False
            self.optimizer = given_optimizer  # one that was made for this may have taken over a part

    @contextlib.contextmanager
    def _resolved_checkpoint(
        self, wanted: str | bool | None, unloadable: Mapping[str, str] = _NONE
    ) -> Iterator[str | None]:
        """Give the folder to go on from; one that is made of a Lightning checkpoint is there while it is read from.

        Args:
            wanted: What is asked for; True takes the newest.
            unloadable: Folders that were tried, and why they cannot be loaded.
        """
        if isinstance(wanted, bool) or not wanted or not os.path.isfile(str(wanted)):
            with contextlib.ExitStack() as reading:
                yield self._resolve_checkpoint(wanted, unloadable, reading)
            return
        with tempfile.TemporaryDirectory(prefix="hf_compat_") as place:
            folder = os.path.join(place, "checkpoint")
            with naming(str(wanted)):
                agree(_error_of(lambda: to_hf(read_lightning(str(wanted)), folder)))
                self._refuse_misfits(folder)
                yield folder

    def _resolve_checkpoint(
        self, wanted: str | bool | None, unloadable: Mapping[str, str], reading: contextlib.ExitStack
    ) -> str | None:
        """Return the folder to go on from; `reading` lets one that is named and edited be read as it is."""
        if not wanted and broadcast_object(slurm.is_requeued(str(self.args.output_dir))):
            logger.warning("SLURM has started this job again: training goes on from the newest checkpoint.")
            wanted = True
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            return self._newest_checkpoint(str(self.args.output_dir), unloadable)
        if holds_model_alone(Path(wanted)):
            agree(_error_of(lambda: self._refuse_misfits(str(wanted))))
            logger.warning("%s holds a model and no state of a training: training begins with its weights.", wanted)
            self._model_to_begin_with = str(wanted)
            return None
        agree(_error_of(lambda: self._check_checkpoint(str(wanted), reading)))
        return str(wanted)

    def _newest_checkpoint(self, folder: str, unloadable: Mapping[str, str] = _NONE) -> str:
        """Finish what a killed save has left, then return the newest whole checkpoint; the first process looks."""
        found: list[str] = []
        passed_over: list[str] = []

        def judge(path: str) -> list[str]:
            if path in unloadable:
                wrong = [f"it cannot be loaded ({unloadable[path]})"]
            else:
                wrong = self._problems(path)
            if wrong:
                passed_over.append(f"  {os.path.basename(path)}: {'; '.join(wrong)}")
            else:
                self._refuse_misfits(path)
            return wrong

        def look() -> None:
            manifest.recover(folder)
            last = manifest.newest_checkpoint(folder, judge) if os.path.isdir(folder) else None
            if last is None:
                why = "".join(f"\n{reason}" for reason in passed_over)
                raise CheckpointError(
                    f"No valid checkpoint found in output directory ({folder}).{why}\n\n"
                    "Hint: train without `resume_from_checkpoint`, or name a folder."
                )
            found.append(last)

        agree(_error_of(look) if self.is_world_process_zero() else None)
        return broadcast_object(found)[0]

    def _check_checkpoint(self, checkpoint: str, reading: contextlib.ExitStack) -> None:
        """Refuse a checkpoint that somebody names and that is damaged; warn of one that was edited."""
        if not os.path.isdir(checkpoint):
            raise no_checkpoint(
                checkpoint, "name a checkpoint-<updates> folder, or train without `resume_from_checkpoint`"
            )
        wrong, edits = problems_of_named(checkpoint)
        if not wrong:
            reading.enter_context(reading_edited(checkpoint, edits))
            wrong = list(self._zero_intervals(checkpoint))
        if not wrong:
            self._refuse_misfits(checkpoint)
        if wrong:
            raise CheckpointError(
                f"Can't find a valid checkpoint at {checkpoint}: {'; '.join(wrong)}.\n\n"
                f"{way_out(checkpoint)} `resume_from_checkpoint=True` takes the newest one that is whole."
            )
        if self.is_world_process_zero():
            warn_of(checkpoint, edits)

    def _problems(self, checkpoint: str) -> list[str]:
        """List what is wrong with a checkpoint that nobody named, for a run with these arguments."""
        return manifest.problems(checkpoint) or list(self._zero_intervals(checkpoint))

    def _refuse_misfits(self, folder: str) -> None:
        """Refuse a checkpoint that is whole, and whose weights this model cannot take."""
        wrong = list(self._misfits(folder))
        if wrong:
            raise CheckpointMismatch(
                f"{folder} holds another model: {'; '.join(wrong)}.\n\n"
                "Hint: make the model as it was when this was saved, name a checkpoint of this model, or choose "
                "another `output_dir`."
            )

    def _misfits(self, checkpoint: str) -> Iterator[str]:
        """Yield which weights of a checkpoint the model cannot take."""
        model = self.accelerator.unwrap_model(self.model) if self.model is not None else None
        if model is not None:
            is_adapter = is_peft_model(model) and not holds_whole_model(checkpoint, model)
            yield from misfitting_adapters(checkpoint, model) if is_adapter else misfitting_weights(checkpoint, model)

    def _zero_intervals(self, checkpoint: str) -> Iterator[str]:
        """Yield the intervals of 0 that this run would count by. Where a run acts by epochs, 0 is right."""
        state = read_state(checkpoint)
        args = self.args
        strategies = {"logging": args.logging_strategy, "eval": args.eval_strategy, "save": args.save_strategy}
        for name, strategy in strategies.items():
            if strategy == "steps" and getattr(state, f"{name}_steps") == 0:
                yield f"`{name}_steps` is 0 in trainer_state.json, and this run counts by it"

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Trial,
    ) -> tuple[int, int]:
        """Set the state of a run, from a checkpoint where there is one.

        Returns:
            Whole epochs that the checkpoint has behind it, and micro-batches of the next; `resume_point` knows better.

        Mirrors:
            `transformers.Trainer._init_training_state`, 5.23.
        """
        checkpoint = resume_from_checkpoint
        stateful = [c for c in [*self.callback_handler.callbacks, self.control] if is_exportable(c)]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.is_hyper_param_search = trial is not None
        self.state.compute_steps(self.args, max_steps)
        if checkpoint is not None:
            intervals = (self.state.logging_steps, self.state.eval_steps, self.state.save_steps)
            self.state = read_state(checkpoint, dict(zip(INTERVALS, intervals, strict=True)))
            self._compare_with_checkpoint(intervals)
            self.state.best_model_checkpoint = self._best_of_resumed_state(checkpoint)
            self._load_callback_state()
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        epochs, updates = divmod(self.state.global_step, num_update_steps_per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else updates * self.args.gradient_accumulation_steps

    def _compare_with_checkpoint(self, intervals: tuple[float, float, float]) -> None:
        saved = (self.state.logging_steps, self.state.eval_steps, self.state.save_steps)
        for name, now, before in zip(("logging", "eval", "save"), intervals, saved, strict=True):
            if now != before:
                logger.warning("`%s_steps` is %s now and %s in the checkpoint, which counts.", name, now, before)
        before_size, now_size = self.state.train_batch_size, self.args.per_device_train_batch_size
        if before_size not in (None, now_size):
            logger.warning("The micro-batch is %s now and was %s in the checkpoint.", now_size, before_size)
        has_evaluated = any(any(name.startswith("eval_") for name in log) for log in self.state.log_history)
        keeps_workers = self.args.dataloader_persistent_workers and self.args.dataloader_num_workers > 0
        if keeps_workers and (has_evaluated or (self.state.epoch or 0) >= 1):
            logger.warning(
                "`dataloader_persistent_workers=True`: the workers of the interrupted run cannot be resumed. New ones "
                "draw a random number at their start, so shuffling and dropout differ from those of an uninterrupted "
                "run. Without the setting a resumed run is exact."
            )

    def _best_of_resumed_state(self, checkpoint: str) -> str | None:
        """Return the best checkpoint where it is this run's: a state may name any folder, and weights are read from it.

        Args:
            checkpoint: The checkpoint that the state is from; a folder that was moved has the best one beside it.
        """
        best = self.state.best_model_checkpoint
        if best is None:
            return None
        places = [str(self.args.output_dir), os.path.dirname(os.path.abspath(checkpoint))]
        beside = os.path.join(places[1], os.path.basename(best))
        is_checkpoint = names.checkpoint_step(best) is not None
        if (
            is_checkpoint
            and os.path.isdir(best)
            and os.path.realpath(os.path.dirname(os.path.abspath(best))) in map(os.path.realpath, places)
        ):
            return best
        if is_checkpoint and os.path.isdir(beside):
            logger.warning("The best checkpoint of the resumed state is taken from %s, not %s.", beside, best)
            return beside
        what = "is not in the output folder" if os.path.isdir(best) else "does not exist anymore"
        logger.warning("The best checkpoint %s of the resumed state %s.", best, what)
        return None

    def _begin_run(self, loader: Loader, counts: RunCounts, checkpoint: str | None) -> TrainingRun:
        """Say where a run goes on, and cut its data into updates from there."""
        args, updates_done = self.args, self.state.global_step
        own = manifest.run_of(checkpoint) if checkpoint is not None else None
        run = TrainingRun(
            losses=LossLog(args.device, updates_done, args.logging_nan_inf_filter),
            counts=counts,
            loader=loader,
            checkpoint=checkpoint,
            run_id=broadcast_object(own or (self._owner or Owner()).token),
            updates_before=updates_done,
            tokens_before=self.state.num_input_tokens_seen,
        )
        if checkpoint is not None:
            ranks = (args.process_index, args.world_size)
            run.resumed = RunState.load(checkpoint, *ranks, ended_by_callback=self.state.was_leaving_epoch)
            run.start = resume_point(run.resumed, updates_done, self._data_cut(counts), args.ignore_data_skip)
            if run.resumed is not None and run.start.is_exact:
                run.losses.load_state_dict(cast(LossLogState, run.resumed.losses))
            if run.start.is_finished:  # no data is read, which would restore them
                self._restore_rng(run.start, checkpoint)
        run.windows = self._make_windows(loader, counts, run.start, checkpoint)
        return run

    def _restore_rng(self, start: ResumePoint, checkpoint: str) -> None:
        """Set the random states to those of the checkpoint: what the script draws after training goes on from them."""
        if start.position is not None and start.position.rng is not None:
            self._let_load_rng_state(checkpoint, start.position.rng)
        else:
            self._load_rng_state(checkpoint)


def _error_of(act: Callable[[], None]) -> Exception | None:
    """Do something, and return what went wrong: the other processes have to know before it is raised."""
    try:
        act()
    except (HfCompatError, OSError) as error:
        return error
    return None
