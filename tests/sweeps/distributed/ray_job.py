"""`job.py` in two workers of Ray Train, which starts them again once after a failure.

ray_job.py FOLDER [name=value …]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])


def work(config: dict) -> None:
    sys.path.insert(0, TESTS)
    from helpers.jobs import job

    sys.argv = ["job.py", *config["words"]]
    job.main()


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder, *words = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            work,
            train_loop_config={"words": [os.path.abspath(folder), *words]},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
        ).fit()


if __name__ == "__main__":
    main()
