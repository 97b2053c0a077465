"""Layerwise optimizers: one for each parameter, stepped as soon as its gradient is there.

Gradients of the whole model are never there at once, which saves their memory. Torch, Lightning and HF's callbacks see
one optimizer and one schedule that stand for all, and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle


class LayerWiseDummyOptimizer(Optimizer):
    """Stand for the optimizers of single parameters; `step` and `zero_grad` do nothing.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The learning rate that a schedule begins with.
        keywords: Not used, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyOptimizer`, 5.23.

    Differs:
        It owns the hooks that step, so that they are put on the parameters once, and taken off again.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, lr: float = 1e-3, **keywords: object
    ) -> None:
        self.optimizer_dict = dict(optimizer_dict or {})
        self.schedulers: dict[nn.Parameter, LRScheduler] = {}
        self._handles: list[RemovableHandle] = []
        # a random number, as upstream: dropout draws from the same place
        super().__init__([torch.randn(1, 1)], {"lr": lr})

    def attach_hooks(self) -> None:
        """Let every parameter be stepped once its gradient is there; nothing is done where the hooks are in place."""
        if self._handles:
            return
        for parameter in self.optimizer_dict:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]  # torch's
                self._handles.append(handle)

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _step_one(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)  # a key of the dict
        optimizer = self.optimizer_dict[parameter]
        optimizer.step()
        optimizer.zero_grad()
        schedule = self.schedulers.get(parameter)
        if schedule is not None:
            schedule.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each gradient is gone once its parameter was stepped."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure only, which Lightning's automatic optimization steps by; the hooks have stepped."""
        return None if closure is None else closure()


class LayerWiseDummyScheduler(LRScheduler):
    """Stand for the schedules of single parameters; its rate is that of the first one.

    Args:
        optimizer_dict: Each parameter's optimizer.
        lr: The rate that is given where there is none.
        keywords: Not used, as upstream.

    Mirrors:
        `transformers.trainer_pt_utils.LayerWiseDummyScheduler`, 5.23.

    Differs:
        One rate for the one group that it has: from torch 2.9 on, torch refuses the list of all.
    """

    def __init__(
        self, optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None, *, lr: float, **keywords: object
    ) -> None:
        self.default_lr = lr
        stand_in = LayerWiseDummyOptimizer(optimizer_dict, lr=lr)
        stand_in._opt_called = True  # type: ignore[attr-defined]  # torch asks whether it has stepped: hooks have
        super().__init__(stand_in, -1)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of the first parameter."""
        assert isinstance(self.optimizer, LayerWiseDummyOptimizer)
        groups = chain.from_iterable(one.param_groups for one in self.optimizer.optimizer_dict.values())
        return [next((group["lr"] for group in groups), self.default_lr)]

    def _get_closed_form_lr(self) -> list[float | torch.Tensor]:
        return self.base_lrs
