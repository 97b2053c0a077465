"""One call of `train()`: its record, loss log and output folder, its saves and its resume, and the order of actions.

The Trainer, `HFCallbackAdapter` and native mode use the same functions.
"""
