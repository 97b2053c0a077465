"""Modules, windows, evaluation, precision. Lightning words only; takes the plan, knows no HF event."""
