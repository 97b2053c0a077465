"""The names of `transformers.trainer_pt_utils`, from this package where it has them, otherwise from transformers."""

from __future__ import annotations

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(
    __name__,
    "transformers.trainer_pt_utils",
    {
        "AcceleratorConfig": "hf.argument_values",
        "LabelSmoother": "optim.label_smoothing",
        "LayerWiseDummyOptimizer": "optim.optimizers",
        "LayerWiseDummyScheduler": "optim.optimizers",
        "LengthGroupedSampler": "data.samplers",
        "find_batch_size": "data.tree",
        "nested_detach": "data.tree",
        "nested_numpify": "data.tree",
        "metrics_format": "hf.metrics",
    },
)
