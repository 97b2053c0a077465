"""NEFTune: add uniform noise to the input embeddings in training mode, never in evaluation mode.

The method is that of https://arxiv.org/abs/2310.05914. A forward hook on the embedding layer adds the noise.
"""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_compat.errors import ArgumentError
from hf_compat.interop.transformers_models import unwrap_peft

_STRENGTH = "neftune_noise_alpha"  # the layer's attribute, as upstream, because callbacks change it


class EmbeddingNoise:
    """Adds noise to the input embeddings of one model until `remove` is called.

    Args:
        model: The model without the wrappers of a strategy. A PEFT adapter may wrap it.
        strength: NEFTune's alpha, >= 0.

    Raises:
        ArgumentError: The model has no layer that embeds its input.

    Shapes:
        The layer's output is `[batch, sequence, features]`. The noise is within ±alpha / sqrt(sequence · features).

    Mirrors:
        `transformers.integrations.neftune`, 5.23.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        self._layer = input_embeddings(model)
        setattr(self._layer, _STRENGTH, strength)
        self._handle: RemovableHandle = self._layer.register_forward_hook(_add_noise)

    def remove(self) -> None:
        """Remove the hook from the layer. A second call does nothing."""
        self._handle.remove()
        if hasattr(self._layer, _STRENGTH):
            delattr(self._layer, _STRENGTH)


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the layer that embeds a model's input.

    Raises:
        ArgumentError: The model has no such layer, or does not name it.
    """
    inner = unwrap_peft(model)
    find = getattr(inner, "get_input_embeddings", None)
    try:
        layer = find() if callable(find) else None
    except NotImplementedError:  # raised by transformers' models without such a layer
        layer = None
    if not isinstance(layer, nn.Module):
        raise ArgumentError(
            f"`neftune_noise_alpha` adds noise to the input embeddings, and {type(inner).__name__} names no such "
            "layer.\n\n"
            "Hint: give the model a method `get_input_embeddings()` that returns the layer, or leave the argument out."
        )
    return layer


def _add_noise(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    if not layer.training:
        return output
    # float32, as upstream. float64 would change the last bits of the bound, and so of the noise
    bound = getattr(layer, _STRENGTH) / torch.sqrt(torch.tensor(math.prod(output.shape[1:3])))
    return output + torch.zeros_like(output).uniform_(-bound, bound)


class NoiseOfFit(pl.Callback):
    """Removes the noise after a fit that failed. In a plain `lightning.Trainer` only callbacks learn of a failure.

    Args:
        noise: The noise of this fit.
    """

    def __init__(self, noise: EmbeddingNoise) -> None:
        self.noise = noise

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the noise."""
        self.noise.remove()


def begin_noise(trainer: pl.Trainer, model: nn.Module, strength: float | None) -> None:
    """Add noise to a model for the fit that starts. A strength of None adds none."""
    end_noise(trainer)
    if strength is not None:
        _callbacks(trainer).append(NoiseOfFit(EmbeddingNoise(model, strength)))


def end_noise(trainer: pl.Trainer) -> None:
    """Remove the noise of a fit, if there is any."""
    for callback in [one for one in _callbacks(trainer) if isinstance(one, NoiseOfFit)]:
        callback.noise.remove()
        _callbacks(trainer).remove(callback)


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
