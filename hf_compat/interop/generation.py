"""Generation configs of `transformers`: made from what arguments say, and read for the length of a generation."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hf_compat.errors import ArgumentError
from hf_compat.interop.releases import validate_strictly
from hf_compat.runtime.text import need, shown

# What `generate` takes by name.
GenerationKeywords: TypeAlias = dict[str, Any]


class GenerationConfig(Protocol):
    """What is used of `transformers.GenerationConfig`, 5.23."""

    max_length: int | None
    max_new_tokens: int | None
    _from_model_config: bool

    def validate(self, strict: bool = False) -> None: ...

    def update(self, defaults_only: bool = False, **options: object) -> object: ...

    def _get_default_generation_params(self) -> dict[str, object]: ...


def make_generation_config(source: object) -> GenerationConfig:
    """Return the generation config that an argument says.

    Args:
        source: A config, which is copied; its options as a dict; a JSON file, a folder, or a model's name.

    Raises:
        ArgumentError: It cannot be read, or its options contradict each other.
        MissingPackage: transformers is not installed.
    """
    need("transformers", "'hf-compat[transformers]'", "`generation_config`")
    config = _read(source)
    try:
        validate_strictly(config)
    except ValueError as error:
        raise ArgumentError(
            f"`generation_config`: {error}\n\n"
            "Fix these issues to train your model: one with such options cannot be saved."
        ) from error
    return config


def _read(source: object) -> GenerationConfig:
    from transformers import GenerationConfig as Config

    if isinstance(source, Config):
        return copy.deepcopy(source)
    if isinstance(source, Mapping):
        return Config(**source)
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if path is None:
        raise ArgumentError(
            f"`{shown('generation_config', source)}` is no GenerationConfig.\n\nHint: pass one, or a name or path."
        )
    folder, file = (path.parent, path.name) if path.is_file() else (path if path.is_dir() else source, None)
    try:
        return Config.from_pretrained(folder, file)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"`{shown('generation_config', source)}` cannot be read: {error}\n\n"
            "Hint: give a folder with generation_config.json, a JSON file, or the name of a model."
        ) from error


def length_of_generations(config: GenerationConfig) -> tuple[int, int | None]:
    """Return the lengths to which generations are filled up: `max_length`, and that of `max_new_tokens`.

    What the config leaves open becomes transformers' default in it.

    Mirrors:
        What `transformers.Seq2SeqTrainer.prediction_step` does to `model.generation_config`, 5.23.
    """
    # else each call of `generate` would make it anew from the model's configuration
    if config._from_model_config:
        config._from_model_config = False
    if hasattr(config, "_get_default_generation_params"):  # before 5.0 a config is made with the defaults
        config.update(**config._get_default_generation_params(), defaults_only=True)
    assert config.max_length is not None  # it has a default
    return config.max_length, None if config.max_new_tokens is None else config.max_new_tokens + 1
