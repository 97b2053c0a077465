"""The order of a preflight: checks that need nothing, then data, update, save and evaluation."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

from hf_compat.runtime.collectives import broadcast_object, is_failed_exchange, naming_absent_ranks
from hf_compat.tools.isolation.plan import real_path
from hf_compat.tools.preflight.data_checks import check_columns, check_numbers, check_training_data, check_workers
from hf_compat.tools.preflight.evaluation import check_evaluation, check_memory, check_metric_name
from hf_compat.tools.preflight.plan_checks import check_devices, check_metric_followers, check_plan, check_space
from hf_compat.tools.preflight.report import PreflightReport, line_of
from hf_compat.tools.preflight.schedule import check_schedule
from hf_compat.tools.preflight.session import Session, existing_parent, weights_in_bytes
from hf_compat.tools.preflight.surroundings import (
    check_hub,
    check_trackers,
    tell_of_callbacks,
    tell_of_inert_settings,
    tell_of_old_fields,
)
from hf_compat.tools.preflight.update import check_resumption, check_update
from hf_compat.trainer import Trainer

# A checkpoint of the weights and two moments of each, and the model once more.
_SCRATCH_COPIES = 5

_CHECKS: tuple[Callable[[Session], None], ...] = (
    check_trackers,
    check_hub,
    check_metric_followers,
    check_workers,
    check_training_data,
    check_plan,
    check_devices,
    check_numbers,
    check_update,
    check_schedule,
    check_columns,
    check_evaluation,
    check_memory,
    check_metric_name,
    check_resumption,
    check_space,
    tell_of_old_fields,
    tell_of_inert_settings,
    tell_of_callbacks,
)


def check(trainer: Trainer, resume_from_checkpoint: str | bool | None, output_dir: str) -> PreflightReport:
    """Check a run before it begins. Afterwards the Trainer is as it was, bit for bit."""
    # A folder with room for a checkpoint, the same one for all processes
    needed = _SCRATCH_COPIES * weights_in_bytes(trainer.model)
    places = (tempfile.gettempdir(), real_path(existing_parent(str(trainer.args.output_dir))))
    usable = (one for one in places if os.access(one, os.W_OK) and shutil.disk_usage(one).free > needed)
    place = next(usable, None)
    made = tempfile.mkdtemp(prefix=".hf_compat_preflight_", dir=place) if trainer.is_world_process_zero() else ""
    folder = broadcast_object(made)
    try:
        session = Session(
            trainer=trainer, folder=folder, output_dir=output_dir, resume_from_checkpoint=resume_from_checkpoint
        )  # fmt: skip
        with naming_absent_ranks():
            for make in _CHECKS:
                try:
                    make(session)
                except Exception as error:
                    if is_failed_exchange(error):  # the processes are at different places, so no check can follow
                        raise
                    name = make.__name__.removeprefix("check_").replace("_", " ")
                    session.leave_out(name, f"it failed by itself: {line_of(error)}")
            return session.report()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
