"""Shapes and types of a checkpoint's weights, read from headers: what does not fit a model is known first.

Files and torch only; no weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import safetensors
import torch

from hf_compat.checkpoint import layout as names
from hf_compat.checkpoint.contents import Contents
from hf_compat.checkpoint.files import check_regular, first_line
from hf_compat.checkpoint.forms import misfits, weights_that_torch_loads
from hf_compat.checkpoint.reading import COMPILED, shard_names
from hf_compat.errors import CheckpointError

Shapes = dict[str, tuple[list[int], bool]]  # by weight: its shape, and whether it has floating-point numbers


def weight_shapes(path: str) -> Shapes:
    """Return what the header of a safetensors file says of each of its weights.

    Raises:
        CheckpointError: The file is damaged, or lies about its weights.
    """
    check_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # it compares the header with the file's size
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {
                name: (list(one.get_shape()), one.get_dtype().startswith(("F", "BF"))) for name, one in slices.items()
            }
    except Exception as error:  # safetensors raises what it likes
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def misfitting_weights(
    folder: str, model: torch.nn.Module, adapter: str | None = None, subfolder: str = ""
) -> Iterator[str]:
    """Yield what is wrong with a folder's safetensors for a model; weights that are missing are warned of elsewhere.

    Args:
        folder: The checkpoint.
        model: The model.
        adapter: The name of the adapter that the folder holds, for a model of PEFT.
        subfolder: Where in the folder that adapter is.
    """
    compared = [(_plain(name, adapter), tensor) for name, tensor in weights_that_torch_loads(model).items()]
    contents = Contents(folder)
    try:
        for name in _files(contents, adapter, subfolder):
            stored = {_plain(key, None): facts for key, facts in weight_shapes(contents.need(name)).items()}
            if not stored and compared:
                yield f"{name} holds no weights"
            for wrong in misfits(stored, compared)[:3]:
                yield f"{name} does not fit the model: {wrong}"
    except CheckpointError as error:
        yield first_line(error).removesuffix(".")


def stored_names(folder: str) -> set[str]:
    """Return the names of the weights in a folder's safetensors."""
    contents = Contents(folder)
    return {key for name in _files(contents, None, "") for key in weight_shapes(contents.need(name))}


def missing_adapter_weights(folder: str, model: torch.nn.Module, adapter: str, subfolder: str = "") -> list[str]:
    """List an adapter's weights that a folder does not hold: PEFT leaves them as they are and says nothing."""
    contents = Contents(folder)
    files = _files(contents, adapter, subfolder)
    stored = {_plain(key, None) for name in files for key in weight_shapes(contents.need(name))}
    own = [_plain(name, adapter) for name in model.state_dict() if f".{adapter}." in name and ".lora_" in name]
    return [name for name in own if name not in stored] if stored else []


def _plain(name: str, adapter: str | None) -> str:
    name = name.replace(COMPILED, "")
    return name if adapter is None else name.replace(f".{adapter}.", ".", 1)


def _files(contents: Contents, adapter: str | None, subfolder: str) -> list[str]:
    """List the safetensors files of which a folder's weights consist."""
    before = f"{subfolder}/" if subfolder else ""
    single = names.ADAPTER_SAFE_WEIGHTS_NAME if adapter is not None else names.SAFE_WEIGHTS_NAME
    if contents.find(before + single) is not None:
        return [before + single]
    index = contents.find(names.SAFE_WEIGHTS_INDEX_NAME) if adapter is None else None
    return [] if index is None else shard_names(index)
