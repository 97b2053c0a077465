"""Prepare the patch in every Python process that a script under `hf-compat run` starts.

Its folder is in PYTHONPATH. Python reads one `sitecustomize` only, so this one runs the other one, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _hand_over() -> None:
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _prepare_patch() -> None:
    if importlib.util.find_spec("hf_compat") is None:  # a Python of another environment
        return
    from hf_compat.interop.import_hook import patch_when_imported

    patch_when_imported()


_hand_over()
_prepare_patch()
