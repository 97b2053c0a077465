"""The names of `transformers.integrations.integration_utils`: ours where there are any, transformers' own otherwise."""

from hf_compat.interop.mirrors import mirror

__getattr__, __dir__ = mirror(__name__)
