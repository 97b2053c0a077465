"""The names of `transformers.training_args`, from this package where it has them, otherwise from transformers."""

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(__name__)
