"""A folder as `Accelerator.save_state` writes it: names of its files, writing and reading. Files and tensors only.

What is written is put into place when all of it is written; what is read is read before any of it is used. Nothing is
unpickled but tensors and plain containers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

import torch

from hf_compat.checkpoint.forms import check_random_states
from hf_compat.checkpoint.lightning_io import write_weights
from hf_compat.checkpoint.pickles import Plain
from hf_compat.checkpoint.plain_values import readable_state
from hf_compat.checkpoint.reading import Weights, plain_names, read_torch_file, read_weights_file
from hf_compat.checkpoint.torch_writer import save_torch
from hf_compat.errors import CheckpointError
from hf_compat.runtime.rng import RandomStates, legacy_globals, pack_legacy_rng, read_rng, unpack_rng

_WAYS_OUT = (
    "Hint: name a folder that `accelerator.save_state` has written with as many models and optimizers; from a "
    "checkpoint of the Trainer `trainer.train(resume_from_checkpoint=…)` goes on."
)


def numbered(name: str, index: int) -> str:
    """Return the name of a file of the first, or of a further, object of a kind: `model.bin`, `model_1.bin`."""
    stem, dot, suffix = name.rpartition(".")
    return name if index == 0 else f"{stem}_{index}{dot}{suffix}"


class StateFolder:
    """A folder of states.

    Args:
        path: The folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._written: list[str] = []

    def write_weights(self, weights: Weights, index: int, safe: bool) -> None:
        """Write a model's weights, with safetensors or torch."""
        if safe:
            self._write(numbered("model.safetensors", index), lambda path: write_weights(weights, path))
        else:
            self.write_torch(plain_names(weights), numbered("pytorch_model.bin", index))

    def write_torch(self, content: Plain, name: str) -> None:
        """Write tensors and plain containers."""
        self._write(name, lambda path: save_torch(content, path))

    def write_object(self, content: Plain, index: int, whose: str) -> None:
        """Write the state of an object of the script's own.

        Raises:
            CallbackError: It could not be read back.
        """
        self.write_torch(readable_state(content, f"The state of {whose}"), numbered_object(index))

    def write_random_states(self, rank: int, step: int) -> None:
        """Write the states of this process's random generators, and how often `accumulate` was entered."""
        states = unpack_rng(read_rng())
        content = {
            "step": step,
            "random_state": states["python"],
            "numpy_random_seed": states["numpy"],
            "torch_manual_seed": states["cpu"],
        }
        if torch.cuda.is_available():
            content["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
        self._write(_random_states(rank), lambda path: torch.save(content, path))

    def _write(self, name: str, write: Callable[[str], None]) -> None:
        os.makedirs(self.path, exist_ok=True)
        self._written.append(name)
        write(self._hidden(name))

    def _hidden(self, name: str) -> str:
        return os.path.join(self.path, f".{name}.partial")

    def land(self) -> None:
        """Put into place what is written."""
        for name in self._written:
            os.replace(self._hidden(name), os.path.join(self.path, name))
        self._written.clear()

    def discard(self) -> None:
        """Remove what is written and not in its place."""
        for name in self._written:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._hidden(name))
        self._written.clear()

    def read_weights(self, index: int) -> Weights:
        """Read a model's weights; `module.`, which DDP puts before names, is taken off.

        Raises:
            CheckpointError: There are none, or they are damaged.
        """
        path = self._find(numbered("model.safetensors", index), numbered("pytorch_model.bin", index))
        weights = plain_names(read_weights_file(path))
        if all(name.startswith("module.") for name in weights):
            return {name.removeprefix("module."): tensor for name, tensor in weights.items()}
        return weights

    def read_torch(self, name: str) -> tuple[str, Plain]:
        """Return a file's path and what is in it.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        path = self._find(name)
        return path, read_torch_file(path, allowed=legacy_globals())

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return os.path.isfile(os.path.join(self.path, name))

    def count_objects(self) -> int:
        """Count the states of objects of the script's own."""
        known = (name for name in os.listdir(self.path) if name.startswith("custom_checkpoint_"))
        return sum(name.endswith(".pkl") for name in known)

    def read_random_states(self, rank: int) -> tuple[RandomStates, int] | None:
        """Return a process's random states, and how often `accumulate` was entered; None where it has none.

        Raises:
            CheckpointError: They are damaged.
        """
        if not self.has(_random_states(rank)):
            return None
        path, content = self.read_torch(_random_states(rank))
        if not isinstance(content, Mapping) or "torch_manual_seed" not in content:
            raise CheckpointError(f"{path} cannot be used: it holds no random states.")
        states = {
            "python": content.get("random_state"),
            "numpy": content.get("numpy_random_seed"),
            "cpu": content["torch_manual_seed"],
        }
        check_random_states(path, states)
        cuda = content.get("torch_cuda_manual_seed")
        if cuda and torch.cuda.is_available():
            states["cuda"] = cuda[min(torch.cuda.current_device(), len(cuda) - 1)]
        return pack_legacy_rng(states), int(content.get("step", 0))

    def _find(self, *candidates: str) -> str:
        found = next(filter(self.has, candidates), None)
        if found is None:
            raise CheckpointError(f"{self.path} has no {' and no '.join(candidates)}.\n\n{_WAYS_OUT}")
        return os.path.join(self.path, found)


def numbered_object(index: int) -> str:
    """Return the name of the file of an object of the script's own."""
    return f"custom_checkpoint_{index}.pkl"


def _random_states(rank: int) -> str:
    return f"random_states_{rank}.pkl"
