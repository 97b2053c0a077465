"""The steps between receiving a model and training it: what is refused, what is placed, and in which order."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.toy import Classifier, Stream, rows, tiny_gpt2
from hf_compat import HFModule, Trainer, TrainingArguments
from hf_compat.trainer_methods import model_setup
from hf_compat.trainer_methods.model_setup import ModelSetupMethods

APIS = ("transformers", "hf_compat")
LONG, ENDLESS = rows(8), Stream(8)


def error_of(call):
    """Return the builtin kind of a call's error, or None."""
    try:
        call()
    except Exception as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return None


def own_loader(api):
    def get_train_dataloader(self):
        return DataLoader(LONG, batch_size=4)

    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(LONG, batch_size=4)

    return type(
        "Own",
        (importlib.import_module(api).Trainer,),
        {"get_train_dataloader": get_train_dataloader, "get_eval_dataloader": get_eval_dataloader},
    )


def adam():
    model = Classifier()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize(
    ("values", "options", "kinds"),
    [
        ({}, {}, (None, None)),
        ({"eval_strategy": "steps"}, {}, ("ValueError", None)),
        ({"eval_strategy": "epoch"}, {"eval_dataset": LONG}, (None, None)),
        (
            {"eval_strategy": "steps", "save_strategy": "best", "metric_for_best_model": "loss"},
            {"eval_dataset": LONG}, (None, None),
        ),
        ({"eval_strategy": "steps", "save_strategy": "best"}, {"eval_dataset": LONG}, ("ValueError", "ValueError")),
        ({"max_steps": 3}, {"train_dataset": ENDLESS}, (None, None)),
        ({"max_steps": 1}, {"train_dataset": ENDLESS}, (None, None)),
        ({}, {"train_dataset": ENDLESS}, ("ValueError", "ValueError")),
        ({}, {"train_dataset": None}, (None, None)),
        ({}, {"data_collator": 3}, ("TypeError", "TypeError")),
        ({}, {"model": None}, ("RuntimeError", "RuntimeError")),
        ({}, {"model_init": Classifier}, ("ValueError", "ValueError")),
        ({}, {"model": None, "model_init": lambda: Classifier()}, (None, None)),
        ({}, {"model": None, "model_init": lambda trial: Classifier()}, (None, None)),
        ({}, {"model": None, "model_init": lambda trial, more: Classifier()}, ("RuntimeError", "RuntimeError")),
        ({}, {"model": None, "model_init": lambda: None}, ("RuntimeError", "RuntimeError")),
        ({}, {"optimizers": "sgd"}, (None, None)),
        ({}, {"optimizers": "sgd", "model": None, "model_init": Classifier}, ("RuntimeError", "RuntimeError")),
        ({}, {"optimizers": "schedule", "model": None, "model_init": Classifier}, ("RuntimeError", "RuntimeError")),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, (None, None)),
        (
            {}, {"optimizers": "sgd", "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            ("RuntimeError", "RuntimeError"),
        ),
    ],
)  # fmt: skip
def test_what_the_constructor_refuses(values, options, kinds, owns, tmp_path):
    found = []
    for api in APIS:
        module, (model, optimizer) = importlib.import_module(api), adam()
        given = {"model": model, "train_dataset": LONG, **options}
        if given.get("optimizers") == "sgd":
            given["optimizers"] = (optimizer, None)
        elif given.get("optimizers") == "schedule":
            given["optimizers"] = (None, torch.optim.lr_scheduler.ConstantLR(optimizer))
        kind = own_loader(api) if owns else module.Trainer

        def make(module=module, kind=kind, given=given):
            args = module.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **values)
            kind(args=args, **given)

        found.append(error_of(make))
    assert found[1] == kinds[owns]
    if values == {"eval_strategy": "steps"}:  # upstream looks at `eval_dataset` alone
        assert found[0] == "ValueError"
    elif "data_collator" in options:  # upstream fails at the first batch
        assert found[0] is None
    else:
        assert found[0] == found[1]


def test_best_checkpoints_need_evaluations(tmp_path):
    args = TrainingArguments(str(tmp_path), save_strategy="best", metric_for_best_model="loss", report_to="none")
    with pytest.raises(ValueError, match="`eval_strategy='no'` makes none"):
        Trainer(Classifier(), args, train_dataset=LONG)


@pytest.mark.parametrize(("base", "named"), [(nn.Module, "NoBase"), (pl.LightningModule, "NoBase")])
def test_a_model_whose_base_was_not_made_is_named(base, named, tmp_path):
    kind = type("NoBase", (base,), {"__init__": lambda self: None})
    with pytest.raises(ValueError, match=f"The constructor of {named} has not called"):
        Trainer(kind(), TrainingArguments(str(tmp_path), report_to="none"))


def test_a_module_of_ours_is_no_model(tmp_path):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="is an HFModule"):
        Trainer(HFModule(Classifier(), args), args)


@pytest.mark.parametrize("name", ["forward", "training_step", "configure_model", "on_train_start"])
def test_steps_of_a_lightning_module_are_told(name, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(model_setup, "warn_once", told.append)
    model = type("Own", (pl.LightningModule,), {name: lambda self, *_: None})()
    model.layer = nn.Linear(2, 2)
    Trainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    expected = ["training_step", "configure_model"]
    assert len(told) == (name in expected) and all(f"its {name} are not called" in one for one in told)


def host(monkeypatch, version="5", **values):
    """Something that has a model placed, and what was done with it."""
    args = {
        "use_liger_kernel": False, "liger_kernel_config": None, "place_model_on_device": None, "fp16_full_eval": False,
        "bf16_full_eval": False, "device": torch.device("cpu"), "world_size": 1, "activation_checkpointing": False,
        "auto_find_batch_size": False,
    } | values.pop("args", {})  # fmt: skip
    for name in ("check_trainable", "check_placement"):
        monkeypatch.setattr(model_setup, name, lambda *_: None)
    monkeypatch.setattr(model_setup, "is_model_parallel", lambda *_: False)
    monkeypatch.setattr(model_setup, "generation_beside", lambda: version)
    made = SimpleNamespace(args=SimpleNamespace(**args), model_init=None, told=[], **values)
    made._move_model_to_device = lambda model, device: made.told.append(("moved", model, device))
    for name in ("_divide_data", "_seed", "_enable_activation_checkpointing", "_remove_neftune_noise"):
        setattr(made, name, lambda *_, name=name: made.told.append(name))
    return made


@pytest.mark.parametrize(
    ("wants", "version", "casts", "spread", "moves"),
    [
        (None, "5", (), False, True),
        (None, "5", (), True, False),
        (None, "5", ("fp16_full_eval",), False, False),
        (None, "5", ("bf16_full_eval",), False, False),
        (None, "4", (), False, True),
        (True, "5", (), True, True),
        (True, "5", ("fp16_full_eval",), False, True),
        (True, "4", (), True, False),
        (True, "4", ("bf16_full_eval",), False, False),
        (True, "4", (), False, True),
        (False, "5", (), False, False),
        (False, "4", (), False, False),
    ],
)
def test_where_a_model_is_placed(wants, version, casts, spread, moves, monkeypatch):
    own, model = (
        host(monkeypatch, version, args={"place_model_on_device": wants, **dict.fromkeys(casts, True)}),
        nn.Linear(2, 2),
    )
    if spread:
        model.hf_device_map = {"": 0}
    ModelSetupMethods._take_model(own, model)
    assert own.place_model_on_device is moves and own.model is own.model_wrapped is model
    assert own.told == ["_divide_data", *[("moved", model, torch.device("cpu"))] * moves]
    assert own.is_model_parallel is False


@pytest.mark.parametrize("spread", [False, True])
def test_a_spread_model_is_not_moved(spread, monkeypatch):
    told, moved, model = [], [], nn.Linear(2, 2)
    monkeypatch.setattr(model_setup.logger, "warning", told.append)
    model.to = moved.append
    if spread:
        model.hf_device_map = {"": 0}
    ModelSetupMethods._move_model_to_device(None, model, "cpu")
    assert moved == ["cpu"] * (not spread) and len(told) == spread


@pytest.mark.parametrize("inits", [False, True])
@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_model_is_made_and_placed_again_for_a_training(inits, places, spread, monkeypatch):
    own = host(monkeypatch, place_model_on_device=places, processing_class=None, neftune_noise_alpha=None)
    own.model, own.optimizer, own.lr_scheduler, own._own_optimizer = nn.Linear(2, 2), "own", "own", "own"
    if spread:
        own.model.hf_device_map = {"": 0}
    fresh, before = nn.Linear(2, 2), own.model
    own.model_init = (lambda: fresh) if inits else None
    own.call_model_init = lambda trial: own.told.append(("made", trial)) or fresh
    own._hp_search_setup = lambda trial: own.told.append(("trial", trial))
    own._resumer = SimpleNamespace(weights_alone=None)
    own._load_weights = lambda checkpoint: own.told.append(("loaded", checkpoint))
    ModelSetupMethods._prepare_model_for_training(own, None, "t")
    made = ["_seed", ("made", "t"), "_divide_data"] if inits else []
    moves = places if inits else not places and not spread
    moved = [("moved", own.model, torch.device("cpu"))] * moves
    assert own.told == [*made, *moved, "_remove_neftune_noise", ("trial", "t")]
    assert own.model is (fresh if inits else before)
    assert (own.optimizer, own.lr_scheduler, own._own_optimizer) == ((None,) * 3 if inits else ("own",) * 3)


@pytest.mark.parametrize(
    ("checkpoint", "alone", "finds", "stored", "loaded", "size"),
    [
        (None, None, True, 8, [], 4),
        (None, "w", True, 8, ["w"], 4),
        ("c", None, False, 8, ["c"], 4),
        ("c", "w", True, 8, ["c"], 8),
        ("c", None, True, None, ["c"], 4),
    ],
)
def test_weights_and_the_found_batch_size_are_resumed(checkpoint, alone, finds, stored, loaded, size, monkeypatch):
    own = host(monkeypatch, args={"auto_find_batch_size": finds}, place_model_on_device=True, processing_class=None)
    own.model, own._train_batch_size, own.neftune_noise_alpha, found = nn.Linear(2, 2), 4, None, []
    own._hp_search_setup, own._load_weights = lambda trial: None, found.append
    own._resumer = SimpleNamespace(weights_alone=alone)
    monkeypatch.setattr(model_setup, "read_state", lambda path: SimpleNamespace(train_batch_size=stored))
    ModelSetupMethods._prepare_model_for_training(own, checkpoint, None)
    assert found == loaded and own._train_batch_size == size


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("tokenizer", [None, "tokenizer"])
@pytest.mark.parametrize("alpha", [None, 5.0, -1.0])
def test_what_is_done_with_the_model_before_a_training(recomputes, tokenizer, alpha, monkeypatch):
    aligned, noise = [], []
    monkeypatch.setattr(model_setup, "align_special_tokens", lambda model, tokens: aligned.append(tokens))
    monkeypatch.setattr(
        model_setup, "EmbeddingNoise", lambda model, strength: noise.append((model, strength)) or "handle"
    )
    own = host(monkeypatch, args={"activation_checkpointing": recomputes}, place_model_on_device=True)
    own.model, own.processing_class, own.neftune_noise_alpha = nn.Linear(2, 2), tokenizer, alpha
    own._hp_search_setup, own._resumer = lambda trial: None, SimpleNamespace(weights_alone=None)
    own.accelerator, own.neftune_hook_handle = SimpleNamespace(unwrap_model=lambda model: model), None
    if alpha == -1.0:
        with pytest.raises(ValueError, match="neftune_noise_alpha"):
            ModelSetupMethods._prepare_model_for_training(own, None, None)
        return
    ModelSetupMethods._prepare_model_for_training(own, None, None)
    assert ("_enable_activation_checkpointing" in own.told) is recomputes
    assert aligned == ([tokenizer] if tokenizer else [])
    assert noise == ([(own.model, 5.0)] if alpha else []) and own.neftune_hook_handle == ("handle" if alpha else None)


@pytest.mark.parametrize("later", [False, True])
def test_weights_are_loaded_now_or_with_the_shards(later, monkeypatch):
    told = []
    own = SimpleNamespace(
        _can_load_shards_later=lambda checkpoint: later,
        _loading_whole_weights=contextlib.nullcontext,
        _resumer=SimpleNamespace(later_weights="old", restore=lambda *what: told.append(what)),
    )
    ModelSetupMethods._load_weights(own, "c")
    assert own._resumer.later_weights == ("c" if later else None)
    assert told == ([] if later else [(model_setup.ResumeAt.MODEL_READY, "c")])


@pytest.mark.parametrize("handle", [None, "noise"])
def test_noise_is_removed_once(handle):
    removed = []
    own = SimpleNamespace(neftune_hook_handle=handle and SimpleNamespace(remove=lambda: removed.append(1)))
    for _ in range(2):
        ModelSetupMethods._remove_neftune_noise(own)
    assert len(removed) == (handle is not None) and own.neftune_hook_handle is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_seed_is_set(deterministic, monkeypatch):
    told = []
    for name in ("enable_full_determinism", "set_seed"):
        monkeypatch.setattr(model_setup, name, lambda seed, name=name: told.append((name, seed)))
    monkeypatch.setattr(model_setup, "choose_tf32", lambda args: told.append("tf32"))
    ModelSetupMethods._seed(SimpleNamespace(args=SimpleNamespace(full_determinism=deterministic, seed=3)))
    assert told == [("enable_full_determinism" if deterministic else "set_seed", 3), "tf32"]


@pytest.mark.parametrize(
    ("model", "options", "refused"),
    [
        ("gpt2", {"use_reentrant": False}, False),
        ("gpt2", {"use_reentrant": None, "debug": True}, False),
        ("gpt2", {"use_reentrant": "maybe"}, True),
        ("gpt2", {"reentrant": False}, True),
        ("own", {"reentrant": False}, False),
        ("gpt2", None, False),
    ],
)
@pytest.mark.parametrize("is_on", [False, True])
def test_options_of_recomputation_are_those_of_torch(model, options, refused, is_on, tmp_path):
    class Own(Classifier):
        def gradient_checkpointing_enable(self, **kwargs):
            """Take anything."""

    args = TrainingArguments(
        str(tmp_path),
        gradient_checkpointing=is_on,
        gradient_checkpointing_kwargs=options,
        report_to="none",
        use_cpu=True,
    )
    kind = error_of(lambda: Trainer(tiny_gpt2() if model == "gpt2" else Own(), args))
    assert (kind is not None) is (refused and is_on)


@pytest.mark.parametrize("given", [False, True])
def test_without_arguments_the_folder_is_named(given, tmp_path, monkeypatch):
    told = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_compat.trainer.log_line", told.append)
    monkeypatch.setenv("WANDB_DISABLED", "true")
    args = TrainingArguments("out", report_to="none", use_cpu=True)
    trainer = Trainer(Classifier(), args) if given else Trainer(Classifier())
    assert trainer.args.output_dir == ("out" if given else "tmp_trainer") and (trainer.args is args) is given
    said = "No `TrainingArguments` passed, using `output_dir=tmp_trainer`."
    assert (said in told) is not given
