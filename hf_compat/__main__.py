"""`python -m hf_compat …` is `hf-compat …`."""

from __future__ import annotations

import sys

from hf_compat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
