"""Classes of other files in a script's folder are followed up to transformers' own, and what they do is told."""

from __future__ import annotations

import runpy
import textwrap

import pytest

import hf_compat
from hf_compat.tools.migration.attributes import SUPPLIED
from hf_compat.tools.migration.class_graph import ClassGraph
from hf_compat.tools.migration.migrate import migrate
from hf_compat.tools.migration.report import Effect, Target
from hf_compat.training_args import OptimizerNames

LIBRARY = """
from transformers import Trainer, TrainingArguments


class AdapterTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss


class AdapterArguments(TrainingArguments):
    evaluation_strategy: str = "no"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write files of a folder, and stand in it."""
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"))
        return tmp_path

    return write


def found(name, target=Target.HF_COMPAT, *, runs_as_is=True):
    (file,) = migrate([name], target, runs_as_is=runs_as_is).files
    return [(one.effect, one.line, one.what, one.reason) for one in file.by_gravity]


def test_an_override_two_files_away_fails_where_it_would(folder):
    folder(
        mylib=LIBRARY,
        middle="import mylib\n\nclass MiddleTrainer(mylib.AdapterTrainer):\n    pass\n",
        script="from middle import MiddleTrainer\n\nMiddleTrainer(None).train()\n",
    )
    assert found("script.py") == []  # hf_compat passes what the method takes
    told = found("script.py", Target.TRANSFORMERS_5)
    assert {(line, what) for _, line, what, _ in told} == {(1, "AdapterTrainer of mylib.py")}
    (reason,) = [reason for effect, *_, reason in told if effect is Effect.FAILS]
    assert reason.startswith("mylib.py:5: AdapterTrainer.compute_loss: transformers 5 calls it with num_items_in_batch")


def test_a_migration_names_the_file_that_has_to_be_migrated_too(folder):
    folder(mylib=LIBRARY, script="from mylib import AdapterTrainer\n\nAdapterTrainer(None).train()\n")
    told = "`hf-compat migrate` has to rewrite mylib.py, too"
    assert [one[3] for one in found("script.py", runs_as_is=False)] == [told]
    assert not any(file.findings for file in migrate(["script.py", "mylib.py"]).files)  # both are migrated


@pytest.mark.parametrize("statement", ["from .mylib import AdapterTrainer as Base", "from . import mylib"])
def test_relative_imports_in_a_package(folder, statement):
    base = "Base" if "Base" in statement else "mylib.AdapterTrainer"
    folder(
        pkg____init__="",
        pkg__mylib=LIBRARY,
        pkg__script=f"{statement}\n\nclass Mine({base}):\n    pass\n\nMine(1, 2, 3, 4, 5, 6, 7, 8)\n",
    )
    assert [one[2] for one in found("pkg/script.py")] == ["Mine"]  # positional arguments from the eighth on


def test_rules_for_arguments_and_trainers_hold_for_classes_of_other_files(folder):
    folder(
        mylib=LIBRARY.replace('    evaluation_strategy: str = "no"\n', "    alpha: float = 0.5\n"),
        script="""
            from mylib import AdapterArguments, AdapterTrainer

            args = AdapterArguments("out", evaluation_strategy="epoch")
            AdapterTrainer(None, args, tokenizer=None).train()
        """,
    )
    (file,) = migrate(["script.py"]).files
    assert b'eval_strategy="epoch"' in file.after and b"processing_class=None" in file.after


def test_what_a_class_of_another_file_names_itself_stays(folder):
    folder(
        mylib="""
            from dataclasses import dataclass
            from transformers import Trainer, TrainingArguments

            class TokenTrainer(Trainer):
                def __init__(self, *args, tokenizer=None, **kwargs):
                    super().__init__(*args, **kwargs)

            @dataclass
            class OwnArguments(TrainingArguments):
                adafactor: bool = False
        """,
        script="from mylib import *\nfrom mylib import OwnArguments, TokenTrainer\n\n"
        "TokenTrainer(None, OwnArguments('out', adafactor=True), tokenizer=None).train()\n",
    )
    (file,) = migrate(["script.py"]).files
    assert file.after == file.before


@pytest.mark.parametrize(
    "texts",
    [
        {"one": "from two import Mine\n", "two": "from one import Mine\n"},  # a circle of imports
        {"one": "class Mine(Mine):\n    pass\n"},  # of itself
        {"one": "class Mine(\n"},  # not Python
        {"one": "from elsewhere import Trainer\n\nclass Mine(Trainer):\n    pass\n"},  # not in the folder
        {},
    ],
)
def test_what_leads_nowhere_is_nothing(folder, texts):
    home = folder(script="from one import Mine\n", **texts)
    graph = ClassGraph(home / "script.py")
    assert graph.ancestry("one.Mine") is None and ClassGraph(None).ancestry("one.Mine") is None
    assert found("script.py") == []


def test_members_of_optimizers_of_4(folder):
    folder(script="from transformers.training_args import OptimizerNames\n\noptim = OptimizerNames.ADAMW_HF\n")
    assert [one[:3] for one in found("script.py")] == [(Effect.LOOK, 3, "OptimizerNames.ADAMW_HF")]
    assert (Effect.FAILS, 3, "OptimizerNames.ADAMW_HF") in [
        one[:3] for one in found("script.py", Target.TRANSFORMERS_5)
    ]
    (file,) = migrate(["script.py"]).files
    assert b"optim = OptimizerNames.ADAMW_TORCH\n" in file.after
    for name in ("ADAMW_HF", "ADAMW_APEX_FUSED"):  # as under `hf-compat run`, where the text works
        assert getattr(OptimizerNames, name) == name.lower() and name not in OptimizerNames.__members__
        with pytest.warns(hf_compat.errors.InertArgumentWarning, match="takes its place"):
            hf_compat.TrainingArguments("out", optim=getattr(OptimizerNames, name))


def test_names_that_only_a_star_import_bound(folder):
    text = "from transformers.trainer import *\n\nrows: Dict[str, int] = {}\nTrainer(None)\n"
    folder(
        script=text,
        other=text.replace("import *", "import *\nfrom typing import Dict"),
        third=f"from torch import *\n{text}",
    )
    assert (Effect.FAILS, 3, "Dict") in [one[:3] for one in found("script.py", Target.TRANSFORMERS_5)]
    assert not {"Dict", "Trainer"} & {one[2] for name in ("other.py", "third.py") for one in found(name)}
    assert "Dict" not in {one[2] for one in found("script.py")}, "`run` binds it"


STAR = """
from transformers.trainer import *


def names() -> Optional[List[int]]:
    return [IntervalStrategy.STEPS, nested_concat, nested_truncate, is_deepspeed_zero3_enabled, is_torch_tpu_available]


def reached_by_few(trainer):
    return OSS if trainer.sharded_ddp == ShardedDDPOption.SIMPLE else amp


names()
"""


@pytest.mark.parametrize("target", Target)
def test_names_that_a_star_import_lost_are_imported_from_their_homes(target, folder):
    place = folder(script=STAR)
    (file,) = migrate(["script.py"], target).files
    (place / "after.py").write_bytes(file.after)
    runpy.run_path(str(place / "after.py"))
    assert migrate(["after.py"], target).files[0].after == file.after
    looks = {one.what for one in file.by_gravity if one.effect is Effect.LOOK}
    assert {"OSS", "ShardedDDPOption", "amp"} <= looks, "an error where they are reached"
    assert not {"names", "trainer", "transformers", "STEPS", "__defaults__"} & {one.what for one in file.by_gravity}


@pytest.mark.filterwarnings("ignore:These were imported from transformers")  # by other tests of this process
def test_names_that_a_star_import_lost_are_there_under_run(folder):
    place = folder(script=f"{STAR}\nassert not reached_by_few.__defaults__ and ShardedDDPOption.SIMPLE == 'simple'\n")
    with pytest.raises(NameError, match="Optional"):
        runpy.run_path(str(place / "script.py"))
    hf_compat.patch()
    try:
        runpy.run_path(str(place / "script.py"))
    finally:
        hf_compat.unpatch()


def test_an_argument_of_a_class_in_another_file_is_known(folder):
    own = "def __init__(self, *args, alpha=0.5, **kwargs):\n        super().__init__(*args, **kwargs)\n"
    folder(
        mylib=f"from transformers import TrainingArguments\n\nclass OwnArguments(TrainingArguments):\n    {own}",
        script="from mylib import OwnArguments\n\nargs = OwnArguments('out', alpha=0.5, eval_strategy='step')\n",
    )
    assert [one[2] for one in found("script.py") if one[0] is Effect.FAILS] == ["eval_strategy"]


def test_names_of_trainers_that_this_package_supplies():
    assert all(hasattr(hf_compat.Trainer, name) for name in SUPPLIED)


def test_a_script_fails_where_a_file_that_it_imports_does(folder):
    """Only imports that run whenever the file is imported count: not those in functions, `try` or `if`."""
    folder(
        losses="import torch\nfrom pairs import rows\n\ndef weigh(loss):\n    from datasets import load_metric\n",
        pairs="import transformers\nfrom datasets import (\n    load_metric,\n)\n\nrows = load_metric\n",
        guarded="import transformers\n\ntry:\n    from datasets import load_metric\nexcept ImportError:\n    pass\n",
        script="import guarded\nimport losses\nfrom transformers import Trainer\n\nTrainer(None).train()\n",
    )
    ((effect, line, what, reason),) = found("script.py")
    assert (effect, line, what) == (Effect.FAILS, 2, "import of pairs.py")
    assert reason.startswith("pairs.py:2: from datasets import load_metric: datasets ")
    assert "has no such name" in reason


def test_the_packages_around_an_imported_module_run_first(folder):
    top = folder(
        pkg__answers="from transformers import TextDataset\n\nAnswers = TextDataset",
        pkg__inner__losses="weight = 1",
        script="from transformers import Trainer\n\nfrom pkg.inner.losses import weight\n\nTrainer(None).train()\n",
    )
    (top / "pkg" / "inner" / "__init__.py").touch()
    assert found("script.py") == []
    (top / "pkg" / "__init__.py").write_text("from pkg.answers import Answers\n")
    ((effect, line, what, _),) = found("script.py")
    assert (effect, line, what) == (Effect.FAILS, 3, "import of answers.py")


def test_a_file_of_a_package_fails_by_its_siblings_and_not_by_a_namesake_above(folder):
    folder(
        evaluate="import transformers\nfrom datasets import load_metric\n",
        pkg____init__="",
        pkg__data="import transformers\nfrom datasets import load_metric\n",
        pkg__script="import evaluate\nfrom transformers import Trainer\nfrom .data import load\n\nTrainer(None)\n",
    )
    assert [(line, what) for _, line, what, _ in found("pkg/script.py")] == [(3, "import of data.py")]


@pytest.mark.parametrize(
    ("build", "line"), [("pyproject.toml", 2), ("setup.py", 2), ("setup.cfg", 2), ("README.md", None)]
)
def test_a_package_that_the_repository_builds_is_followed_by_its_one_name(folder, build, line):
    top = folder(
        experiments__script="from transformers import Trainer\nfrom pkg import weigh\n\nTrainer(None).train()\n",
        pkg__losses="import transformers\nfrom datasets import load_metric\n\nweigh = load_metric\n",
        module="import transformers\nfrom datasets import load_metric\n",
        experiments__other="import module\nfrom transformers import Trainer\n\nTrainer(None).train()\n",
    )
    (top / "pkg" / "__init__.py").write_text("from pkg.losses import weigh\n")
    (top / build).touch()
    expected = [] if line is None else [(line, "import of losses.py")]
    assert [(line, what) for _, line, what, _ in found("experiments/script.py")] == expected
    assert found("experiments/other.py") == []  # a module above a script is not on its path


def test_doctor_names_what_a_class_of_another_named_file_does(folder):
    """The script fails, whether or not the other file is named beside it."""
    body = "class Base(Trainer):\n    def f(self):\n        return self.num_tokens()\n"
    folder(
        library=f"from transformers import Trainer\n\n{body}", script="from library import Base\n\nBase(None).train()\n"
    )
    for paths in (["script.py"], ["script.py", "library.py"], ["."]):
        files = migrate(paths, runs_as_is=True).files
        (script,) = (one for one in files if one.path.endswith("script.py"))
        assert script.verdict == "fails" and script.findings[0].what == "Base of library.py"


def test_a_name_that_a_moved_module_has_lost_fails(folder):
    folder(script="import transformers\nfrom transformers.file_utils import torch_required\n")
    assert [one[:3] for one in found("script.py")] == [
        (Effect.FAILS, 2, "from transformers.file_utils import torch_required")
    ]


def test_a_module_beside_the_script_is_not_the_installed_one(folder):
    script = (
        "import datasets\nfrom datasets import DATASETS\nfrom transformers import Trainer\n\nTrainer(datasets.OTHERS)\n"
    )
    folder(script=script)
    assert [what for _, _, what, _ in found("script.py")] == ["from datasets import DATASETS", "datasets.OTHERS"]
    folder(datasets="DATASETS = OTHERS = []\n")
    assert found("script.py") == []


def test_only_what_a_class_reaches_in_its_file_is_told(folder):
    gone = "tokenizer.encode_plus('a')"
    folder(
        mylib=f"""
            from transformers import Trainer

            def nobody_calls():
                {gone}

            def called():
                also()

            def also():
                {gone}

            class Other(Trainer):
                def f(self):
                    {gone}

            class Base(Trainer):
                def g(self):
                    {gone}

            class Mine(Base):
                def f(self):
                    called()

            if __name__ == "__main__":
                {gone}
        """,
        script="from mylib import Mine\n\nMine(None).train()\n",
    )
    # `also` and `Base.g`. Each class of the way tells what it reaches.
    assert {(what, reason.split(":")[1]) for _, _, what, reason in found("script.py")} == {
        ("Mine of mylib.py", "10"),
        ("Mine of mylib.py", "18"),
        ("Base of mylib.py", "18"),
    }


def test_a_gone_import_of_a_followed_file_is_told_once(folder):
    folder(
        mylib="from datasets import load_metric\nfrom transformers import Trainer\n\nclass Mine(Trainer):\n    pass\n",
        script="from mylib import Mine\n\nMine(None).train()\n",
    )
    assert [what for _, _, what, _ in found("script.py")] == ["import of mylib.py"]


@pytest.mark.parametrize("place", ["def f():\n    ", "try:\n    "])
def test_a_gone_import_of_a_file_that_a_class_alone_leads_to_is_told(folder, place):
    rest = "except ValueError:\n    pass\n" if place.startswith("try") else ""
    folder(
        mylib="from datasets import load_metric\nfrom transformers import Trainer\n\nclass Mine(Trainer):\n    pass\n",
        script=f"{place}from mylib import Mine\n{rest}",
    )
    assert [what for _, _, what, _ in found("script.py")] == ["Mine of mylib.py"]
