"""Run one script under transformers and here, record both runs, and compare the records."""
