"""Writes what `to_json_string()` of the transformers on the path gives: its arguments as nobody has set them.

    pip install --no-deps --target FOLDER transformers==4.19.4
    python tests/sweeps/releases/dumps.py FOLDER          # dumps/4.19.4.json beside this file

The release does not check its dependencies here: other packages need not be of its time. All of 4.x and 5.x work so,
and of 3.x those whose arguments can be imported by themselves.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import huggingface_hub

# What releases up to 4.19 import of it, and their arguments do not use.
GONE = ("HfApi", "HfFolder", "Repository", "cached_download", "list_repo_files")


def main() -> None:
    """Write the dumps of both classes of arguments; 3.x has one."""
    root = Path(sys.argv[1])
    version = next(root.glob("transformers-*.dist-info")).name.removesuffix(".dist-info").partition("-")[2]
    for name in GONE:
        vars(huggingface_hub).setdefault(name, object)
    prepare(root, version)
    path = Path(__file__).with_name("dumps") / f"{version}.json"
    path.write_text(json.dumps(dict(found(root / "transformers")), indent=1, sort_keys=True) + "\n")
    print(f"written: {path}")


def prepare(root: Path, version: str) -> None:
    """Let the release be imported from its folder."""
    sys.path.insert(0, str(root))
    if version.startswith("3."):  # its package imports all of it
        package = sys.modules["transformers"] = ModuleType("transformers")
        package.__path__, package.__version__ = [str(root / "transformers")], version
    else:
        checks = sys.modules["transformers.dependency_versions_check"] = ModuleType("checks")
        checks.dep_version_check = lambda *_: None


def found(folder: Path):
    for module, name in (
        ("training_args", "TrainingArguments"),
        ("training_args_seq2seq", "Seq2SeqTrainingArguments"),
    ):
        if (folder / f"{module}.py").is_file():
            kind = getattr(importlib.import_module(f"transformers.{module}"), name)
            on_cpu = "use_cpu" if "use_cpu" in kind.__dataclass_fields__ else "no_cuda"
            yield name, json.loads(kind(output_dir="out", **{on_cpu: True}).to_json_string())


if __name__ == "__main__":
    main()
