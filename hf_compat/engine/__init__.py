"""Modules, windows, evaluation, precision. Lightning words only; takes the plan, knows no HF event."""

from hf_compat.upstream import load_lightning

load_lightning()
