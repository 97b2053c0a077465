"""The Trainer's own decisions: what its constructor refuses, what ranks exchange first, and what a trial sets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

import hf_compat.trainer as trainers
from helpers import toy
from hf_compat import Trainer, TrainerState, TrainingArguments
from hf_compat.errors import ArgumentError, HfCompatError, UnknownArgument
from hf_compat.hf.argument_values import AcceleratorConfig
from hf_compat.search.trials import HPSearchBackend

OPTUNA, RAY, WANDB = HPSearchBackend.OPTUNA, HPSearchBackend.RAY, HPSearchBackend.WANDB


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"tokenizer": 1, "processing_class": 2}, ArgumentError, "`tokenizer` is the old name"),
        ({"optimizers": None}, ArgumentError, "must be a pair"),
        ({"optimizers": (None,)}, ArgumentError, "must be a pair"),
        ({"optimizers": (None, None, None)}, ArgumentError, "must be a pair"),
        ({"optimizers": {None, 1}}, ArgumentError, "must be a pair"),
        ({"tokeniser": 1}, UnknownArgument, "did you mean `tokenizer`"),
        ({"compute_loss_func": 1}, HfCompatError, "compute_loss_func"),
        ({"callbacks": "x"}, ArgumentError, "`callbacks` must be a list"),
    ],
)
def test_what_a_trainer_is_not_made_of(make_args, given, error, said):
    with pytest.raises(error, match=said):
        Trainer(toy.Classifier(), make_args(), **given)


@pytest.mark.parametrize("name", ["tokenizer", "processing_class"])
def test_the_old_name_of_a_processing_class_is_taken(make_args, name):
    given = SimpleNamespace()
    made = Trainer(toy.Classifier(), make_args(), optimizers=[None, None], **{name: given})
    assert made.processing_class is given and Trainer(toy.Classifier(), make_args()).processing_class is None


def facts(**changed):
    args = {"world_size": 2, "accelerator_config": AcceleratorConfig(), "auto_find_batch_size": False}
    owner = {"train_dataset": [1, 2, 3], "model_init": None, "_train_batch_size": 4, "_flag_sources": lambda: "sources"}
    args |= {name: value for name, value in changed.items() if name in args}
    owner |= {name: value for name, value in changed.items() if name in owner}
    return Trainer._start_facts(SimpleNamespace(args=SimpleNamespace(**args), **owner))


@pytest.mark.parametrize(
    ("changed", "data"),
    [
        ({}, "(3, 4)"),
        ({"train_dataset": toy.Stream([1])}, None),
        ({"train_dataset": toy.SizedStream([1])}, None),
        ({"train_dataset": None}, None),
        ({"has_own": True}, None),
        ({"model_init": print}, None),
        ({"auto_find_batch_size": True}, None),
        ({"accelerator_config": AcceleratorConfig(split_batches=True)}, None),
        ({"accelerator_config": AcceleratorConfig(even_batches=False)}, None),
    ],
)
def test_the_length_of_plain_data_is_told_before_a_training(monkeypatch, changed, data):
    monkeypatch.setattr(trainers, "has_own_methods", lambda owner: "has_own" in changed)
    found = facts(**changed)
    assert (found.data, found.sources) == (data, "sources")
    alone = facts(world_size=1, **changed)
    assert alone.data is None and alone.sources != "sources"


@pytest.mark.parametrize(
    ("lightning", "max_time", "has"), [([], None, False), ([1], None, True), ([], 0, True), ([1], 2, True)]
)
def test_lightnings_callbacks_and_timer_may_stop_a_run(monkeypatch, lightning, max_time, has):
    monkeypatch.setattr(trainers, "flag_sources", lambda callbacks, has_lightning, owner, count: has_lightning)
    owner = SimpleNamespace(_callbacks=SimpleNamespace(lightning=lightning), _lightning_options={"max_time": max_time})
    owner.callback_handler = SimpleNamespace(callbacks=[])
    owner.args = SimpleNamespace(gradient_accumulation_steps=1)
    assert Trainer._flag_sources(owner) is has


@pytest.mark.parametrize(
    ("backend", "trial", "ranks", "has_states", "calls"),
    [
        (None, {"seed": 1}, 1, True, []),
        (OPTUNA, None, 1, True, []),
        (OPTUNA, SimpleNamespace(params="p"), 1, False, ["set", "Trial: p"]),
        (RAY, {}, 1, False, ["set"]),
        (WANDB, {}, 1, True, ["restore", "set", "W&B Sweep parameters: {}"]),
        (RAY, {}, 2, False, ["set"]),
    ],
)
def test_a_trial_sets_arguments(monkeypatch, backend, trial, ranks, has_states, calls):
    seen = []
    owner = SimpleNamespace(hp_search_backend=backend, _check_optimization=lambda: seen.append("optimization"))
    owner._make_accelerator = lambda: seen.append("accelerator")
    owner.args = SimpleNamespace(world_size=ranks, train_batch_size=7)
    owner._fresh_states = SimpleNamespace(restore=lambda: seen.append("restore")) if has_states else None
    monkeypatch.setattr(trainers, "space_of", lambda *given: {"seed": 1})
    monkeypatch.setattr(trainers, "set_from_trial", lambda *given: seen.append("set"))
    monkeypatch.setattr(trainers, "log_line", seen.append)
    monkeypatch.setattr(trainers, "check_supported", lambda args: seen.append("supported"))
    monkeypatch.setattr(trainers, "compare_arguments", lambda *given: seen.append("compared"))
    Trainer._hp_search_setup(owner, trial)
    checks = ["supported", "optimization", *["compared"] * (ranks > 1), "accelerator"]
    assert seen == ([*calls, *checks] if calls else []) and owner._trial is trial
    assert getattr(owner, "_train_batch_size", None) == (7 if calls else None)


@pytest.mark.parametrize(
    ("backend", "trial", "calls"),
    [
        (None, 1, []),
        (OPTUNA, None, []),
        (OPTUNA, 1, ["objective", "report"]),
        (WANDB, 1, ["objective"]),
        (RAY, 1, ["transformers"]),
    ],
)
def test_an_evaluation_is_reported_to_the_search(monkeypatch, backend, trial, calls):
    seen = []
    theirs = SimpleNamespace(_report_to_hp_search=lambda *given: seen.append("transformers"))
    monkeypatch.setattr(trainers, "checked_objective", lambda *given: seen.append("objective"))
    monkeypatch.setattr(trainers, "of_transformers", lambda *given: theirs)
    monkeypatch.setattr("hf_compat.search.with_optuna.report", lambda *given: seen.append("report"))
    Trainer._report_to_hp_search(SimpleNamespace(hp_search_backend=backend), trial, 1, {})
    assert seen == calls


@pytest.mark.parametrize(("skips", "updates", "found"), [(False, 7, (2, 2)), (True, 7, (2, 0)), (False, 6, (2, 0))])
def test_where_a_resumed_run_goes_on(tmp_path, skips, updates, found):
    made = Trainer(toy.Classifier(), TrainingArguments(str(tmp_path), use_cpu=True, gradient_accumulation_steps=2))
    made.args.ignore_data_skip = skips
    made._resumer.restore = lambda *given: setattr(made.state, "global_step", updates)
    assert made._init_training_state(9, 3, 3, "checkpoint", None) == found
    assert made.state.is_hyper_param_search is False
    made._init_training_state(9, 3, 3, "checkpoint", {"seed": 1})
    assert made.state.is_hyper_param_search is True


@pytest.mark.parametrize(("rank", "told"), [(0, ["trainer", "callbacks"]), (1, [])])
def test_rank_0_tells_of_names(monkeypatch, rank, told):
    seen = []
    monkeypatch.setattr(trainers, "tell_of_trainer_names", lambda *given: seen.append("trainer"))
    monkeypatch.setattr(trainers, "tell_of_callback_names", lambda *given: seen.append("callbacks"))
    owner = SimpleNamespace(
        args=SimpleNamespace(process_index=rank), _own_attributes=(), _callbacks=SimpleNamespace(order=[])
    )
    Trainer._tell_of_names(owner)
    assert seen == told


@pytest.mark.parametrize("loads_best", [True, False])
@pytest.mark.parametrize(
    ("checks", "differs", "later"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_what_is_told_after_a_training(monkeypatch, loads_best, checks, differs, later):
    seen = []
    names = ("tell_of_flags", "tell_of_best", "tell_of_no_evaluation", "tell_of_later_parameters")
    for name in names:
        monkeypatch.setattr(trainers, name, lambda *given, name=name: seen.append(name))
    sources = SimpleNamespace(sources=SimpleNamespace(in_updates=differs))
    owner = SimpleNamespace(
        control=None, args=SimpleNamespace(load_best_model_at_end=loads_best), state=None, model=None, optimizer=None
    )
    owner._run, owner._checks_optimizer = SimpleNamespace(updates_before=0, flag_agreement=sources, frozen=()), checks
    Trainer._tell_after_training(owner)
    assert seen == [names[0], names[1] if loads_best else names[2], *names[3:][:later]]


@pytest.mark.parametrize(
    ("values", "is_own", "level", "says"),
    [
        ({"log_level": "passive"}, False, None, False),
        ({"log_level": "passive", "should_log": False}, False, 7, False),
        ({"log_level": "passive"}, True, 7, False),
        ({"log_level": "info"}, False, 7, False),
        ({"log_level": "passive", "max_steps": 1}, False, None, True),
        ({"log_level": "passive", "max_steps": 0}, False, None, False),
    ],
)
@pytest.mark.parametrize("has_deepspeed", [True, False])
def test_a_process_is_set_up(monkeypatch, values, is_own, level, says, has_deepspeed):
    seen, planned = [], []
    for name in ("check_supported", "compilation_of", "start_processes"):
        monkeypatch.setattr(trainers, name, lambda args: None)
    monkeypatch.setattr(trainers, "uses_deepspeed", lambda args, variables: has_deepspeed)
    monkeypatch.setattr(trainers, "parallel_sizes", lambda *given: planned.append("sizes"))
    monkeypatch.setattr(trainers.CurrentPlan, "of", lambda plan, args: planned.append("plan"))
    monkeypatch.setattr(trainers, "is_replaced", lambda *given: is_own)
    for name in ("show_logs", "follow_level", "log_line"):
        monkeypatch.setattr(trainers, name, seen.append)
    args = {"should_log": True, "max_steps": -1, "_refuse_claims": lambda: None, "get_process_log_level": lambda: 7}
    Trainer._set_up_process(SimpleNamespace(_seed=lambda: None), SimpleNamespace(**(args | values)))
    assert seen[:2] == [level, level] and len(seen) == 2 + says
    assert planned == (["sizes"] if has_deepspeed else ["plan"])


@pytest.mark.parametrize(
    ("facts", "calls"),
    [
        ("", ["tells", "end"]),
        ("other rank", ["end"]),
        ("unpushed", ["pushes", "tells", "end"]),
        ("requeued", ["unlinks", "tells", "end"]),
        ("requeued other rank", ["end"]),
        ("memory", ["memory", "tells", "end"]),
        ("load best", ["tells", "loads", "end"]),
        ("load", ["tells", "end"]),
        ("best", ["tells", "end"]),
        ("save", ["tells", "folder", "end"]),
        ("save limit", ["tells", "folder", "end"]),
        ("save limit best", ["tells", "folder", "keeps", "end"]),
        ("save best", ["tells", "folder", "end"]),
        ("limit best", ["tells", "end"]),
        ("hub", ["tells", "end", "missing"]),
    ],
)
def test_a_training_is_finished(monkeypatch, facts, calls):
    seen, facts = [], facts.split()

    def note(name, result=None):
        return lambda *given, **named: seen.append(name) or result

    quiet = lambda *given, **named: None  # noqa: E731
    monkeypatch.setattr(trainers, "failing_together", lambda *given, **named: contextlib.nullcontext())
    monkeypatch.setattr(trainers, "is_requeued", lambda folder: "requeued" in facts)
    monkeypatch.setattr(trainers.os, "unlink", note("unlinks"))
    summed = []
    monkeypatch.setattr(trainers, "run_summary", lambda *given: summed.append(given) or {})
    losses = SimpleNamespace(mean=lambda updates: 0.5, nonfinite_updates=0)
    saver = SimpleNamespace(background=SimpleNamespace(wait=quiet), check_folder=quiet, keep_best_alone=note("keeps"))
    pushes = SimpleNamespace(unpushed="a" if "unpushed" in facts else None, push_checkpoint=note("pushes"))
    pushes.warn_of_missing = note("missing")
    memory = SimpleNamespace(skip_memory_metrics="memory" not in facts, stop=note("memory"), update_metrics=quiet)
    args = SimpleNamespace(output_dir="out", load_best_model_at_end="load" in facts, should_save="save" in facts)
    args.save_total_limit, args.push_to_hub = 1 if "limit" in facts else 2, "hub" in facts
    state = TrainerState(global_step=6, max_steps=8, best_model_checkpoint="best" if "best" in facts else None)
    owner = SimpleNamespace(
        args=args, state=state, control=None, _saver=saver, _pushes=pushes, _memory_tracker=memory, store_flos=quiet,
        _run=SimpleNamespace(losses=losses, updates_before=2), is_world_process_zero=lambda: "other" not in facts,
        log=quiet, _tell_after_training=note("tells"), _loading_whole_weights=contextlib.nullcontext,
        _load_best_model=note("loads"), _get_output_dir=note("folder", "out"), _finish_current_push=quiet,
        callback_handler=SimpleNamespace(on_train_end=note("end")), _remove_neftune_noise=quiet,
    )  # fmt: skip
    found = Trainer._finalize_training(owner, None, 16.0, 0.0)
    assert seen == calls and (found.global_step, found.training_loss) == (6, 0.5) and owner.is_in_train is False
    assert summed[0][1:3] == (8.0, 4)  # 4 of 8 updates are half of the 16 samples


@pytest.mark.parametrize(
    ("given", "trial", "lightning", "wanted"),
    [
        ({}, None, True, "of an exception"),
        ({}, None, False, None),
        ({}, 1, True, None),
        ({"resume_from_checkpoint": "a"}, None, True, "a"),
        ({"model_path": "b"}, None, True, "b"),
        ({"model_path": "b", "resume_from_checkpoint": "a"}, None, True, "a"),
    ],
)
def test_the_checkpoint_from_which_a_training_goes_on(monkeypatch, given, trial, lightning, wanted):
    asked = []

    class Asked(Exception):
        pass

    def start(found, unloadable):
        asked.append(found)
        raise Asked

    monkeypatch.setattr(trainers, "wanted_checkpoint", lambda found: found)
    monkeypatch.setattr(trainers, "close_bars", lambda handler: None)
    failed = []
    monkeypatch.setattr(trainers, "mark_as_failed", lambda callbacks, error: failed.append(error))
    quiet = lambda *given, **named: None  # noqa: E731
    taking = lambda *given: contextlib.nullcontext()  # noqa: E731
    owner = SimpleNamespace(
        _saver=SimpleNamespace(background=SimpleNamespace(wait=quiet), taking_folder=taking),
        _memory_tracker=SimpleNamespace(start=quiet), hp_search_backend=None, args=None, _refuse_late_overrides=quiet,
        _callbacks=SimpleNamespace(lightning=[1] * lightning, checkpoint_of_exception=lambda: "of an exception"),
        _tell_before_training=quiet, _start_facts=quiet, _resumer=SimpleNamespace(attempting_resume=start),
        callback_handler=SimpleNamespace(callbacks=[]), _remove_neftune_noise=quiet,
        is_world_process_zero=lambda: trial is None, _explain_error=quiet,
    )  # fmt: skip
    with pytest.raises(Asked):
        Trainer.train(owner, trial=trial, **given)
    assert asked == [wanted] and owner.is_in_train is False and len(failed) == (trial is None)


def test_rays_folder_is_written_by_upstreams_method(monkeypatch):
    asked = []
    theirs = SimpleNamespace(_tune_save_checkpoint=lambda *words: asked.append(words))
    monkeypatch.setattr(
        trainers, "of_transformers", lambda *words: theirs if words[:2] == ("trainer", "Trainer") else 0
    )
    Trainer._tune_save_checkpoint("host", "folder")
    assert asked == [("host", "folder")]
