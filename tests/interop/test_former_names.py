"""Scripts of 4.x import names that 5.x has dropped; they start under `patch()` all the same."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import transformers

import hf_compat
from hf_compat.interop import former_names
from hf_compat.interop.former_names import MOVED, MOVED_MODULES, is_restored
from hf_compat.interop.user_script import run_script
from hf_compat.tools.migration.gone_names import account_of

IMPORTS = [
    ("transformers.utils", "send_example_telemetry"),
    ("transformers.utils", "is_offline_mode"),
    ("transformers.utils", "get_full_repo_name"),
    ("transformers.file_utils", "is_offline_mode"),
    ("transformers", "is_torch_tpu_available"),
    ("transformers.trainer_utils", "EvaluationStrategy"),
    ("transformers", "deepspeed"),
    ("transformers.deepspeed", "is_deepspeed_zero3_enabled"),
    ("transformers.trainer", "ALL_LAYERNORM_LAYERS"),
    ("transformers.tokenization_utils", "BatchEncoding"),
    ("transformers.modeling_utils", "load_sharded_checkpoint"),
    ("transformers", "is_tf_available"),
    ("transformers.utils", "is_flax_available"),
    ("transformers.integrations", "is_fairscale_available"),
    ("transformers.trainer_utils", "ShardedDDPOption"),
    ("transformers.trainer", "Dict"),
    ("transformers.trainer", "nested_truncate"),
]
# A module that is there while patched alone: nothing to compare with before
RESTORED = "transformers.deepspeed"
pytestmark = pytest.mark.filterwarnings("ignore:These were imported from transformers")


@pytest.mark.parametrize("path", [path for path, home in MOVED.items() if home.startswith("transformers.")])
def test_a_moved_name_is_where_the_table_says(path):
    name = path.rpartition(".")[2]
    assert hasattr(importlib.import_module(MOVED[path]), name)


@pytest.fixture
def swapped():
    hf_compat.patch()
    yield
    hf_compat.unpatch()


def test_the_former_names_can_be_imported_while_patched(swapped):
    for module, name in IMPORTS:
        assert getattr(importlib.import_module(module), name) is not None, (module, name)


def test_they_do_what_they_did(swapped):
    utils = transformers.utils
    assert utils.send_example_telemetry("run_glue", object(), framework="pytorch") is None
    assert utils.is_offline_mode() is True  # the tests run offline
    assert transformers.is_torch_tpu_available() is False
    assert transformers.trainer_utils.EvaluationStrategy("steps") == transformers.IntervalStrategy.STEPS
    assert utils.get_full_repo_name("model", organization="owner") == "owner/model"


def test_a_name_that_the_release_has_stays_its_own_and_none_stays_behind(monkeypatch):
    own = transformers.utils.check_min_version
    theirs = object()
    monkeypatch.setattr(transformers.utils, "send_example_telemetry", theirs, raising=False)  # one comes back
    hf_compat.patch()  # imports modules of transformers, whose names stay
    hf_compat.unpatch()
    before = {module: set(dir(importlib.import_module(module))) for module, _ in IMPORTS if module != RESTORED}
    hf_compat.patch()
    assert transformers.utils.check_min_version is own
    assert transformers.utils.send_example_telemetry is theirs
    hf_compat.unpatch()
    assert {module: set(dir(importlib.import_module(module))) for module in before} == before
    assert RESTORED not in sys.modules


def test_what_is_not_restored_is_told_by_the_table(tmp_path):
    (tmp_path / "old.py").write_text("from transformers import AdamW\n")
    (tmp_path / "own.py").write_text("from transformers import no_such_name\n")
    (tmp_path / "space.py").write_text("from transformers.trainer_utils import default_hp_space\n")
    (tmp_path / "elsewhere.py").write_text("from transformers.trainer_utils import AcceleratorConfig\n")
    (tmp_path / "of_3.py").write_text("from transformers.modeling_bert import BertModel\n")
    (tmp_path / "other.py").write_text("from torch import no_such_name\n")
    accounts = {}
    for script in tmp_path.iterdir():
        with pytest.raises(ImportError) as raised:
            runpy.run_path(str(script))
        accounts[script.name] = account_of(raised.value)
    assert accounts["old.py"].partition(",")[0] == "transformers.AdamW: gone since 4.50: `torch.optim.AdamW`"
    release = f"transformers {importlib.import_module('transformers').__version__}"
    assert accounts["own.py"] == f"transformers.no_such_name: {release} has no such name."
    assert accounts["space.py"].startswith("transformers.trainer_utils.default_hp_space: gone since 4.")
    found = (
        "transformers.trainer_utils.AcceleratorConfig: `from transformers.trainer_pt_utils import AcceleratorConfig`"
    )
    assert accounts["elsewhere.py"] == f"{found} finds it today."
    today = "gone since 4.0: import its names from `transformers`."
    assert accounts["of_3.py"] == f"transformers.modeling_bert: {today}"
    assert accounts["other.py"] is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("transformers.PreTrainedTokenizerFast.encode_plus", "encode_plus: gone in transformers 5: call the tokenizer"),
        ("object().as_target_processor", "as_target_processor: gone in transformers 5: `processor(text=…)`."),
        ("(lambda a: a)(use_auth_token=None)", "use_auth_token: is token today."),
        ("object().no_such", None),
        ("int(no_such=1)", None),
    ],
)
def test_a_member_or_keyword_that_is_gone_is_told_below_the_error(tmp_path, monkeypatch, line, told):
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "old.py").write_text(f"import transformers\n{line}\n")
    with pytest.raises((AttributeError, TypeError)) as raised:
        run_script(str(tmp_path / "old.py"), [])
    notes = getattr(raised.value, "__notes__", [])
    assert (told is None and notes == []) or (len(notes) == 1 and notes[0].startswith(told))


def test_each_restored_name_is_one_that_the_table_says_is_restored(swapped):
    for module, name in IMPORTS:
        if (module, name) != ("transformers", "deepspeed"):
            assert module in MOVED_MODULES or is_restored(f"{module}.{name}"), name
    assert is_restored("transformers.deepspeed") and not is_restored("transformers.AdamW")
    assert not is_restored("transformers.file_utils.torch_required")  # its module has moved, and it is gone


def test_run_tells_the_way_out_below_the_error(tmp_path):
    (tmp_path / "old.py").write_text("from transformers import AdamW\n")
    command = [sys.executable, "-m", "hf_compat", "run", "old.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().splitlines()[-1].startswith("transformers.AdamW: gone since 4.50: `torch.optim.AdamW`")


@pytest.fixture
def own_tables(monkeypatch):
    """Small tables, and modules that stand for those of a release."""
    top, held, utils, today = (ModuleType(name) for name in ("transformers", "transformers", "utils", "today"))
    utils.kept, today.moved = "its own", "the moved one"
    there = {"transformers": top, "transformers.utils": utils, "transformers.today": today}
    monkeypatch.setattr(former_names, "modules_there", lambda names: [there[name] for name in names if name in there])
    monkeypatch.setattr(former_names, "sys", SimpleNamespace(modules=dict(there)))
    monkeypatch.setattr(former_names, "_STAND_INS", {"kept": 1, "stands_in": 2})
    monkeypatch.setattr(former_names, "_HAD_STAND_INS", ("transformers", "transformers.utils", "transformers.gone"))
    monkeypatch.setattr(former_names, "_TYPES", {"Dict": dict})
    monkeypatch.setattr(former_names, "_HAD_TYPES", ("transformers.utils", "transformers.today"))
    monkeypatch.setattr(
        former_names, "MOVED_MODULES",
        {"transformers.old": "transformers.today", "transformers.utils": "transformers.today",
         "transformers.lost": "transformers.nowhere"},
    )  # fmt: skip
    monkeypatch.setattr(
        former_names, "MOVED",
        {"transformers.utils.moved": "transformers.today", "transformers.today.lacks": "transformers.utils",
         "transformers.utils.elsewhere": "accelerate.utils", "transformers.today.unknown": "transformers.nowhere"},
    )  # fmt: skip
    monkeypatch.setattr(former_names, "_added", [])
    monkeypatch.setattr(former_names, "_aliases", {})
    return top, held, utils, today


def test_each_module_gets_the_former_names_that_it_lacks(own_tables):
    top, held, utils, today = own_tables
    before = [dict(vars(module)) for module in own_tables]
    former_names.add_former_names([top, held])
    gained = [
        {name: value for name, value in vars(module).items() if name not in names}
        for module, names in zip(own_tables, before, strict=True)
    ]
    of_top = {"kept": 1, "stands_in": 2, "old": today}
    assert gained == [of_top, of_top, {"stands_in": 2, "Dict": dict, "moved": "the moved one"}, {"Dict": dict}]
    assert utils.kept == "its own"
    known = former_names.sys.modules
    assert known["transformers.old"] is today and known["transformers.utils"] is utils and len(known) == 4
    utils.stands_in, known["another"] = "of a script", top
    former_names.take_former_names_back()
    assert [dict(vars(module)) for module in (top, held, today)] == [before[0], before[1], before[3]]
    assert vars(utils) == {**before[2], "stands_in": "of a script"}
    assert [*known] == ["transformers", "transformers.utils", "transformers.today", "another"]
    assert not former_names._added and not former_names._aliases


def test_an_alias_that_a_script_has_replaced_stays(own_tables):
    former_names.add_former_names([])
    former_names.sys.modules["transformers.old"] = "of a script"
    former_names.take_former_names_back()
    assert former_names.sys.modules["transformers.old"] == "of a script"


@pytest.mark.parametrize(
    ("path", "restored"),
    [
        ("transformers.old", True),
        ("transformers.utils.Dict", True),
        ("transformers.Dict", False),
        ("transformers.utils.List", False),
        ("transformers.utils.stands_in", True),
        ("transformers.today.stands_in", False),
        ("transformers.utils.other", False),
        ("transformers.utils.moved", True),
        ("transformers.utils.elsewhere", False),
    ],
)
def test_which_names_are_restored(own_tables, path, restored):
    assert is_restored(path) is restored
