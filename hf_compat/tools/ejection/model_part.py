"""The statements that make the model of the run, and the weights that it begins with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, cast

import safetensors.torch
import torch
from torch import nn

from hf_compat.interop.transformers_models import is_peft_model, is_pretrained_model
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.sources import Import
from hf_compat.trainer import Trainer

# Entries of a configuration about the files that it was read from.
_OF_FILES = {"_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


class _Pretrained(Protocol):
    peft_config: dict[str, object]
    save_pretrained: Callable[[str | Path], None]
    from_pretrained: Callable[..., nn.Module]
    unload: Callable[[], nn.Module]


@dataclass
class ModelPart:
    """The body of `build_model`."""

    lines: list[str]
    trained: list[str] | None  # the names of the trained parameters, unless all are or the class itself sees to it
    model_is_left: bool = False  # whether the statements only raise, because the model is left to the user


def describe_model(trainer: Trainer, write: Expressions, findings: Findings) -> ModelPart:
    """Find out how the model is made again, or leave it to the user.

    The chosen way is tried at once, and must give the run's model, weight for weight.
    """
    model, args = trainer.model, trainer.args
    write.import_(Import("torch", "nn", "nn"))
    trained: list[str] | None = None
    try:
        if is_peft_model(model):
            # The statements that read a model and the adapter of PEFT on it
            adapted = cast(_Pretrained, model)
            if len(adapted.peft_config) > 1:
                raise CannotBeWritten("it has several adapters, and the project reads one")
            bare = copy.deepcopy(adapted).unload()
            lines = _pretrained("base", bare, write)
            with TemporaryDirectory() as folder:
                adapted.save_pretrained(folder)
                _check_same(model, adapted.from_pretrained(copy.deepcopy(bare), folder, is_trainable=True))
            file = write.files.add("adapter", model, adapted.save_pretrained)
            name = write.named("peft", "PeftModel")
            lines.append(f"model = {name}.from_pretrained(base, {write.here(file)}, is_trainable=True)")
        else:
            weights = list(model.named_parameters())
            frozen = not all(parameter.requires_grad for _, parameter in weights)
            trained = [name for name, parameter in weights if parameter.requires_grad] if frozen else None
            lines = _saved_or_made(model, write)
    except CannotBeWritten as error:
        what = f"The model, a {type(model).__name__} ({write.code.where(type(model))}), cannot be made again: {error}"
        return ModelPart(findings.leave(what, "`build_model` in `model.py`"), None, model_is_left=True)
    if args.activation_checkpointing:
        options = write.of(args.activation_checkpointing_kwargs) if args.activation_checkpointing_kwargs else ""
        lines.append(f"model.gradient_checkpointing_enable({options})")
        if is_peft_model(model):
            lines.append("model.enable_input_require_grads()  # frozen embeddings would end the way back")
    return ModelPart(lines, trained)


def _saved_or_made(model: nn.Module, write: Expressions) -> list[str]:
    """The statements that read a model of transformers, or make any other. Some subclasses cannot be saved."""
    if not is_pretrained_model(model):
        return _plain(model, write)
    try:
        return _pretrained("model", model, write)
    except CannotBeWritten:
        raise
    except Exception as error:  # of transformers or of the script's class, such as tied weights that it does not name
        try:
            return _plain(model, write)
        except CannotBeWritten as other:
            said = str(error).partition("\n")[0][:200]
            raise CannotBeWritten(f"as a model of transformers: {said}; as the script makes it: {other}") from error


def _pretrained(name: str, model: nn.Module, write: Expressions) -> list[str]:
    saved = cast(_Pretrained, model)
    with TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        again = saved.from_pretrained(folder)
    _check_same(model, again)
    file = write.files.add("model", model, saved.save_pretrained)
    made = f"{name} = {write.of(type(model))}.from_pretrained({write.here(file)})"
    return [made, *_options_of_parts(name, model, again)]


def _options_of_parts(name: str, model: nn.Module, again: nn.Module) -> list[str]:
    """The statements for entries of a part's configuration that differ in the model that was read back.

    A part's configuration is a copy of the model's from when that was made. The Trainer sets `use_cache` only in the
    model's, so a decoder keeps its cache, which changes the last bits of gradients.
    """
    lines: list[str] = []
    seen: set[int] = set()
    parts = dict(again.named_modules())
    for path, part in model.named_modules():
        config, other = getattr(part, "config", None), getattr(parts.get(path), "config", None)
        if not path or config is None or other is None or id(config) in seen:
            continue
        seen.add(id(config))
        said, read = vars(config), vars(other)
        place = path if all(word.isidentifier() for word in path.split(".")) else f'get_submodule("{path}")'
        for option in sorted(said.keys() & read.keys() - _OF_FILES):
            value = said[option]
            if isinstance(value, (bool, int, float, str)) and value != read[option]:
                setattr(other, option, value)  # parts may share it
                lines.append(f"{name}.{place}.config.{option} = {value!r}")
    return lines


def _plain(model: nn.Module, write: Expressions) -> list[str]:
    """The statements that make a module as the script does, and read the weights that it had."""
    given = write.recorder.arguments_of(model)
    if given is None:
        raise CannotBeWritten("the making of it was not recorded")
    write.loads_weights = False
    # A model of transformers would be saved and read
    made = write.call(type(model), given) if is_pretrained_model(model) else write.of(model)
    kind: Callable[..., nn.Module] = type(model)
    again = kind(*map(_copied, given[0]), **{name: _copied(one) for name, one in given[1].items()})
    _check_same(model, again, values=False)
    file = write.files.add("model.safetensors", model, lambda path: safetensors.torch.save_model(model, str(path)))
    load = write.named("safetensors.torch", "load_model")
    return [f"model = {made}", f"{load}(model, {write.here(file)})"]


def _copied(value: object) -> object:
    """Copy an argument as the project makes it: part by part, so that no two share a weight."""
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))  # type: ignore[call-arg,call-overload]  # as just seen
    return copy.deepcopy(value)


def _check_same(model: nn.Module, other: nn.Module, values: bool = True) -> None:
    """Check that two models have the same modules with the same tensors."""
    # By every name: a tied embedding may be one module, or two with one weight
    both = (model, other)
    kinds, others = ({n: type(one).__name__ for n, one in m.named_modules(remove_duplicate=False)} for m in both)
    if kinds != others:
        name = next(name for name in [*kinds, *others] if kinds.get(name) != others.get(name))
        raise CannotBeWritten(f"its module {name!r} was put in place, or taken out, after it was made")
    if _shared(model) != _shared(other):
        raise CannotBeWritten("some of its weights were tied after it was made")
    mine, its = model.state_dict(), other.state_dict()
    for name in [*mine, *(name for name in its if name not in mine)]:
        same_form = name in mine and name in its and mine[name].shape == its[name].shape
        if not same_form or mine[name].dtype != its[name].dtype:
            raise CannotBeWritten(f"its weight {name!r} has another form after it is made again")
        if values and not torch.equal(mine[name].cpu(), its[name].cpu()):
            raise CannotBeWritten(f"its weight {name!r} has other values after it is saved and read")


def _shared(model: nn.Module) -> list[list[str]]:
    """List the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [alike for alike in names.values() if len(alike) > 1]
