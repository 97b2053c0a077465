"""Costs beside transformers'."""
