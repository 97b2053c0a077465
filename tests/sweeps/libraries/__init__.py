"""Trainers of other libraries under both engines."""
