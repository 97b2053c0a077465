"""Lightning strategies as this engine needs them. Lightning words only."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy


class OneDevice(SingleDeviceStrategy):
    """One device, on which the model stays: a Trainer evaluates, predicts and trains on after a fit.

    Lightning's own moves model and optimizer to the CPU when a fit ends.
    """

    def model_to_device(self) -> None:
        module = self.lightning_module
        spread = getattr(getattr(module, "model", None), "hf_device_map", None)
        if spread is None:  # a model spread over devices at load time owns its placement
            super().model_to_device()

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
