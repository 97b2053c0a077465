"""Collators, samplers and the training loader; how ranks divide the data; nested batches. No Lightning.

The names of `transformers.data` are here, too: ours where there are any, transformers' own otherwise.
"""

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(__name__, "transformers.data", {"default_data_collator": "data.collators"})
