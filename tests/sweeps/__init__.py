"""Programs that take longer than a test: docs/sweeps.md says what each covers and when it was last run whole."""
