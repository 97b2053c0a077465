"""Lightning's side of a run: module, windows, evaluation, precision and strategies. HF events are fired elsewhere."""

import hf_compat.upstream  # noqa: F401 - loads Lightning
