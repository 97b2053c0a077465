"""Pushes to the Hub, and the model card."""
