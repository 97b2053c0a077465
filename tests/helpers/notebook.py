"""Run the notebook of the examples, and write its outputs into it.

    .venv/bin/python tests/helpers/notebook.py

Who opens the file without a kernel then sees bars, tables and numbers. Do it after a change of what a notebook shows.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "transformers_to_lightning.ipynb"


def executed(folder: Path) -> NotebookNode:
    """Run the notebook in a folder. Return it with its outputs, but for warnings about the machine's packages."""
    book = nbformat.read(NOTEBOOK, as_version=4)
    at = {"metadata": {"path": str(folder)}}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    client = NotebookClient(book, timeout=500, kernel_name="python3", resources=at, record_timing=False)
    client.execute(env=environment)
    book.metadata = nbformat.read(NOTEBOOK, as_version=4).metadata
    for cell in book.cells:
        if cell.cell_type == "code":
            kept = [one for one in cell.outputs if one.get("name") != "stderr"]
            cell.outputs = [one for one in kept if "real_accelerator.py" not in one.get("text", "")]  # DeepSpeed's
    return book


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(Path(folder)), NOTEBOOK)
