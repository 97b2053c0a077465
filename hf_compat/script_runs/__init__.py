"""A user's script in this process: run whole, or up to its first training."""
