"""What a run is given beside its arguments, by small objects in the place of a Trainer."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torchmetrics import MeanMetric

from helpers.toy import Stream, rows
from hf_compat import Trainer, trainer
from hf_compat.hf.callbacks import PrinterCallback
from hf_compat.hf.search import HPSearchBackend
from hf_compat.search import with_optuna
from hf_compat.trainer_methods import run_parts as parts
from hf_compat.trainer_methods.generation import GenerationSteps
from hf_compat.trainer_methods.steps import StepMethods


def steps(kind=StepMethods, members=(), **values):
    usual = {
        "optimizer": None, "_own_optimizer": None, "optimizer_cls_and_kwargs": None, "eval_dataset": None,
        "model": None, "lr_scheduler": None, "_created_lr_scheduler": False, "args": "args", "compute_loss_func": None,
        "compute_metrics": None, "train_dataset": None, "data_collator": None, "preprocess_logits_for_metrics": None,
    }  # fmt: skip
    made = type("Own", (kind,), dict(members)).__new__(type("Own", (kind,), dict(members)))
    vars(made).update(usual | values)
    return made


def function(*_):
    return 1


@pytest.mark.parametrize(
    ("values", "members", "name", "found"),
    [
        ({}, {}, "optimizer", None),
        ({"optimizer": "given"}, {}, "optimizer", "optimizers"),
        ({"optimizer": "made", "_own_optimizer": "made"}, {}, "optimizer", None),
        ({"optimizer_cls_and_kwargs": (1, {})}, {}, "optimizer", "optimizer_cls_and_kwargs"),
        ({"optimizer": "given", "optimizer_cls_and_kwargs": (1, {})}, {}, "optimizer", "optimizers"),
        ({}, {}, "has_schedule", False),
        ({"lr_scheduler": "given"}, {}, "has_schedule", True),
        ({"lr_scheduler": "made", "_created_lr_scheduler": True}, {}, "has_schedule", False),
        ({}, {}, "loss", None),
        ({"compute_loss_func": function}, {}, "loss", "compute_loss_func"),
        ({}, {"compute_loss": function}, "loss", "compute_loss"),
        ({}, {"compute_loss": lambda self, *_: self.label_smoother}, "loss", None),
        ({}, {"compute_loss": lambda self, *_: super(Trainer, self).compute_loss()}, "loss", None),
        ({}, {"compute_loss": torch.nn.Linear(1, 1)}, "loss", None),
        ({}, {}, "metrics", "none"),
        ({"compute_metrics": function}, {}, "metrics", "function"),
        ({"compute_metrics": MeanMetric()}, {}, "metrics", "torchmetrics"),
        ({"compute_metrics": {"a": None}}, {}, "metrics", "none"),
        ({"compute_metrics": {"a": None, "b": MeanMetric()}}, {}, "metrics", "torchmetrics"),
        ({"compute_metrics": {"a": function, "b": MeanMetric()}}, {}, "metrics", "function"),
        ({}, {}, "generates", False),
        ({}, {"prediction_step": function}, "generates", True),
        ({"kind": GenerationSteps}, {}, "generates", True),
        ({"train_dataset": Stream(2)}, {}, "trains_on_stream", True),
        ({"train_dataset": rows(2)}, {}, "trains_on_stream", False),
        ({}, {}, "has_length", True),
        ({"train_dataset": Stream(2)}, {}, "has_length", False),
        ({"train_dataset": rows(2)}, {}, "has_length", True),
        ({}, {}, "has_other_sets", False),
        ({"eval_dataset": rows(2)}, {}, "has_other_sets", True),
        ({"eval_dataset": Stream(2)}, {}, "has_other_sets", False),
        ({"eval_dataset": {"a": Stream(2), "b": None}}, {}, "has_other_sets", False),
        ({"eval_dataset": {"a": Stream(2), "b": rows(2)}}, {}, "has_other_sets", True),
        ({}, {}, "has_config", True),
        ({"model": SimpleNamespace()}, {}, "has_config", False),
        ({"model": SimpleNamespace(config=None)}, {}, "has_config", False),
        ({"model": SimpleNamespace(config=1)}, {}, "has_config", True),
    ],
)
def test_what_a_run_is_given(values, members, name, found):
    values = dict(values)
    kind = values.pop("kind", StepMethods)
    assert getattr(parts.run_parts(steps(kind, members, **values)), name) == found


class Tracking:
    """Like a callback that reports to a tracker."""


@pytest.mark.parametrize(
    ("callbacks", "has_trackers", "prints"),
    [
        (None, False, True),
        ([], False, True),
        (["hf_compat.callbacks.trackers"], True, False),
        (["transformers.integrations"], True, False),
        (["transformers.integrations.integration_utils"], True, False),
        (["transformers.integrations_of_mine"], False, False),
        (["__main__"], False, False),
        ([PrinterCallback()], False, True),
        (["__main__", PrinterCallback()], False, True),
    ],
)
def test_the_callbacks_of_a_run(callbacks, has_trackers, prints):
    values = {}
    if callbacks is not None:
        held = [type("Own", (), {"__module__": one})() if isinstance(one, str) else one for one in callbacks]
        values["callback_handler"] = SimpleNamespace(callbacks=held)
    found = parts.run_parts(steps(**values))
    assert (found.has_trackers, found.prints_logs) == (has_trackers, prints)


@pytest.mark.parametrize(
    ("values", "members", "asked"),
    [
        ({}, {}, True),
        ({"optimizer": "given"}, {}, False),
        ({"optimizer_cls_and_kwargs": (1, {})}, {}, False),
        ({}, {"create_optimizer": function}, False),
        ({}, {"create_optimizer_and_scheduler": function}, False),
        ({}, {"get_optimizer_cls_and_kwargs": function}, False),
        ({}, {"create_scheduler": function}, True),
    ],
)
def test_arguments_of_the_optimizer_are_asked_for_once(values, members, asked, monkeypatch):
    told = []
    monkeypatch.setattr(parts, "unread_arguments", lambda args, model: told.append((args, model)) or {"a": "b"})
    found = parts.run_parts(steps(members=members, **values))
    assert [found.unread(), found.unread()] == ([{"a": "b"}] * 2 if asked else [{}, {}])
    assert told == [("args", None)] * asked


class Mentions:
    def method(self):
        return self.secret_name

    value = "no code"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, False),
        ({"compute_metrics": lambda p: p.secret_name}, True),
        ({"compute_loss_func": lambda p: "secret_name"}, True),
        ({"preprocess_logits_for_metrics": lambda p: getattr(p, "other_name")}, False),  # noqa: B009
        ({"data_collator": Mentions()}, True),
        ({"callback_handler": SimpleNamespace(callbacks=[Mentions()])}, True),
        ({"callback_handler": SimpleNamespace(callbacks=[PrinterCallback()])}, False),
    ],
)
def test_who_mentions_a_name(values, found):
    assert parts.run_parts(steps(**values)).reads("secret_name") is found


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, "(6, 4)"),
        ({"world_size": 1}, "nothing"),
        ({"model_init": function}, None),
        ({"own": True}, None),
        ({"auto": True}, None),
        ({"data": Stream(6)}, None),
        ({"data": iter(())}, None),
        ({"split": {"split_batches": True}}, None),
        ({"split": {"even_batches": False}}, None),
    ],
)
def test_what_other_ranks_need_to_know_of_plain_data(monkeypatch, facts, found):
    args = SimpleNamespace(world_size=facts.get("world_size", 2), auto_find_batch_size=facts.get("auto", False))
    args.accelerator_config = facts.get("split")
    host = SimpleNamespace(args=args, train_dataset=facts.get("data", rows(6)), model_init=facts.get("model_init"))
    host._train_batch_size, host._flag_sources = 4, lambda: "sources"
    monkeypatch.setattr(trainer, "has_own_methods", lambda host: "own" in facts)
    start = Trainer._start_facts(host)
    nothing = trainer.StartFacts()
    expected = (nothing.data, nothing.sources) if found == "nothing" else (found, "sources")
    assert (start.data, start.sources) == expected


@pytest.mark.parametrize("callbacks", [[], [1]])
@pytest.mark.parametrize("options", [{}, {"max_time": None}, {"max_time": 3}])
def test_lightning_sets_flags_by_callbacks_or_by_time(monkeypatch, callbacks, options):
    host = SimpleNamespace(_callbacks=SimpleNamespace(lightning=callbacks), _lightning_options=options)
    host.callback_handler, host.args = SimpleNamespace(callbacks="all"), SimpleNamespace(gradient_accumulation_steps=2)
    monkeypatch.setattr(trainer, "flag_sources", lambda *words: words)
    assert Trainer._flag_sources(host) == ("all", bool(callbacks) or options.get("max_time") is not None, host, 2)


@pytest.mark.parametrize(
    ("level", "should_log", "own", "shown"),
    [
        ("passive", True, False, None),
        ("passive", False, False, 30),
        ("passive", True, True, 30),
        ("info", True, False, 30),
    ],
)
@pytest.mark.parametrize("max_steps", [-1, 0, 1])
@pytest.mark.parametrize("deepspeed", [False, True])
def test_a_trainer_takes_its_arguments(monkeypatch, level, should_log, own, shown, max_steps, deepspeed):
    done = []
    note = lambda name: lambda *words: done.append((name, *words[:1]))  # noqa: E731
    for name in ("check_supported", "compilation_of", "start_processes", "show_logs", "follow_level", "log_line"):
        monkeypatch.setattr(trainer, name, note(name))
    monkeypatch.setattr(trainer, "parallel_sizes", lambda args, variables, model: done.append(("sizes", args, model)))
    monkeypatch.setattr(trainer, "CurrentPlan", lambda: SimpleNamespace(of=note("plan")))
    monkeypatch.setattr(trainer, "uses_deepspeed", lambda args, variables: deepspeed)
    monkeypatch.setattr(trainer, "is_replaced", lambda *words: own)
    args = SimpleNamespace(log_level=level, should_log=should_log, max_steps=max_steps)
    args._refuse_claims, args.get_process_log_level = note("claims"), lambda: 30
    Trainer._set_up_process(SimpleNamespace(_seed=note("seed")), args)
    checks = (
        [("check_supported", args), ("compilation_of", args), ("sizes", args, None)] if deepspeed else [("plan", args)]
    )
    told = "max_steps is given, it will override any value given in num_train_epochs"
    assert done == [
        *checks, ("claims",), ("start_processes", args), ("show_logs", shown), ("follow_level", shown),
        *([("log_line", told)] if max_steps > 0 else []), ("seed",),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", [None, *HPSearchBackend])
@pytest.mark.parametrize("trial", [None, SimpleNamespace(params={"a": 1})])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_trial_is_set_up_within_a_search(monkeypatch, backend, trial, ranks, has_states):
    done = []
    note = lambda name: lambda *words: done.append((name, *words))  # noqa: E731
    for name in ("set_from_trial", "check_supported", "compare_arguments", "log_line"):
        monkeypatch.setattr(trainer, name, note(name))
    monkeypatch.setattr(trainer, "space_of", lambda host, chosen, trial: {"a": 1, "b": 2})
    args = SimpleNamespace(world_size=ranks, train_batch_size=5)
    host = SimpleNamespace(args=args, hp_search_backend=backend, _train_batch_size=3)
    host._fresh_states = SimpleNamespace(restore=note("restored")) if has_states else None
    host._check_optimization, host._make_accelerator = note("checked"), note("accelerator")
    Trainer._hp_search_setup(host, trial)
    lines = {HPSearchBackend.OPTUNA: ["Trial: {'a': 1}"], HPSearchBackend.WANDB: [f"W&B Sweep parameters: {trial}"]}
    assert host._trial is trial
    if backend is None or trial is None:
        assert done == [] and host._train_batch_size == 3
    else:
        assert host._train_batch_size == 5 and done == [
            *([("restored",)] if has_states else []),
            ("set_from_trial", args, "a", 1), ("set_from_trial", args, "b", 2),
            *(("log_line", line) for line in lines.get(backend, [])),
            ("check_supported", args), ("checked",), *([("compare_arguments", args, None)] if ranks > 1 else []),
            ("accelerator",),
        ]  # fmt: skip


@pytest.mark.parametrize("backend", [None, *HPSearchBackend])
@pytest.mark.parametrize("trial", [None, "trial"])
def test_an_evaluation_is_reported_to_the_search(monkeypatch, backend, trial):
    done, host = [], SimpleNamespace(hp_search_backend=backend, objective=0)
    theirs = SimpleNamespace(
        _report_to_hp_search=lambda *words: done.append(("theirs", *words[1:])),
        _tune_save_checkpoint=lambda *words: done.append(("saved", *words)),
    )
    monkeypatch.setattr(trainer, "of_transformers", lambda *words: theirs if words[:2] == ("trainer", "Trainer") else 0)
    monkeypatch.setattr(trainer, "checked_objective", lambda host, metrics: metrics["a"])
    monkeypatch.setattr(with_optuna, "report", lambda host, trial, step: done.append(("optuna", trial, step)))
    Trainer._report_to_hp_search(host, trial, 7, {"a": 1})
    is_searched = backend is not None and trial is not None
    reports = {
        HPSearchBackend.OPTUNA: [("optuna", "trial", 7)],
        HPSearchBackend.RAY: [("theirs", "trial", 7, {"a": 1})],
    }
    assert done == (reports.get(backend, []) if is_searched else [])
    assert host.objective == (is_searched and backend != HPSearchBackend.RAY)
    Trainer._tune_save_checkpoint(host, "folder")
    assert done[-1] == ("saved", host, "folder")


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("best", "limit"), [(None, 1), ("best", 1), ("best", 2)])
def test_a_training_is_ended(monkeypatch, tmp_path, loads, saves, is_first, best, limit):
    done = []
    note = lambda name, value=None: lambda *words: done.append((name, *words)) or value  # noqa: E731
    for name in ("log_line", "run_summary"):
        monkeypatch.setattr(trainer, name, note(name, {"m": 1}))
    monkeypatch.setattr(trainer, "is_requeued", lambda folder: is_first)
    requeued = tmp_path / trainer.REQUEUED_NAME
    requeued.touch()
    args = SimpleNamespace(output_dir=tmp_path, load_best_model_at_end=loads, should_save=saves, save_total_limit=limit)
    args.push_to_hub = loads
    state = SimpleNamespace(global_step=9, max_steps=12, total_flos=5.0, best_model_checkpoint=best)
    host = SimpleNamespace(args=args, state=state, control="before")
    host._run = SimpleNamespace(
        updates_before=3, losses=SimpleNamespace(mean=lambda step: step / 2, nonfinite_updates=4)
    )
    host._saver = SimpleNamespace(background=SimpleNamespace(wait=note("waited")), check_folder=note("folder"))
    host._saver.keep_best_alone = note("kept")
    host._pushes = SimpleNamespace(unpushed="c" if loads else None, push_checkpoint=note("pushed"))
    host._pushes.warn_of_missing = note("missing")
    host._memory_tracker = SimpleNamespace(
        skip_memory_metrics=saves, stop=note("stopped"), update_metrics=note("measured")
    )
    host.callback_handler = SimpleNamespace(on_train_end=note("ended", "after"))
    host.is_world_process_zero, host._get_output_dir = lambda: is_first, note("asked", "place")
    host._loading_whole_weights = contextlib.nullcontext
    for name in ("store_flos", "log", "_tell_after_training", "_load_best_model", "_finish_current_push",
                 "_remove_neftune_noise"):  # fmt: skip
        setattr(host, name, note(name))
    found = Trainer._finalize_training(host, "trial", 24, 100.0)
    assert found == (9, 4.5, {"m": 1}) and host.control == "after" and host.is_in_train is False
    assert requeued.exists() is not is_first
    told = "\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n"
    assert done == [
        ("waited",), ("folder",), ("log_line", told), *([("pushed", "c")] if loads else []), ("store_flos",),
        ("run_summary", 100.0, 12.0, 6, 5.0, 4.5, 4),
        *([] if saves else [("stopped", "train"), ("measured", "train", {"m": 1})]),
        ("log", {"m": 1}), *([("_tell_after_training",)] if is_first else []),
        *([("_load_best_model",)] if loads and best else []),
        *([("asked", "trial")] if saves else []),
        *([("kept", "place", "best")] if saves and best and limit == 1 else []),
        ("ended", args, state, "before"), ("_finish_current_push",), *([("missing",)] if loads else []),
        ("_remove_neftune_noise",),
    ]  # fmt: skip


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("in_updates", [False, True])
def test_what_a_training_has_not_done_is_told(monkeypatch, loads, checks, in_updates):
    done = []
    for name in ("tell_of_flags", "tell_of_best", "tell_of_no_evaluation", "tell_of_later_parameters"):
        monkeypatch.setattr(trainer, name, lambda *words, name=name: done.append((name, *words)))
    monkeypatch.setattr(trainer, "unwrap_optimizer", lambda optimizer: optimizer * 2)
    args = SimpleNamespace(load_best_model_at_end=loads)
    run = SimpleNamespace(updates_before=3, frozen="frozen")
    run.flag_agreement = SimpleNamespace(sources=SimpleNamespace(in_updates=in_updates))
    host = SimpleNamespace(args=args, state="state", control="control", _run=run, _checks_optimizer=checks)
    host.optimizer, host.model = "o", "model"
    Trainer._tell_after_training(host)
    assert done == [
        ("tell_of_flags", "control", trainer.FLAGS),
        ("tell_of_best", args, "state", 3) if loads else ("tell_of_no_evaluation", args, "state"),
        *([("tell_of_later_parameters", "oo", "model", "frozen")] if checks and in_updates else []),
    ]
