"""Whether a loss depends on the number of items by which it is to be divided.

transformers passes `num_items_in_batch` to whatever takes it, and does not divide by the micro-batches then. Code that
ignores the number gives losses and gradients that are too large, by the number of micro-batches.
"""

from __future__ import annotations

from collections import deque

import torch


class CountQuestion:
    """Passes the number as a tensor with a gradient, which keeps all values, and looks for it behind the loss."""

    def __init__(self, items: torch.Tensor) -> None:
        self.items = items.detach().clone().requires_grad_()

    def is_in(self, loss: object) -> bool:
        """Whether the loss was computed from the number."""
        if not isinstance(loss, torch.Tensor):
            return False
        # nearest first, as the number is among the last operations
        waiting, seen = deque([loss.grad_fn]), set()
        while waiting:
            node = waiting.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            if getattr(node, "variable", None) is self.items:  # only a leaf's node has it
                return True
            waiting.extend([following for following, _ in node.next_functions])
        return False
