"""Configurations that run under both trainers, and the comparison of what they leave."""
