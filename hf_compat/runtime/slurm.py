"""A SLURM job that ends before its training: queued again, and resumed when it runs again. SLURM's words only."""

from __future__ import annotations

import json
import logging
import os
import subprocess

from hf_compat.runtime.launch import slurm_job_id

logger = logging.getLogger(__name__)

# Beside the checkpoints: the job that resumes from the newest of them.
REQUEUED_NAME = "requeued.json"


def requeue(folder: str) -> None:
    """Ask SLURM to queue this job again, and note in the output folder that it resumes then.

    A refusal is logged, not raised: the checkpoint is written, and the job may be queued by hand.
    """
    job = slurm_job_id()
    if job is None:
        return
    with open(os.path.join(folder, REQUEUED_NAME), "w", encoding="utf-8") as file:
        json.dump({"job": job}, file)
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        logger.error("SLURM did not queue job %s again: %s. Run `scontrol requeue %s`.", job, reason, job)
    else:
        logger.info("SLURM has queued job %s again.", job)


def is_requeued(folder: str) -> bool:
    """Return whether this job was queued again while it trained into that folder."""
    path = os.path.join(folder, REQUEUED_NAME)
    if slurm_job_id() is None or not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            return bool(json.load(file)["job"] == slurm_job_id())
    except (ValueError, KeyError, TypeError):
        logger.warning("%s cannot be read; training starts from the beginning.", path)
        return False


def forget(folder: str) -> None:
    """Remove the note of this job: its training has ended, and nothing is to be resumed."""
    if is_requeued(folder):
        os.unlink(os.path.join(folder, REQUEUED_NAME))
