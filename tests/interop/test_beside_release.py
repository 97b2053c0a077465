"""Beside the installed transformers, of whatever release: what its scripts read, declare and copy.

The run of every commit has one release. `python tests/sweeps/releases/matrix.py --tests` runs this beside each.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import hf_compat
from helpers import toy
from hf_compat import Trainer, TrainingArguments
from hf_compat.cli.run import tell_defaults
from hf_compat.errors import HfCompatWarning, OverrideError
from hf_compat.hf.arguments_rules import followed
from hf_compat.tools.migration.gone_names import FORMER_KEYWORDS, FORMER_MEMBERS, OF_GENERATION
from sweeps.releases import attributes

THEIRS, ARGUMENTS = transformers.Trainer, transformers.TrainingArguments
FIELDS = {field.name for field in dataclasses.fields(ARGUMENTS)}
EVALUATES = "eval_strategy" if "eval_strategy" in FIELDS else "evaluation_strategy"
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
SETTINGS = {
    "defaults": {},
    "evaluated": {EVALUATES: "steps", "eval_steps": 2, "save_steps": 4, "load_best_model_at_end": True},
    "warmed_up": {"warmup_steps": 3, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "max_grad_norm": 0.5},
    **({"by_ratio": {"warmup_ratio": 0.25, "group_by_length": True}} if "warmup_ratio" in FIELDS else {}),
}
pytestmark = pytest.mark.filterwarnings("ignore:These were imported from transformers", "ignore:warmup_ratio is")


@pytest.fixture
def swapped():
    hf_compat.patch()
    yield
    hf_compat.unpatch()


def unexplained(theirs, ours):
    """Return the names that are others than the release's, without a reason in the table; a ratio of 4.x is a share."""
    there = attributes.looked_at(theirs)
    here = attributes.looked_at(ours, there)
    reasons = {*attributes.REASONS["TrainingArguments"], *(("warmup_steps",) if ours.warmup_steps < 1 else ())}
    said = {name: attributes.unlike(value, here.get(name)) for name, value in there.items()}
    return {
        name: what
        for name, what in said.items()
        if what and name not in reasons and f"{attributes.RAISES} AbsentName" not in what
    }


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_arguments_of_the_release_read_the_same_after_they_were_adopted(tmp_path, settings):
    theirs, adopted = (ARGUMENTS(str(tmp_path), use_cpu=True, **settings) for _ in range(2))
    Trainer(toy.Classifier(), adopted, train_dataset=toy.rows(8), eval_dataset=toy.rows(8))
    assert unexplained(theirs, adopted) == {}
    assert adopted.to_dict().keys() == theirs.to_dict().keys()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_arguments_in_their_place_read_the_same_with_the_releases_defaults(swapped, tmp_path, settings):
    assert unexplained(ARGUMENTS(str(tmp_path), use_cpu=True, **settings),
                       transformers.TrainingArguments(str(tmp_path), use_cpu=True, **settings)) == {}  # fmt: skip


def test_run_tells_the_defaults_that_are_not_todays(swapped, capsys):
    tell_defaults()
    told, defaults = capsys.readouterr().err, followed().defaults
    assert bool(told) is bool(defaults) is (transformers.__version__.split(".")[:2] not in (["5", "23"], ["5", "24"]))
    assert not told or told.startswith(f"hf-compat run: transformers {transformers.__version__} is installed")
    assert all(f"{name}=" in told for name in defaults)


def test_names_of_ours_have_todays_defaults_beside_any_release(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.optim, args.report_to, args.use_cache, args.compat) == ("adamw_torch_fused", [], False, "5")


@dataclasses.dataclass
class Declares(ARGUMENTS):
    warmup_ratio: float = dataclasses.field(default=0.5)


class Rates(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.seen.append(lr_scheduler.get_last_lr()[0])


def test_a_declared_ratio_warms_up_as_in_a_release_that_has_it(tmp_path):
    seen = {}
    for kind in (Trainer, THEIRS):
        callback = Rates()
        args = Declares(str(tmp_path), max_steps=4, **QUIET)
        kind(toy.Classifier(), args, train_dataset=toy.rows(32), callbacks=[callback]).train()
        seen[kind] = callback.seen
    assert seen[Trainer] == pytest.approx([2.5e-5, 5e-5, 2.5e-5, 0])
    if "warmup_ratio" in FIELDS:
        assert seen[THEIRS] == seen[Trainer]


def test_logs_have_the_same_keys(tmp_path):
    def keys(kind, arguments):
        values = {**QUIET, EVALUATES: "steps", "eval_steps": 2, "max_steps": 4}
        trainer = kind(toy.Classifier(), arguments(str(tmp_path), **values), train_dataset=toy.rows(32),
                       eval_dataset=toy.rows(8))  # fmt: skip
        trainer.train()
        return [set(log) for log in trainer.state.log_history]

    theirs = keys(THEIRS, ARGUMENTS)
    assert keys(Trainer, ARGUMENTS) == theirs and len(theirs) == 7


TWO_RANKS = """
import json, os, sys
import transformers
theirs = transformers.TrainingArguments("out", use_cpu=True, report_to="none")
import hf_compat
names = ("local_rank", "process_index", "local_process_index", "world_size", "n_gpu", "should_save", "should_log",
         "train_batch_size", "_n_gpu")
def read(args):
    return [getattr(args, name) for name in names] + [args.parallel_mode.value, args.device.type]
found = [read(theirs), read(hf_compat.TrainingArguments("out", use_cpu=True))]
hf_compat.patch()
found.append(read(transformers.TrainingArguments("out", use_cpu=True)))
open(os.path.join(sys.argv[1], os.environ.get("RANK", "0")), "w").write(json.dumps(found))
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_ranks_and_devices_are_the_releases(tmp_path, ranks):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if ranks == 2 else []
    paths = os.pathsep.join([str(Path(hf_compat.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, *launcher, str(script), str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(ranks):
        theirs, ours, patched = json.loads((tmp_path / str(rank)).read_text())
        assert theirs == ours == patched, f"rank {rank}"


METHODS = {
    name: value
    for name, value in vars(THEIRS).items()
    if inspect.isfunction(getattr(value, "__func__", value)) and not name.startswith("__")
}
# What a release's own method does otherwise, where it stands in a subclass of our Trainer.
OTHERWISE = {
    "_inner_training_loop": "runs the release's own loop, which logs what that release logs, or asks for `_run_epoch`",
    "_maybe_log_save_evaluate": "rounds the loss before 5.0, and logs the learning rate of the next update in 4.46",
    "log": "takes 'no' for true in 4.46, and logs that no tokens were seen",
    "training_step": "adds up the losses of an update's micro-batches in 4.46, for models that count no items",
    "create_accelerator_and_postprocess": "asks for `_build_accelerator_args` in 5.23: an `AbsentName`",
}


def outcome(kind, folder):
    """Train, evaluate, predict and save; return weights, logs and predictions."""
    hf_compat.set_seed(0)
    values = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    values |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    values |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    args = TrainingArguments(str(folder), **{**QUIET, **values})
    trainer = kind(toy.Classifier(), args, train_dataset=toy.rows(48), eval_dataset=toy.rows(16),
                   compute_metrics=lambda given: {"sum": float(given.predictions.sum())})  # fmt: skip
    trainer.train()
    predicted = trainer.predict(toy.rows(8)).predictions.tolist()
    trainer.save_model(str(folder / "model"))
    logs = [
        {n: v for n, v in log.items() if "runtime" not in n and "second" not in n} for log in trainer.state.log_history
    ]
    return [tensor.tolist() for tensor in trainer.model.state_dict().values()], logs, predicted


def test_methods_of_the_release_do_the_same_in_a_subclass_of_ours(tmp_path):
    """A vendored Trainer: all of the release's methods at once, but those that are refused or said to differ."""
    own = {}
    for name in METHODS.keys() - OTHERWISE.keys():
        try:
            type(f"Copies{name}", (Trainer,), {name: METHODS[name]})
        except (OverrideError, HfCompatWarning):  # it says that nothing calls it
            continue
        own[name] = METHODS[name]
    assert len(own) > 70
    copied = type("Copied", (Trainer,), own)
    assert outcome(copied, tmp_path / "copied") == outcome(Trainer, tmp_path / "ours")


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHERWISE])
def test_a_method_of_the_release_does_the_same_in_a_subclass_of_ours(tmp_path, name):
    try:
        copied = type("Copied", (Trainer,), {name: METHODS[name]})
    except OverrideError as error:
        assert "Hint: " in str(error)
        return
    assert outcome(copied, tmp_path / "copied") == outcome(Trainer, tmp_path / "ours")


def tiny_models(folder):
    """Return a tokenizer and a model, which lie in a folder, too."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="a")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    return tokenizer, model


IS_4 = transformers.__version__.startswith("4.")
between = pytest.mark.skipif(transformers.__version__.startswith("5.0"), reason="some went with 5.0, some later")


@between
def test_former_members_are_those_that_4_has_and_5_has_not(tmp_path):
    kinds = (
        transformers.Wav2Vec2Processor,
        transformers.Wav2Vec2ForCTC,
        transformers.DynamicCache,
        transformers.CLIPConfig,
    )
    instances = (*tiny_models(tmp_path), *kinds)
    for name in FORMER_MEMBERS:
        assert any(hasattr(one, name) for one in instances) is IS_4, name


@pytest.mark.filterwarnings("ignore")
def test_former_keywords_are_those_that_5_refuses(tmp_path):
    tiny_models(tmp_path)
    for name in FORMER_KEYWORDS:
        went_early = name == "use_flash_attention_2" and not transformers.__version__.startswith("4.46")
        went_early = went_early or name == "gradient_checkpointing"
        try:
            transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, **{name: False})
        except TypeError as error:
            assert name in str(error) and (went_early or not IS_4)
        else:
            assert IS_4, name


@pytest.mark.skipif(IS_4, reason="4.x reads them from the model's configuration")
def test_settings_of_generation_in_a_models_configuration_are_refused(tmp_path):
    _, model = tiny_models(tmp_path)
    for name in OF_GENERATION:
        assert not hasattr(model.config, name), name
        setattr(model.config, name, 7)
        with pytest.raises(ValueError, match=name):
            model.save_pretrained(tmp_path)
        delattr(model.config, name)
