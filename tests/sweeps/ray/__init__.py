"""Ray Train."""
