"""The overridable methods of HF's `Trainer` under their own names and signatures, grouped by subject."""

import hf_compat.engine  # noqa: F401 - loads Lightning
