"""Optimizers, learning-rate schedules and label smoothing, by HF's names."""
