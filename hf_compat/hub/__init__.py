"""The Hub: the repository of a run, what is pushed when, and the model card."""
