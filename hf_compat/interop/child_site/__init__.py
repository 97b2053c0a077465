"""The folder that Pythons started by a patched script read their `sitecustomize` from."""

from __future__ import annotations

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
