"""`hf_compat.patch()`: every name that both sides have is ours wherever transformers holds it, until `unpatch()`."""

from __future__ import annotations

import copyreg
import enum
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

from hf_compat.interop import mirrors, patching

HERE = Path(__file__).resolve().parent


def python(folder, *command, **variables):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    printed = python(tmp_path_factory.mktemp("swap"), str(HERE / "swapped_process.py"), "out")
    (line,) = [line for line in printed.splitlines() if line.startswith("FOUND")]
    return json.loads(line[5:])


def test_every_name_is_replaced_where_it_lives(found):
    """Upstream's modules hold these names; scripts import them from there, and from the top level."""
    expected = {
        "transformers.trainer": "Trainer TrainingArguments TrainerCallback TrainerState TrainerControl EvalPrediction",
        "transformers.trainer_callback": "CallbackHandler EarlyStoppingCallback PrinterCallback ProgressCallback",
        "transformers.trainer_utils": "IntervalStrategy SchedulerType get_last_checkpoint set_seed PredictionOutput",
        "transformers.trainer_pt_utils": "LabelSmoother AcceleratorConfig",
        "transformers.training_args": "TrainingArguments OptimizerNames ParallelMode",
        "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments TrainingArguments",
        "transformers.trainer_seq2seq": "Seq2SeqTrainer Trainer",
        "transformers.hf_argparser": "HfArgumentParser",
        "transformers.optimization": "get_scheduler",
        "transformers.data.data_collator": "default_data_collator",
        "transformers.integrations.integration_utils": "TensorBoardCallback WandbCallback",
    }
    for home, names in expected.items():
        assert set(names.split()) <= set(found["at_home"][home]), home
    assert len(found["top_level"]) >= 19 and found["other"] == []
    assert {"transformers.trainer.DEFAULT_CALLBACKS.0", "transformers.trainer.DEFAULT_PROGRESS_CALLBACK"} <= set(
        found["changed"][0]
    )


def test_a_second_patch_changes_nothing(found):
    assert found["changed"][0] == found["changed"][1] and len(found["changed"][0]) > 80


def test_unpatch_leaves_transformers_as_it_was_name_by_name(found):
    assert found["left"] == [] and found["loaded_since"] == []
    assert found["is_original"] and found["third"]


def test_both_engines_train_alike_before_within_and_after(found):
    theirs = found["theirs"]
    assert len(theirs) == 4 and theirs == found["ours"] == found["resumed"] == found["again"] == found["made_before"]
    assert found["again_module"] == "transformers.trainer"


def test_our_trainer_is_an_instance_of_both_classes_and_has_nothing_of_theirs(found):
    assert found["subclasses_of"] == [True] * 3, "callbacks that only transformers has are callbacks, too"
    assert found["kin"] == [True] * 4 and found["kin_after"] == [True, True] and found["leaks"] == []


def test_who_holds_the_originals_is_told_once_what_to_do(found):
    first, second = found["advice"]
    (text,) = first
    assert "__main__.MadeBefore, __main__.Original, __main__.OriginalArguments" in text and second == []
    assert "Hint: call `hf_compat.patch()` before anything imports them" in text


WITHOUT = """
import sys
sys.modules["transformers"] = None
import hf_compat
hf_compat.unpatch()
try:
    hf_compat.patch()
except ImportError as error:
    print(str(error))
"""


def test_without_transformers_it_says_so(tmp_path):
    printed = python(tmp_path, "-c", WITHOUT)
    assert "`hf_compat.patch()` needs the package transformers" in printed and "pip install" in printed


MADE_BEFORE = """
import copy, copyreg, pickle
import torch, transformers
import hf_compat

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.line(x).squeeze(-1) - labels).pow(2).mean()}

rows = [{"x": torch.randn(2), "labels": 1.0} for _ in range(16)]
args = transformers.TrainingArguments("out", max_steps=4, save_steps=2, use_cpu=True, report_to="none")
trainer = transformers.Trainer(Tiny(), args, train_dataset=rows)
own = type(args)
hf_compat.patch()
trainer.train()
saved = torch.load("out/checkpoint-2/training_args.bin", weights_only=False)
assert type(saved) is own and saved.save_strategy is args.save_strategy and saved.max_steps == 4
assert type(copy.deepcopy(args)) is own
written = pickle.dumps(args)
hf_compat.unpatch()
assert type(pickle.loads(written)) is transformers.TrainingArguments is own
assert not [kind for kind in copyreg.dispatch_table if kind.__module__.startswith("transformers")]
"""


def test_a_trainer_that_was_made_before_goes_on_saving(tmp_path):
    python(tmp_path, "-c", MADE_BEFORE)
    assert (tmp_path / "out" / "checkpoint-4" / "training_args.bin").is_file()


KEPT = """
import inspect, json, sys
import transformers as held
del sys.modules["transformers"]
import transformers  # it loads itself once more, as it may at the first `patch()`, and the held one is empty
for name in (names := ("Trainer", "TrainerCallback", "HfArgumentParser")):
    vars(held).pop(name, None)
import hf_compat
from hf_compat.interop import releases
hf_compat.patch()
assert held is not sys.modules["transformers"]
assert held.Trainer is hf_compat.Trainer and held.TrainerCallback is hf_compat.TrainerCallback
words = {}
for name, (theirs, ours) in releases.REPLACED.items():
    taken = inspect.signature(ours).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    words[name] = [] if takes_all else [one for one in inspect.signature(theirs).parameters if one not in taken]
helpers = {name: getattr(sys.modules[f"transformers.{home}"], name).__module__ for home, name in (
    ("trainer_utils", "RemoveColumnsCollator"), ("trainer_utils", "has_length"), ("trainer_pt_utils", "nested_detach"))}
hf_compat.unpatch()
left = [name for name in names if name in vars(held)]
print(json.dumps([words, helpers, left, held.Trainer.__module__]))
"""


def test_what_is_called_with_words_that_ours_does_not_take_is_kept(tmp_path):
    words, helpers, left, module = json.loads(python(tmp_path, "-c", KEPT))
    assert len(words) > 35 and {name: missing for name, missing in words.items() if missing} == {}
    assert len(helpers) == 3 and all(home.startswith("transformers.") for home in helpers.values())
    assert left == [] and module == "transformers.trainer"


PARENT = """
import multiprocessing, os, subprocess, sys
from torch.utils.data import DataLoader

def home_of_trainer(_=None):
    from transformers import Trainer
    return Trainer.__module__

class Homes:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return home_of_trainer()

def child(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    return done.stdout.split() or done.stderr

if __name__ == "__main__":
    print("here", home_of_trainer())
    print("child", *child("child.py"))
    rank = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    print("rank", *child(*rank, "waits.py"))
    print("idle", *child("waits.py"))
    print("isolated", *child("-I", "waits.py"))
    print("worker", *next(iter(DataLoader(Homes(), num_workers=1, multiprocessing_context="spawn"))))
"""
# A process is to patch when it imports a Trainer, and loads nothing before.
WAITS = """
import sys
waits = any(type(finder).__module__ == "hf_compat.interop.import_hook" for finder in sys.meta_path)
print(waits, "torch" in sys.modules, getattr(sys, "own", "none"))
"""


@pytest.mark.matrix
@pytest.mark.real_python
def test_the_processes_that_a_script_starts_are_patched_too(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(
        "from transformers.trainer import Trainer\nprint(Trainer.__module__ + chr(10), end='')"
    )
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.own = 'theirs'")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path / "site")])
    lines = python(tmp_path, "-m", "hf_compat", "run", "parent.py", PYTHONPATH=path).splitlines()
    ours = "hf_compat.trainer"
    assert lines == [
        f"here {ours}",
        f"child {ours}",
        "rank True False theirs",
        "idle True False theirs",
        "isolated False False none",
        f"worker {ours}",
    ]


def test_the_signature_of_arguments_is_that_of_the_constructor():
    """Code filters its settings by these names."""
    from hf_compat import TrainingArguments

    class Own(TrainingArguments):
        def __init__(self, output_dir, extra=1, **others):
            super().__init__(output_dir, **others)

    assert {"output_dir", "learning_rate", "bf16"} <= inspect.signature(TrainingArguments).parameters.keys()
    assert [*inspect.signature(Own).parameters] == ["output_dir", "extra", "others"]


def modules(monkeypatch, **content):
    """Let the patch see these modules alone, each with its names."""
    made = {}
    for name, names in content.items():
        made[name.replace("_of_", ".")] = one = ModuleType(name.replace("_of_", "."))
        vars(one).update(names)
    monkeypatch.setattr(patching, "sys", SimpleNamespace(modules=made))
    return made


def test_holders_of_the_originals_are_found_in_other_packages(monkeypatch):
    def subclass(base, module, name, **content):
        return type(name, (base,), {"__module__": module, **content})

    def function():
        pass

    original = type("Original", (), {"__module__": "transformers.trainer"})
    theirs = subclass(original, "transformers.models.a", "Theirs")
    ours = subclass(original, "hf_compat.trainer", "Ours")
    stands_for = subclass(original, "transformers.trainer", "Original", _stands_for=original)
    users = [subclass(base, "user", "User") for base in (original, theirs)]
    hidden = [subclass(base, "user", "Hidden") for base in (ours, stands_for)]
    deep = subclass(users[0], "user.deep", "Deep")
    held = {"a": original, "b": function, "c": 1}
    made = modules(monkeypatch, user=held, __main__=held, __mp_main__=held, hf_compat_of_x=held, transformers_of_x=held)
    made["no_module"] = SimpleNamespace(**held)
    found = [*patching._holders([original, function])]
    assert sorted(found) == ["__main__.a", "__main__.b", "user.User", "user.User", "user.a", "user.b", "user.deep.Deep"]
    assert hidden and deep


def test_values_are_exchanged_under_names_and_in_lists_and_dicts(monkeypatch):
    class Own(dict):
        pass

    old, new, other = "old", "new", ["other"]

    def names():
        return {"a": old, "both": [old, other], "one": [old], "known": {"k": old, "o": other}, "__known__": {"k": old},
                "of_own_kind": Own(k=old), "pair": (old,), "none": [other], "number": 3}  # fmt: skip

    made = modules(monkeypatch, transformers=names(), transformers_of_x=names(), user=names())
    made["transformers.lazy"] = None
    patching._exchange({id(old): new}, [made["transformers"]])
    for name in ("transformers", "transformers.x"):
        after = {key: value for key, value in vars(made[name]).items() if key in names()}
        changed = {"a": new, "both": [new, other], "one": [new], "known": {"k": new, "o": other}}
        assert after == {**names(), **changed}
    assert {key: value for key, value in vars(made["user"]).items() if key in names()} == names()


def test_globals_that_a_script_has_replaced_and_nothing_reads_are_told(monkeypatch):
    def of(package):
        return type("Kind", (), {"__module__": package})

    before = {"kept": 1, "changed": 1, "listed": [1], "other": [1], "__file__": "a", "module": sys, "Trainer": 1,
              "theirs": 1, "ours": 1, "gone": 1}  # fmt: skip
    here = {**before, "changed": 2, "listed": [1], "other": [2], "__file__": "b", "module": 2, "Trainer": 2,
            "theirs": of("transformers.x"), "ours": of("hf_compat.x")}  # fmt: skip
    del here["gone"]
    told = []
    modules(monkeypatch, transformers_of_trainer=here)
    monkeypatch.setattr(patching, "GLOBALS_BEFORE", {"transformers.trainer": before})
    monkeypatch.setattr(patching, "warn_once", told.append)
    patching.tell_of_unread_globals()
    (text,) = told
    names = ("changed", "gone", "other")
    assert text.startswith(
        f"The script has replaced {', '.join(f'`transformers.trainer.{name}`' for name in names)}, which"
    )
    monkeypatch.setattr(patching, "GLOBALS_BEFORE", {"transformers.trainer": {"kept": 1}})
    patching.tell_of_unread_globals()
    assert told == [text]


class Plain:
    def __init__(self, number=1):
        self.number = number


class Slotted(Plain):
    __slots__ = ("other",)

    def __init__(self):
        super().__init__(2)
        self.other = 3


class Called(Plain):
    def __reduce__(self):
        return Called, (self.number,)


class CalledByAnother(Plain):
    def __reduce__(self):
        return _called, (self.number,), {"other": 5}


class ByName(Plain):
    def __reduce__(self):
        return "BY_NAME"


class Words(list):
    pass


def _called(number):
    return CalledByAnother(number)


BY_NAME = ByName()


class SaveOf4(enum.Enum):
    STEPS = "steps"


@pytest.mark.parametrize(
    ("value", "names_its_class"),
    [(Plain(4), True), (Slotted(), True), (Called(4), True), (CalledByAnother(4), False), (BY_NAME, False),
     (Words([1, 2]), True), (SaveOf4.STEPS, True)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_objects_of_a_replaced_class_are_pickled_with_their_own(monkeypatch, value, names_its_class):
    kind = type(value)
    monkeypatch.setitem(copyreg.dispatch_table, kind, patching._reduced)
    monkeypatch.setattr(patching, "_originals", {patching._name_of(kind): kind})
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        written = pickle.dumps(value, protocol)
        found = pickle.loads(written)
        assert type(found) is kind and found in (value, found)
        assert getattr(found, "__dict__", {}) == (
            vars(value) | ({"other": 5} if kind is CalledByAnother else {}) if hasattr(value, "__dict__") else {}
        )
        assert (found is value) is (value in (BY_NAME, SaveOf4.STEPS)) and (kind is not Words or found == value)
        assert getattr(found, "other", None) == {Slotted: 3, CalledByAnother: 5}.get(kind)
        assert (patching._name_of(kind).encode() in written) is names_its_class
        other = type("Other", (kind,), {}) if kind is Plain else kind
        patching._originals[patching._name_of(kind)] = other  # what the name stands for when it is read
        assert type(pickle.loads(written)) is other
        patching._originals.clear()  # in a process without a patch
        assert type(pickle.loads(written)) is kind
        patching._originals[patching._name_of(kind)] = kind


def test_transformers_has_several_objects_for_its_top_level(monkeypatch):
    class Lazy(ModuleType):
        pass

    top, former, other = Lazy("transformers"), Lazy("transformers"), Lazy("transformers.models")
    plain = ModuleType("transformers")
    made = modules(monkeypatch, user={"held": former, "plain": plain, "other": other, "twice": former})
    made |= {
        "transformers": top,
        "transformers.models": other,
        "of_no_module": SimpleNamespace(held=Lazy("transformers")),
    }
    assert sorted(map(id, patching._top_levels())) == sorted(map(id, (top, former)))


@pytest.mark.parametrize(
    ("value", "is_defined"),
    [
        (type("Kind", (), {"__module__": "transformers.trainer"}), True),
        (type("Kind", (), {"__module__": "transformers"}), True),
        (type("Kind", (), {"__module__": "transformers_of_others"}), False),
        (FunctionType((lambda: 0).__code__, {"__name__": "transformers.trainer"}), True),
        (type("Kind", (), {"__module__": "transformers"})(), False),
        (SimpleNamespace(__module__="transformers"), False),
    ],
)
def test_what_a_package_defines(value, is_defined):
    assert patching._is_defined_in(value, "transformers") is is_defined


@pytest.mark.parametrize("edited_by_others", [False, True])
def test_an_end_of_the_patch_undoes_each_part(monkeypatch, edited_by_others):
    done, theirs, ours, table = [], type("Kind", (), {}), type("Kind", (), {}), {}
    top, other = ModuleType("transformers"), (lambda one: "theirs")
    top.Trainer = ours
    monkeypatch.setattr(patching, "REPLACED", {"Trainer": (theirs, ours)})
    monkeypatch.setattr(patching, "_originals", {"a:Kind": theirs})
    monkeypatch.setattr(patching, "_not_loaded", [(top, "Trainer"), (top, "Gone")])
    monkeypatch.setattr(patching, "_top_levels", lambda: [top])
    monkeypatch.setattr(patching, "GLOBALS_BEFORE", {"transformers.trainer": {}})
    monkeypatch.setattr(patching.copyreg, "dispatch_table", table)
    monkeypatch.setattr(inspect, "getsource", other if edited_by_others else patching._getsource_for_readers)
    for name in ("log_as_transformers", "follow", "take_former_names_back", "_exchange"):
        monkeypatch.setattr(patching, name, lambda *given, name=name: done.append((name, *given)))
    table[theirs] = patching._reduced
    patching.unpatch()
    assert inspect.getsource is (other if edited_by_others else patching._getsource)
    expected = [
        ("log_as_transformers", False),
        ("follow", None),
        ("take_former_names_back",),
        ("_exchange", {id(ours): theirs}, [top]),
    ]
    assert done == expected and not hasattr(top, "Trainer")
    left = (table, patching._originals, patching.GLOBALS_BEFORE, patching.REPLACED, patching._not_loaded)
    assert not any(left)
    patching.unpatch()
    assert done == expected, "there is nothing to undo"


@pytest.mark.parametrize(("is_first", "holders"), [(True, []), (False, ["user.Trainer", "a.Own", "a.Own"])])
def test_a_patch_does_each_part_once(monkeypatch, is_first, holders):
    done, warned, replaced, notes = [], [], {}, {}
    kept = type("Kept", (), {"__module__": "transformers.trainer"})
    theirs = type("TrainingArguments", (), {"__module__": "transformers.training_args"})
    ours, table = type("TrainingArguments", (), {}), {kept: "own"}
    pairs = {"TrainingArguments": (theirs, ours), "function": (len, min), "Kept": (kept, ours)}
    top, listed, default = ModuleType("transformers"), [1], object()

    def begin():
        done.append("_begin")
        replaced.update(pairs)
        return [top]

    if not is_first:
        replaced.update(pairs)
        notes["transformers.trainer"] = {"default": "noted before"}
    asked = []
    for name in ("log_as_transformers", "add_former_names", "follow", "_exchange"):
        monkeypatch.setattr(patching, name, lambda *given, name=name: done.append((name, *given)))
    monkeypatch.setattr(patching, "need", lambda *words: asked.append(words[0]))
    monkeypatch.setattr(patching, "_begin", begin)
    monkeypatch.setattr(patching, "REPLACED", replaced)
    monkeypatch.setattr(patching, "_originals", {})
    monkeypatch.setattr(patching, "_not_loaded", [(top, "function")])
    monkeypatch.setattr(patching, "_top_levels", lambda: [top])
    monkeypatch.setattr(patching, "replaced_release", lambda kind: ("release of", kind))
    monkeypatch.setattr(patching, "_holders", lambda kinds: done.append(kinds) or iter(holders))
    monkeypatch.setattr(patching, "warn_once", warned.append)
    monkeypatch.setattr(patching, "GLOBALS_BEFORE", notes)
    monkeypatch.setattr(patching.copyreg, "dispatch_table", table)
    monkeypatch.setattr(inspect, "getsource", inspect.getsource)
    names = {"listed": listed, "known": {"a": listed}, "default": default}
    modules(monkeypatch, transformers_of_trainer=names, transformers_of_other={"x": 1})
    patching.patch()
    assert asked == ["transformers"] and inspect.getsource is patching._getsource_for_readers
    exchanged = {id(one): other for one, other in pairs.values()}
    assert done == [
        *(["_begin", ("log_as_transformers", True)] if is_first else []), ("_exchange", exchanged, [top]),
        ("add_former_names", [top]), ("follow", ("release of", theirs)), [theirs],
    ]  # fmt: skip
    assert table == {theirs: patching._reduced, kept: "own"} and top.function is min
    assert patching._originals == {"transformers.training_args:TrainingArguments": theirs}
    assert [*notes] == ["transformers.trainer"]
    found = notes["transformers.trainer"]
    assert found["default"] is (default if is_first else found["default"]) and found["listed"] == [1]
    assert is_first or found["default"] == "noted before"
    assert found["listed"] is not listed and found["known"] == {"a": listed} and found["known"] is not names["known"]
    assert len(warned) == (not is_first) and all(": a.Own, user.Trainer. They" in text for text in warned)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_kin"),
    [("Trainer", type("Trainer", (), {"method": 1, "both": 1}), True),
     ("Seq2SeqTrainer", type("Seq2SeqTrainer", (), {"method": 1, "both": 1}), True),
     ("Other", type("Other", (), {}), False), ("Trainer", len, False), (len, type("Trainer", (), {}), False)],
)  # fmt: skip
def test_only_a_trainer_becomes_a_subclass_of_transformers(ours, theirs, is_kin):
    base = type("Base", (), {"both": 2})
    kind = type(ours, (base,), {}) if isinstance(ours, str) else ours
    for _ in range(2):
        mirrors.acknowledge(kind, theirs)
    if not is_kin:
        assert kind is len or kind.__bases__ == (base,)
        return
    assert issubclass(kind, theirs) and len(kind.__bases__) == 2 and kind.both == 2
    assert mirrors.upstream_class_of(kind.__bases__[1]) is theirs and mirrors.upstream_class_of(kind) is None
    with pytest.raises(AttributeError, match="method"):
        kind().method  # noqa: B018


def test_subclasses_that_only_transformers_has_get_heirs():
    def made(name, *bases, module="transformers.x"):
        return type(name, bases, {"__module__": module, "__doc__": name})

    theirs, ours = made("Callback"), made("Callback", module="hf_compat.x")
    known, lone = made("Known", theirs), made("Lone", theirs)
    inner, user, both = made("Inner", known), made("User", theirs, module="user"), made("Both", theirs, ours)
    of_user, of_both = made("OfUser", user), made("OfBoth", both)
    found = dict(mirrors.subclasses_of(theirs, ours, {"Known"}))
    assert {name: pair[0] for name, pair in found.items()} == {"Lone": lone, "Inner": inner}
    for name, (kind, heir) in found.items():
        assert heir.__mro__[1:3] == (kind, *kind.__mro__[1:2])[:2] and issubclass(heir, ours)
        assert (heir.__name__, heir.__module__, heir.__doc__) == (name, "transformers.x", name)
        assert mirrors.heir_of(kind, ours) is heir
    assert of_user and of_both
