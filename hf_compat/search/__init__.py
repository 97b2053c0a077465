"""Hyperparameter search: one Trainer trains each trial that optuna, ray or wandb proposes."""
