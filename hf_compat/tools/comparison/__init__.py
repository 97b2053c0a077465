"""One script under transformers and here: run twice, recorded, compared. HF words only; prints nothing."""
