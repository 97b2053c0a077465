"""Lightning hooks become HF events, HF flags become Lightning actions; both kinds of callbacks, in either trainer."""

import hf_compat.engine  # noqa: F401 - loads Lightning
