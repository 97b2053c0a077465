"""The overridable steps of a run under HF's method names. No Lightning import, no HF event."""
