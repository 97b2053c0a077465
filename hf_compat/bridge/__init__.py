"""Where the two vocabularies meet while training: hooks become HF events, HF flags become Lightning actions."""

import hf_compat.engine  # noqa: F401 - loads Lightning
