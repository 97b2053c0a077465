"""The small model of the benchmarks, and its data: what is measured is the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Toy(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 2)

    def forward(self, x, labels=None):
        logits = self.outer(torch.relu(self.inner(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int) -> list[dict[str, Any]]:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": i % 2} for i, row in enumerate(x)]
