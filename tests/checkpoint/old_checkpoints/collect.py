"""Pack the checkpoints that write.sh had written, and what the uninterrupted runs gave, into this folder."""

from __future__ import annotations

import json
import pickle
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from helpers.old_runs import FORMS, SAVED_AT, digest

NAMES = {"native": "it.ckpt", "adapter": "checkpoint-3.ckpt"}


def main() -> None:
    runs, expected = Path(sys.argv[1]), {}
    for form in FORMS:
        name = NAMES.get(form, f"checkpoint-{SAVED_AT[form]}")
        with tarfile.open(HERE / f"{form}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(runs / form / name, name)
        theirs = runs / "of_transformers" / form / "result.pickle"
        result = pickle.loads((theirs if theirs.exists() else runs / form / "result.pickle").read_bytes())
        expected[form] = {
            "by": "transformers" if theirs.exists() else "hf_compat",
            "weights_sha256": digest(result["weights"]),
            "weights_sum": float(sum(tensor.double().sum() for tensor in result["weights"].values())),
            "logs": result["logs"],
        }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
