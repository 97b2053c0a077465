"""Label smoothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_compat.data.types import ModelOutput
from hf_compat.errors import LossError


@dataclass
class LabelSmoother:
    """Cross entropy against labels mixed with the uniform distribution.

    Args:
        epsilon: Share of the uniform distribution.
        ignore_index: Labels that do not count.

    Shapes:
        logits: [..., classes]; labels: [...].

    Raises:
        LossError: The model returned no logits, neither first in a tuple nor under `logits`.

    Mirrors:
        `transformers.trainer_pt_utils.LabelSmoother`.

    Differs:
        A tensor is refused. Upstream takes its first row for the logits of all samples.
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
        held = model_output.get("logits") if isinstance(model_output, dict) else None
        if isinstance(model_output, torch.Tensor) or (isinstance(model_output, dict) and held is None):
            found = f"only {', '.join(model_output)}" if isinstance(model_output, dict) else "a tensor"
            raise LossError(
                f"`label_smoothing_factor` smooths the loss of the model's logits, and the model returned {found}.\n\n"
                "Hint: return the logits first in a tuple, `return (logits,)`, or under `logits` in a dict."
            )
        logits = model_output[0] if held is None else held
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        negative_log = -nn.functional.log_softmax(logits, dim=-1)
        if labels.dim() == negative_log.dim() - 1:
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        # gather cannot take negative indices, whose values are masked here
        picked = negative_log.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(ignored, 0.0)
        # half precision would overflow
        spread = negative_log.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        # the items of the whole update if known, else those of this micro-batch
        count: torch.Tensor | int
        if num_items_in_batch is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(num_items_in_batch, torch.Tensor):
            count = num_items_in_batch.to(picked.device)
        else:
            count = num_items_in_batch
        target_loss = picked.sum() / count
        uniform_loss = spread.sum() / (count * negative_log.shape[-1])
        return (1 - self.epsilon) * target_loss + self.epsilon * uniform_loss
