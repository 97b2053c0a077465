"""Scripts of 4.x import names that 5.x has dropped; they start under `patch()` all the same."""

from __future__ import annotations

import importlib

import pytest
import transformers

import hf_compat

IMPORTS = [
    ("transformers.utils", "send_example_telemetry"),
    ("transformers.utils", "is_offline_mode"),
    ("transformers.utils", "get_full_repo_name"),
    ("transformers.file_utils", "is_offline_mode"),
    ("transformers", "is_torch_tpu_available"),
    ("transformers.trainer_utils", "EvaluationStrategy"),
]
pytestmark = pytest.mark.filterwarnings("ignore:These were imported from transformers")


@pytest.fixture
def swapped():
    hf_compat.patch()
    yield
    hf_compat.unpatch()


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_a_former_name_can_be_imported_while_patched(swapped, module, name):
    assert getattr(importlib.import_module(module), name) is not None


def test_they_do_what_they_did(swapped):
    utils = transformers.utils
    assert utils.send_example_telemetry("run_glue", object(), framework="pytorch") is None
    assert utils.is_offline_mode() is True  # the tests run offline
    assert transformers.is_torch_tpu_available() is False
    assert transformers.trainer_utils.EvaluationStrategy("steps") == transformers.IntervalStrategy.STEPS
    assert utils.get_full_repo_name("model", organization="owner") == "owner/model"


def test_a_name_that_the_release_has_stays_its_own_and_none_stays_behind():
    own = transformers.utils.check_min_version
    before = {module: set(dir(importlib.import_module(module))) for module, _ in IMPORTS}
    hf_compat.patch()
    assert transformers.utils.check_min_version is own
    hf_compat.unpatch()
    assert {module: set(dir(importlib.import_module(module))) for module in before} == before
