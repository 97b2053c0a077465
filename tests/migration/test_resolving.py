"""What a migrated source takes from transformers is there: looked up in the installed release, for each target."""

# ruff: noqa: E501 - sources within tests
from __future__ import annotations

import importlib
import sys

import pytest
import transformers

from helpers.migrated import left, today
from hf_compat.interop.former_names import MOVED, MOVED_MODULES
from hf_compat.tools.migration.installed_names import InstalledNames, installed_names
from hf_compat.tools.migration.report import Target

TARGETS = list(Target)
NAMES = installed_names("transformers")
assert NAMES is not None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from transformers import deepspeed", "from transformers.integrations import deepspeed"),
        ("from transformers import deepspeed as ds", "from transformers.integrations import deepspeed as ds"),
        ("from transformers import file_utils", "from transformers import utils as file_utils"),
        ("import transformers.deepspeed", "import transformers.integrations.deepspeed"),
        ("import transformers.deepspeed as ds", "import transformers.integrations.deepspeed as ds"),
        ("import transformers\nz = transformers.deepspeed.is_deepspeed_zero3_enabled()", "import transformers\nz = transformers.integrations.deepspeed.is_deepspeed_zero3_enabled()"),
        ("from transformers.trainer import ALL_LAYERNORM_LAYERS", "from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS"),
        ("import transformers\nz = transformers.trainer.ALL_LAYERNORM_LAYERS", "import transformers\nz = transformers.pytorch_utils.ALL_LAYERNORM_LAYERS"),
        ("from transformers.tokenization_utils import BatchEncoding", "from transformers.tokenization_utils_base import BatchEncoding"),
        ("from transformers.modeling_utils import no_init_weights", "from transformers.initialization import no_init_weights"),
        ("from transformers.modeling_utils import load_sharded_checkpoint as l", "from transformers.trainer_utils import load_sharded_checkpoint as l"),
        ("from transformers import ViTFeatureExtractor\nz = ViTFeatureExtractor()", "from transformers import ViTImageProcessor\nz = ViTImageProcessor()"),
        ("from transformers import is_torch_tpu_available\nz = is_torch_tpu_available(check_device=False)", "from transformers import is_torch_xla_available\nz = is_torch_xla_available()"),
        ("from transformers import is_torch_tpu_available\nz = is_torch_tpu_available(False)", "from transformers import is_torch_xla_available\nz = is_torch_xla_available()"),
        ("from transformers import is_torch_tpu_available\nz = is_torch_tpu_available(check_device=x)", "from transformers import is_torch_xla_available\nz = is_torch_xla_available(check_is_tpu=x)"),
        ("import transformers\nz = transformers.is_torch_tpu_available(check_device=True)", "import transformers\nz = transformers.is_torch_xla_available(check_is_tpu=True)"),
        ("from transformers.utils import send_example_telemetry\n\n\ndef main():\n    # Sending telemetry.\n    send_example_telemetry('run_glue', 1)", "def main():\n    pass"),
    ],
)  # fmt: skip
def test_what_has_moved_is_taken_from_where_it_is(old, new, target):
    assert today(f"{old}\n", target).strip() == new
    assert left(f"{old}\n", target) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from transformers.trainer import no_such_thing", [(1, "from transformers.trainer import no_such_thing")]),
        ("import transformers\n\nx = transformers.trainer.no_such_thing(1)", [(3, "transformers.trainer.no_such_thing")]),
        ("from transformers import trainer\nx = trainer.ALL_LAYERNORM_LAYERS", [(2, "trainer.ALL_LAYERNORM_LAYERS")]),
        ("from transformers import TFBertModel", [(1, "from transformers import TFBertModel")]),
        ("from transformers.pytorch_utils import find_pruneable_heads_and_indices as f", [(1, "from transformers.pytorch_utils import find_pruneable_heads_and_indices")]),
        ("import transformers.benchmark", [(1, "import transformers.benchmark")]),
        ("from transformers.benchmark import PyTorchBenchmark", [(1, "from transformers.benchmark import PyTorchBenchmark")]),
        ("from transformers.utils import send_example_telemetry\nx = send_example_telemetry", [(1, "from transformers.utils import send_example_telemetry")]),
        ("def f():\n    from transformers import top_k_top_p_filtering", [(2, "from transformers import top_k_top_p_filtering")]),
        ("try:\n    from transformers import TFBertModel\nexcept ImportError:\n    TFBertModel = None", []),
        ("from transformers.models.bert.modeling_bert import BertModel, BertLayer", []),
        ("from transformers import BertTokenizerFast, AutoTokenizer, PreTrainedTokenizerFast", []),
        ("from transformers.tokenization_utils import PreTrainedTokenizer, AddedToken", []),
        ("import transformers\ntransformers.logging.set_verbosity_info()\ntransformers.utils.logging.enable_explicit_format()", []),
        ("import transformers\ntransformers.models.auto.modeling_auto.MODEL_MAPPING\ntransformers.BertModel.from_pretrained('x').no_such", []),
    ],
)  # fmt: skip
def test_what_is_not_there_is_listed_and_nothing_else(source, expected, target):
    assert left(f"{source}\n", target) == expected


def test_names_that_are_read_off_the_sources_are_those_of_the_package():
    """Of what transformers really has, nothing is taken for absent; and what is absent is not taken for there."""
    private = {
        "_modules",
        "_objects",
        "_name",
        "_class_to_module",
        "_object_missing_backend",
        "_explicit_import_shortcut",
    }
    public = sorted(name for name in {*dir(transformers), *transformers.__all__} - private if not name.startswith("__"))
    assert len(public) > 5000
    assert [name for name in public[::211] if not NAMES.has(f"transformers.{name}")] == []
    for module in (
        "trainer",
        "trainer_utils",
        "utils",
        "utils.import_utils",
        "modeling_utils",
        "integrations",
        "pipelines",
        "tokenization_utils",
    ):
        path = f"transformers.{module}"
        there = [name for name in dir(importlib.import_module(path)) if not name.startswith("_")]
        assert [name for name in there if not NAMES.has(f"{path}.{name}")] == [], module
    for path in (
        "transformers.no_such",
        "transformers.trainer.no_such",
        "transformers.models.no_such",
        "transformers.models.bert.NoSuch",
        "transformers.Bert",
    ):
        assert not NAMES.has(path)


def test_each_row_leads_from_where_nothing_is_to_where_it_is():
    modules = {old: today for old, today in MOVED_MODULES.items() if not NAMES.is_module(old)}
    for old, home in {**MOVED, **modules}.items():
        assert not NAMES.has(old), old
        if home.startswith("transformers"):
            name = "" if old in MOVED_MODULES else f".{old.rpartition('.')[2]}"
            assert NAMES.has(f"{home}{name}"), old


def test_a_star_of_a_module_without_a_source_may_bind_any_name(tmp_path):
    root = tmp_path / "transformers"
    (root / "fast").mkdir(parents=True)
    (root / "fast" / "tables.cpython-311-x86_64-linux-gnu.so").touch()
    for name, star in {"__init__": ".fast", "quick": ".fast.tables", "slow": ".fast.others"}.items():
        (root / f"{name}.py").write_text(f"from {star} import *\n")
    names = InstalledNames(root)
    assert [names.has(f"transformers.{place}Any") for place in ("", "quick.", "slow.")] == [False, True, False]


def test_a_release_without_imports_of_it(tmp_path):
    """A package as 4.x lays it out: a lazy structure, a module that is gone since, no models by star."""
    root = tmp_path / "transformers"
    (root / "models").mkdir(parents=True)
    (root / "__init__.py").write_text(
        '__version__ = "4.40.0"\n_import_structure = {"deepspeed": [], "models.bert": ["BertModel"]}\n'
        'try:\n    pass\nexcept E:\n    pass\nelse:\n    _import_structure["optimization"] = ["AdamW"]\n'
        '    _import_structure["models.bert"].extend(["BertLayer"])\nraise SystemExit\n'
    )
    (root / "deepspeed.py").write_text("from .rest import *\n\nif x:\n    y: int = 1\nwith z as w:\n    pass\n")
    (root / "rest.py").write_text("from .deepspeed import *\n__all__ = [\n    'given',\n]\nheld = given = 1\n")
    names = InstalledNames(root)
    assert names.version == "4.40.0" and names.is_module("transformers.deepspeed")
    for name in ("AdamW", "BertModel", "BertLayer", "deepspeed", "optimization"):
        assert names.has(f"transformers.{name}"), name
    assert [one for one in "wxyz" if names.has(f"transformers.deepspeed.{one}")] == ["w", "y"]
    assert names.has("transformers.deepspeed.given") and not names.has("transformers.deepspeed.held")
    assert not names.has("transformers.rest.no_such")
    assert not names.has("transformers.BertConfig") and "transformers.deepspeed" not in sys.modules
