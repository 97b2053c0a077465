"""Label smoothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_compat.data.types import ModelOutput


@dataclass
class LabelSmoother:
    """Cross entropy against labels mixed with the uniform distribution.

    Args:
        epsilon: Share of the uniform distribution.
        ignore_index: Labels that do not count.

    Shapes:
        logits: [..., classes]; labels: [...].

    Mirrors:
        `transformers.trainer_pt_utils.LabelSmoother`, 5.23.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(
        self,
        model_output: ModelOutput,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        negative_log = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() == negative_log.dim() - 1:
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        # gather cannot take negative indices, and their values are masked just below
        picked = negative_log.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(ignored, 0.0)
        # summed in float32, which half precision would overflow
        spread = negative_log.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        count = self._count(ignored, num_items_in_batch, picked.device)
        target_loss = picked.sum() / count
        uniform_loss = spread.sum() / (count * negative_log.shape[-1])
        return (1 - self.epsilon) * target_loss + self.epsilon * uniform_loss

    @staticmethod
    def _count(ignored: torch.Tensor, num_items: torch.Tensor | int | None, device: torch.device) -> torch.Tensor | int:
        """Items that the loss is divided by: those of the whole window where known, else of this micro-batch."""
        if num_items is None:
            return ignored.numel() - ignored.long().sum()
        return num_items.to(device) if isinstance(num_items, torch.Tensor) else num_items
