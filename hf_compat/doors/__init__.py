"""Ways in: the command line and what it writes."""
