"""Collators, samplers, the training loader, the division of data between ranks, and nested batches.

Also the names of `transformers.data`, from this package where it has them, otherwise from transformers.
"""

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(__name__)
