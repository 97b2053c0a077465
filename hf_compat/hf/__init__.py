"""HF words: arguments, state, control, callbacks, outputs. Never imports Lightning, never needs `transformers`."""
