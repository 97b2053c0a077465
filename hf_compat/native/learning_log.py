"""What a native update tells Lightning's loggers, progress bar and monitors."""

from __future__ import annotations

from hf_compat.engine.protocols import GradNorm, SilentObserver


class LastUpdate(SilentObserver):
    """Keeps what the update that was just made has measured; tensors stay where they are until somebody logs them."""

    def __init__(self) -> None:
        self.grad_norm: GradNorm = None
        self.learning_rate: float | None = None

    def forget(self) -> None:
        """Begin with the next batch."""
        self.grad_norm = self.learning_rate = None

    def optimizer_stepped(self, grad_norm: GradNorm) -> None:
        """Keep the norm of the gradients."""
        self.grad_norm = grad_norm

    def learning_rate_read(self, learning_rate: float) -> None:
        """Keep the rate; it also says that an update was made."""
        self.learning_rate = learning_rate

    def measured(self) -> dict[str, GradNorm]:
        """Return what is there, under HF's names."""
        measured = {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm}
        return {name: value for name, value in measured.items() if value is not None}
