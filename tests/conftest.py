"""Shared set-up: one thread (parity is bit for bit), and no state left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import warnings

from warm_python import variables

variables.take()  # before any package reads them

import pytest
import torch

pytest_plugins = ["selection", "suspects", "warm_python.session"]

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # this was started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def imports_left_to_themselves():
    """Keep what is imported out of collections: transformers makes one a `train()`, of 0.4 s with all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    linear = torch.nn.functional.linear
    torch.set_num_threads(1)  # Lightning's launchers set more, and a fork of such a process may hang
    _let_loggers_speak()
    yield
    left = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    for name in {*left, *(environment.keys() - os.environ.keys())}:
        if name.startswith(
            ("PYTEST_", "TORCH", "PYTORCH_", "KMP_")
        ):  # a package has set it for as long as it is loaded
            continue
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    _end_wandb()
    _forget_compiled()
    _give_loaders_back()
    torch.nn.functional.linear = linear  # DeepSpeed's ZeRO 3 leaves its own, which nothing compiles
    torch.use_deterministic_algorithms(False)
    assert signal.getsignal(signal.SIGINT) is handler
    ours = {"CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"}
    assert not ours & left.keys(), "of the package, which puts them back"


def _end_wandb() -> None:
    """End the process that wandb starts for its first run: it lives as long as this one, with that run's settings."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and hasattr(wandb, "teardown"):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it may make one where it is called
            if getattr(wandb, "run", None) is not None:  # an open one would go on writing what later tests print
                wandb.finish()
            wandb.teardown()


def _forget_compiled() -> None:
    """Let the next test compile: torch stops compiling a function that was compiled too often in one process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _give_loaders_back() -> None:
    """Undo what Lightning does to torch's classes while it makes loaders. An error on the way leaves it."""
    for kind in (torch.utils.data.DataLoader, torch.utils.data.BatchSampler):
        for name in ("__init__", "__setattr__", "__delattr__"):
            if (own := vars(kind).get(f"__old{name}")) is not None:
                setattr(kind, name, own)
                delattr(kind, f"__old{name}")


def _let_loggers_speak() -> None:
    """Undo what an earlier test, or a package that it has imported, has done to our loggers.

    Only what differs is set: setting a level empties the caches of the thousands of loggers of all packages.
    """
    if logging.root.manager.disable != logging.NOTSET:
        logging.disable(logging.NOTSET)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("hf_compat") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if logger.level != logging.NOTSET:
                logger.setLevel(logging.NOTSET)


@pytest.fixture
def told(recwarn):
    """The package's warnings so far, as one text. What is told once is told again in every test."""
    from hf_compat.errors import HfCompatWarning, warn_once

    warn_once.cache_clear()
    warnings.simplefilter("always")
    return lambda: "\n".join(str(one.message) for one in recwarn if issubclass(one.category, HfCompatWarning))


@pytest.fixture
def make_args(tmp_path):
    """Training arguments for a short run on the CPU."""
    from hf_compat import TrainingArguments

    def make(**values):
        base = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
        }
        return TrainingArguments(**{**base, **values})

    return make
