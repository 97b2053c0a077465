"""Collators, samplers and the training loader; how ranks divide the data; nested batches. No Lightning."""
