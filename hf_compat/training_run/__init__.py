"""One call of `train()`: the loss log, the best metric, the summary, rotation, and the order of actions.

The Trainer, `HFCallbackAdapter` and native mode use the same functions.
"""
