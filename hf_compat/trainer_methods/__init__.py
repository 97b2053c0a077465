"""The override points of HF's `Trainer` under their own names and signatures, by subject; no order of events."""

import hf_compat.engine  # noqa: F401 - loads Lightning
