"""The names of `transformers.training_args_seq2seq`: ours where there are any, transformers' own otherwise."""

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(__name__)
