"""Train in Ray Train with transformers' Trainer, ours and an `HFModule`, compare, and kill a worker.

    python tests/sweeps/ray/run.py

A command of its own: Ray is in no other test's environment, and each job takes half a minute. It needs
the extra `ray`.
The status is 1 where a number differs.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])
STEPS = 4


def arguments(api, folder: str) -> object:
    return api.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, save_strategy="steps", save_steps=2, logging_steps=1,
        learning_rate=1e-2, use_cpu=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip


def prepared(package: str):
    """Return a package and what is trained; the same on every worker."""
    import torch

    sys.path.insert(0, TESTS)
    from helpers import toy

    torch.set_num_threads(1)
    api = importlib.import_module(package)
    api.set_seed(3)
    return api, toy.Classifier(dropout=0.0), toy.rows()


def train_by_trainer(config: dict) -> None:
    import ray.train
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    api, model, rows = prepared(config["package"])
    marker = Path(config["out"]) / "has_died"

    class Die(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if config["kill"] and state.global_step == 3 and args.process_index == 1 and not marker.exists():
                marker.touch()
                time.sleep(10)  # Ray takes note of what was reported at update 2
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = api.Trainer(model, arguments(api, config["out"]), train_dataset=rows, callbacks=[Die()])
    trainer.add_callback(RayTrainReportCallback())
    trainer = prepare_trainer(trainer)
    reported = ray.train.get_checkpoint()
    began = []
    trainer.add_callback(type("Begin", (api.TrainerCallback,), {
        "on_train_begin": lambda self, args, state, control, **_: began.append(state.global_step)})())  # fmt: skip
    if reported is None:
        trainer.train()
    else:
        with reported.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME))
    if trainer.is_world_process_zero():
        logs = [log for log in trainer.state.log_history if "loss" in log]
        (Path(config["out"]) / "found.json").write_text(json.dumps({"logs": logs, "began": began}))


def train_by_lightning(config: dict) -> None:
    import lightning
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    api, model, rows = prepared("hf_compat")
    args = arguments(api, config["out"])
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices="auto", strategy=RayDDPStrategy(), logger=False,
        plugins=[RayLightningEnvironment()], callbacks=[RayTrainReportCallback()], enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=config["out"],
    )  # fmt: skip
    trainer = prepare_trainer(trainer)
    trainer.fit(api.HFModule(model, args), api.HFDataModule(args, rows))


def weights_of(checkpoint) -> dict:
    """Read the weights of a checkpoint that was reported."""
    import torch
    from safetensors.torch import load_file

    folder = Path(checkpoint.path)
    if (folder / "checkpoint.ckpt").exists():
        state = torch.load(folder / "checkpoint.ckpt", weights_only=False)["state_dict"]
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}
    return load_file(folder / "checkpoint" / "model.safetensors")


def main() -> int:
    import ray
    import torch
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver="--verbose" in sys.argv)
    root = Path(tempfile.mkdtemp(prefix="hf_compat_ray_"))
    jobs = {
        "transformers": (train_by_trainer, {"package": "transformers", "kill": False}),
        "hf_compat": (train_by_trainer, {"package": "hf_compat", "kill": False}),
        "hf_compat, a worker killed": (train_by_trainer, {"package": "hf_compat", "kill": True}),
        "HFModule in lightning.Trainer": (train_by_lightning, {}),
    }
    found, weights = {}, {}
    for number, (name, (function, config)) in enumerate(jobs.items()):
        out = root / str(number)
        out.mkdir()
        storage = RunConfig(storage_path=str(root), name=f"r{number}", failure_config=FailureConfig(max_failures=1))
        told = {**config, "out": str(out)}
        result = TorchTrainer(
            function, train_loop_config=told, scaling_config=ScalingConfig(num_workers=2), run_config=storage
        ).fit()
        weights[name] = weights_of(result.checkpoint)
        if (out / "found.json").exists():
            found[name] = json.loads((out / "found.json").read_text())
    reference, wrong = weights["transformers"], []
    for name, own in weights.items():
        if not all(torch.equal(own[key], reference[key]) for key in reference):
            wrong.append(f"{name}: other weights")
    for name, own in found.items():
        if own["logs"] != found["transformers"]["logs"]:
            wrong.append(f"{name}: other logs {own['logs']}")
    if found["hf_compat, a worker killed"]["began"] != [2]:
        wrong.append(f"the killed run began at {found['hf_compat, a worker killed']['began']}, not at update 2")
    for name in jobs:
        print(f"{name}: {'differs' if any(line.startswith(name) for line in wrong) else 'equal bit for bit'}")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
