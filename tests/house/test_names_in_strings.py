"""A name that code gives in a string is written a second time, by us or by a package that it speaks of: no misspelling.

`getattr(model, "confg", None)` and `values.get("learning_rte")` give their defaults without a word, and a list of names
loses one. No type checker sees that.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mutation.places import core

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile(r"[A-Za-z_]\w*")
IS_NAME = re.compile(r"[A-Za-z_][\w.-]*")
# What the package speaks of, below `site-packages`.
UPSTREAM = [
    "accelerate", "bitsandbytes/optim", "datasets/*.py", "deepspeed", "huggingface_hub", "jsonargparse",
    "lightning/pytorch", "optuna", "peft/*.py", "peft/utils", "tensorboard", "torch/*.py", "torch/distributed",
    "torch/nn", "torch/optim", "torch/utils", "transformers/*.py", "transformers/data", "transformers/generation",
    "transformers/integrations", "transformers/models/auto", "transformers/utils", "wandb/*.py", "wandb/sdk",
]  # fmt: skip
# Of packages and releases that are not installed, of the system, and marks of our own that are written once.
ELSEWHERE = {
    "GradientProjector", "LossKwargs", "OptimState4bit", "OptimState8bit", "TORCH_GLOO_LAZY_INIT",
    "_given_by_old_names", "_hooks_run", "_prediction_loop", "biufcSU", "bounded_yaml", "galore_projector",
    "hf_compat_folder", "random_projector", "subclass_4bit", "subclass_8bit", "svd_projector",
    "unsloth_zoo",
}  # fmt: skip


def names_in_strings(path: Path) -> Iterator[str]:
    """Yield the names in a file's strings, but those of docstrings, of sentences and of formatted text."""
    tree, left_out = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= set(map(id, ast.walk(node)))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield from NAMES.findall(node.value) if IS_NAME.fullmatch(node.value) else ()


def count_names() -> Counter[str]:
    """How often each name stands in the repository."""
    files = (path for top in ("hf_compat", "tests", "docs", "examples") for path in (ROOT / top).rglob("*"))
    texts = (path.read_text() for path in files if path.suffix in (".py", ".md", ".yaml", ".json") and path.is_file())
    return Counter(name for text in texts for name in NAMES.findall(text))


def names_of_upstream() -> str:
    """The names of the packages that ours speaks of, a line each."""
    site, standard = (Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib"))
    files = chain(
        standard.glob("*.py"),
        *(site.glob(one) if one.endswith(".py") else (site / one).rglob("*.py") for one in UPSTREAM),
    )
    return "\n".join({name for path in files for name in NAMES.findall(path.read_text(errors="replace"))})


def test_each_name_in_a_string_is_written_elsewhere():
    count, found = count_names(), {name: path for path in core() for name in names_in_strings(path)}
    assert len(found) > 1500
    alone = {name: path for name, path in found.items() if count[name] - (name in ELSEWHERE) < 2}
    assert alone.keys() >= ELSEWHERE, f"not alone any more, strike out: {ELSEWHERE - alone.keys()}"
    upstream = names_of_upstream()
    unknown = {name: path for name, path in alone.items() if name not in ELSEWHERE and name not in upstream}
    told = [f"{path.relative_to(ROOT)}: {name}" for name, path in unknown.items()]  # a part of a name counts as one
    assert told == [], "written nowhere else; if it is right, a test may name it"
