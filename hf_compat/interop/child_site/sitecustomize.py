"""Prepare the patch in every Python process that a script under `hf-compat run` starts.

Its folder is in PYTHONPATH. Python reads one `sitecustomize` only, so this one runs the other one, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _spec is not None and _spec.loader is not None:
    _module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)

if importlib.util.find_spec("hf_compat") is not None:  # it is absent in a Python of another environment
    from hf_compat.interop.import_hook import PatchAfterImport

    sys.meta_path.insert(0, PatchAfterImport())
