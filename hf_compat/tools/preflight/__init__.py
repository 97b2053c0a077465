"""What would go wrong in a run, found before it: one update, one evaluation and one save on a copy of its state."""
