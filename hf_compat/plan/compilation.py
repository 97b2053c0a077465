"""What `torch_compile` and `accelerate launch --dynamo_backend` ask for, as keywords of `torch.compile`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_compat.errors import ArgumentError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.runtime.launch import launcher_variables
from hf_compat.runtime.text import did_you_mean, parse_switch, shown

_VARIABLE = "ACCELERATE_DYNAMO_"
# Accelerate's word for no compilation.
OFF = "no"
_DEFAULT_MODE = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """How a model is compiled.

    Args:
        backend: One that torch has, or that somebody has registered with it.
        mode: Its mode.
        fullgraph: Refuse a model that falls into several graphs.
        dynamic: Trace sizes as symbols; None lets torch find out.
        by_blocks: Compile repeated blocks one by one, which starts sooner.

    Mirrors:
        `accelerate.utils.TorchDynamoPlugin`, 1.15.
    """

    backend: str
    mode: str = _DEFAULT_MODE
    fullgraph: bool = False
    dynamic: bool | None = None
    by_blocks: bool = False

    def keywords(self) -> dict[str, str | bool]:
        """Return the keywords of `torch.compile` that differ from its defaults."""
        found: dict[str, str | bool] = {"backend": self.backend}
        if self.mode != _DEFAULT_MODE:
            found["mode"] = self.mode
        if self.fullgraph:
            found["fullgraph"] = True
        if self.dynamic is not None:
            found["dynamic"] = self.dynamic
        return found


def compilation_of(args: TrainingArguments) -> Compilation | None:
    """Return how the model is compiled; None where it is not.

    Args:
        args: The arguments; where they say nothing, the variables of `accelerate launch` count.

    Raises:
        ArgumentError: torch has no such backend, or no such mode.
    """
    variables = launcher_variables()
    by_arguments = (args.torch_compile_backend or "inductor") if args.torch_compile else None
    backend = (by_arguments or variables.get(_VARIABLE + "BACKEND") or OFF).lower()
    if backend in (OFF, "none"):
        return None
    name = "torch_compile_backend" if by_arguments else _VARIABLE + "BACKEND"
    known = sorted(torch.compiler.list_backends(exclude_tags=()))
    if backend not in known:
        hint = did_you_mean(backend, known, f"choose one of {', '.join(known)}.")
        raise ArgumentError(f"`{shown(name, backend)}` is no backend of torch.compile.\n\nHint: {hint}")
    mode = args.torch_compile_mode or variables.get(_VARIABLE + "MODE") or _DEFAULT_MODE
    if backend == "inductor":
        name = "torch_compile_mode" if args.torch_compile_mode else _VARIABLE + "MODE"
        from torch._inductor import list_mode_options  # slow: only where something is compiled

        known = sorted(list_mode_options())
        if mode not in known:
            raise ArgumentError(
                f"`{shown(name, mode)}` is no mode of torch.compile.\n\nHint: choose one of {', '.join(known)}."
            )
    dynamic = _VARIABLE + "USE_DYNAMIC"
    return Compilation(
        backend=backend,
        mode=mode,
        fullgraph=parse_switch(variables, _VARIABLE + "USE_FULLGRAPH"),
        dynamic=parse_switch(variables, dynamic) if dynamic in variables else None,
        by_blocks=parse_switch(variables, _VARIABLE + "USE_REGIONAL_COMPILATION"),
    )
