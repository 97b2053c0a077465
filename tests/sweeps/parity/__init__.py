"""Random configurations under both trainers."""
