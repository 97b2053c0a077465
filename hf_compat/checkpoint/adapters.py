"""Read adapters of PEFT. `default` is in the checkpoint's folder itself, others are in subfolders of their names.

PEFT opens the files itself, so they are checked first.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from hf_compat.checkpoint import layout
from hf_compat.checkpoint.files import read_json
from hf_compat.checkpoint.reading import COMPILED, Contents, plain_names, read_weights_file, weight_files
from hf_compat.checkpoint.validation import check_weights, weight_names
from hf_compat.errors import CheckpointError

logger = logging.getLogger(__name__)

PeftModel = Any  # `peft.PeftModel`, which may be absent
_DEFAULT = "default"  # PEFT's name for an adapter without one


def load_adapters(model: PeftModel, folder: str, strict: bool = False) -> list[str]:
    """Load each adapter of a model that a checkpoint holds. The active and trained ones stay the same.

    Returns:
        The weights that the checkpoint lacks, which PEFT leaves as they are. A warning names them.

    Raises:
        CheckpointError: PEFT, which does not know manifests, should not read an adapter; or the checkpoint lacks
            weights, and `strict` is set.
        CheckpointMismatch: An adapter does not fit the model.

    Mirrors:
        `transformers.Trainer._load_from_checkpoint`.

    Differs:
        Upstream makes an adapter of every subfolder that holds one. Here the model's own are loaded.
    """
    contents, known, missing = Contents(folder), list(model.peft_config), list[str]()
    # The subfolder of each adapter. A single one is in the folder itself, under any name
    places = {name: name for name in known if weight_files(contents, name)}
    has_root = bool(weight_files(contents, ""))
    if places and has_root and _DEFAULT in known:
        places = {_DEFAULT: "", **places}
    elif not places:
        others = [] if has_root else _subfolders_with_adapters(contents)
        if others:
            raise CheckpointError(
                f"{folder} holds the adapters {', '.join(others)}; the model has {', '.join(known)}.\n\n"
                "Hint: give the model's adapters the names that they had."
            )
        places = {next(iter(model.active_adapters)): ""}
    for adapter, subfolder in places.items():  # PEFT reads none before all are checked
        before = f"{subfolder}/" if subfolder else ""
        names = [before + name for name in layout.ADAPTER_WEIGHTS if os.path.lexists(contents.folder / (before + name))]
        read_json(contents.need(before + layout.ADAPTER_CONFIG_NAME))
        stored: set[str] = set()
        for name in names or [before + layout.ADAPTER_SAFE_WEIGHTS_NAME]:
            weights = plain_names(read_weights_file(contents.need(name)))  # PEFT's own errors do not name the file
            check_weights(folder, weights, model, name, adapter)
            stored |= weights.keys()
        own = [name.replace(COMPILED, "") for name in model.state_dict() if f".{adapter}." in name and ".lora_" in name]
        missing += [plain for name in own if (plain := name.replace(f".{adapter}.", ".", 1)) not in stored]
    if missing and strict:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of the adapter: {', '.join(missing[:3])}.")
    for adapter, subfolder in places.items():
        model.load_adapter(os.path.join(folder, subfolder) if subfolder else folder, adapter, True)
    if missing:
        logger.warning("There were missing keys in the checkpoint model loaded: %s.", missing)
    return missing


def holds_adapters(folder: str) -> bool:
    """Whether a checkpoint holds adapters in place of whole weights."""
    contents = Contents(folder)
    has_root = contents.find(layout.ADAPTER_CONFIG_NAME) is not None
    has_weights = any(os.path.lexists(contents.folder / name) for name in layout.WHOLE_WEIGHTS)
    return has_root or (not has_weights and bool(_subfolders_with_adapters(contents)))


def holds_whole_model(folder: str, model: PeftModel) -> bool:
    """Whether a folder holds a model's base and its adapters in one piece, as a Lightning checkpoint does."""
    if holds_adapters(folder):
        return False
    adapters = [f".{name}." for name in model.peft_config]
    own = {name for name in model.state_dict() if any(adapter in name for adapter in adapters)}
    contents = Contents(folder)
    files = [name for name in weight_files(contents) if name.endswith(".safetensors")]
    return bool(own) and own <= {name for file in files for name in weight_names(contents.need(file))}


def _subfolders_with_adapters(contents: Contents) -> list[str]:
    inside = sorted(path.name for path in contents.folder.iterdir() if path.is_dir())
    return [name for name in inside if weight_files(contents, name)]
