"""Lightning: module, windows, evaluation, precision, strategies. Takes the plan, knows no HF event."""

import hf_compat.upstream  # noqa: F401 - loads Lightning
