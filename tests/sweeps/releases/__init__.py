"""Older releases of transformers and of our dependencies."""
