"""What a subclass of `HFModule` has, and its updates would leave out: refused before training."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric

from hf_compat.errors import OverrideError, warn_once

# Hooks that Lightning calls in automatic optimization only, and what does the same in an HFModule.
_OF_AUTOMATIC_OPTIMIZATION = {
    "optimizer_step": "change gradients or rates in `on_before_optimizer_step`, or the optimizer in "
    "`configure_optimizers`",
    "optimizer_zero_grad": "use `on_before_zero_grad`",
    "configure_gradient_clipping": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "clip_gradients": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "lr_scheduler_step": "return a schedule with its `interval` and `frequency` from `configure_optimizers`",
}


def overrides_automatic_hooks(module: pl.LightningModule, base: type[pl.LightningModule]) -> bool:
    """Whether a subclass has hooks of its own that Lightning calls in automatic optimization only."""
    return any(_is_own(module, base, name) for name in _OF_AUTOMATIC_OPTIMIZATION)


def _is_own(module: pl.LightningModule, base: type[pl.LightningModule], name: str) -> bool:
    hook = getattr(module, name)
    return getattr(hook, "__func__", hook) is not getattr(base, name)


def refuse_unused_hooks(module: pl.LightningModule, base: type[pl.LightningModule]) -> None:
    """Refuse hooks of a subclass that take a part of the update: Lightning calls them in automatic optimization only.

    Raises:
        OverrideError: One is overridden; the message names it and what does the same.
    """
    for name, hint in _OF_AUTOMATIC_OPTIMIZATION.items():
        if _is_own(module, base, name):
            raise OverrideError(
                f"`{name}` of {type(module).__name__} would never be called: an HFModule makes its updates itself.\n\n"
                f"Hint: {hint}; or set `automatic_optimization = True`, which leaves the updates to Lightning."
            )


def trained_names(module: pl.LightningModule) -> dict[str, nn.Parameter]:
    """Return the parameters that are to be trained, by name; those of metrics are their own."""
    metrics = [part for name, part in module.named_modules() if isinstance(part, Metric) or name == "compute_metrics"]
    of_metrics = {id(parameter) for metric in metrics for parameter in metric.parameters()}
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) not in of_metrics}


def names_beside(module: pl.LightningModule, model: nn.Module) -> list[str]:
    """Return the names of parameters that are to be trained, and are no part of the model."""
    inside = {id(parameter) for parameter in model.parameters()}
    return [name for name, parameter in trained_names(module).items() if id(parameter) not in inside]


def tell_of_untrained(module: pl.LightningModule, names: Sequence[str]) -> None:
    """Warn once of parts beside the model that the update under way does not reach: nothing calls them."""
    parameters = dict(module.named_parameters())
    without = [name for name in names if name in parameters and parameters[name].grad is None]
    if without:
        warn_once(
            f"{type(module).__name__} has parameters beside `model` that its loss does not depend on: "
            f"{_shown(without)}. They stay as they are.\n\n"
            "Hint: call them in `forward`, `compute_loss` or `training_step`, or freeze them (`requires_grad_(False)`)."
        )


def refuse_late(module: pl.LightningModule, optimized: frozenset[int]) -> None:
    """Refuse parameters that came when the optimizer was made already.

    Args:
        module: Whose parameters are looked at.
        optimized: The ids of the parameters that the optimizer was made for.

    Raises:
        OverrideError: There are some; the message names them.
    """
    groups = (group for optimizer in module.trainer.optimizers for group in optimizer.param_groups)
    known = optimized | {id(parameter) for group in groups for parameter in group["params"]}
    late = [name for name, parameter in trained_names(module).items() if id(parameter) not in known]
    if late:
        raise OverrideError(
            f"Parameters of {type(module).__name__} were added, or thawed, after its optimizer was made, which does "
            f"not hold them: {_shown(late)}.\n\n"
            "Hint: add and thaw them in `__init__`, `setup` or `configure_model`, or add a group to the optimizer."
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
