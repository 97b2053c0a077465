"""A SLURM job that is told to go: queued again, and taken up when its turn comes. SLURM's words only."""

from __future__ import annotations

import json
import logging
import os
import subprocess

from hf_compat.runtime.launch import slurm_job_id

logger = logging.getLogger(__name__)

# Beside the checkpoints: the job that has to go on from the newest of them.
REQUEUED_NAME = "requeued.json"


def requeue(folder: str) -> None:
    """Ask SLURM to queue this job again, and note in the output folder that it has to go on.

    A refusal is told, not raised: the checkpoint is written, and the job may be queued by hand.
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
    """Tell whether this job was put back into the queue while it trained into that folder."""
    path = os.path.join(folder, REQUEUED_NAME)
    if slurm_job_id() is None or not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            return bool(json.load(file)["job"] == slurm_job_id())
    except (ValueError, KeyError, TypeError):
        logger.warning("%s cannot be read; training starts anew.", path)
        return False


def forget(folder: str) -> None:
    """Note that the job has nothing to go on with: its training has ended."""
    if is_requeued(folder):
        os.unlink(os.path.join(folder, REQUEUED_NAME))
