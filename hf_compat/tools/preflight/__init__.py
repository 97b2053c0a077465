"""Find what would go wrong in a run: one update, one evaluation and one save on a copy of its state."""
