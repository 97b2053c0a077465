"""Rewrite scripts of earlier releases for this package, or for transformers 5. Comments and layout stay."""
