"""Callbacks of both kinds in either trainer: Lightning hooks become HF events, HF flags become Lightning actions."""

import hf_compat.engine  # noqa: F401 - loads Lightning
