"""Kills of ranks and launchers."""
