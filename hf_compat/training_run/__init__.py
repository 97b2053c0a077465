"""One run, from `train()` to its end: the loss log, the best metric, the summary, rotation, and the order of actions.

HF's words. The Trainer, `HFCallbackAdapter` and native mode use the same functions.
"""
