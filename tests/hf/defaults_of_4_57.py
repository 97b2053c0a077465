"""Writes what the installed transformers gives every argument that nobody has set, to a JSON file beside this one.

pip install --no-deps --target FOLDER transformers==4.57.6 'tokenizers<=0.23' 'huggingface_hub<1.0'
PYTHONPATH=FOLDER python tests/hf/defaults_of_4_57.py
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import transformers


def main() -> None:
    """Write the table."""
    args = transformers.TrainingArguments(use_cpu=True)
    values = {**{field.name: getattr(args, field.name) for field in fields(args)}, **args.to_dict()}
    tokens = {name: getattr(args, name) for name in values if name.endswith("_token")}  # a dump masks them
    table = {"transformers": transformers.__version__, "defaults": {**values, **tokens}}
    path = Path(__file__).parent / "defaults_of_4_57.json"
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"written: {path} (transformers {transformers.__version__})")


if __name__ == "__main__":
    main()
