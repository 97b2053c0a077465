"""Rules over several arguments, and values that follow from others: each condition and its border."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_compat.hf import arguments_rules

# What the rules over several fields read, where each of them is content
CONTENT = vars(
    SimpleNamespace(
        logging_strategy="no", logging_steps=5, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=4, lr_scheduler_type="linear", load_best_model_at_end=True,
        dataloader_prefetch_factor=None, dataloader_persistent_workers=False, dataloader_multiprocessing_context=None,
        dataloader_num_workers=0, push_to_hub=True, hub_model_id=None, hub_revision=None,
        fp16=False, bf16=False, fp16_full_eval=False, bf16_full_eval=False, use_cpu=True, mixed_precision="no",
        fsdp=None, deepspeed=None, tf32=None, device=torch.device("cpu"),
    )
)  # fmt: skip
PLATEAU, UNSAVED = {"lr_scheduler_type": "reduce_lr_on_plateau"}, {"load_best_model_at_end": False}
ON_MAC, ON_GPU = {"device": torch.device("mps")}, {"device": torch.device("cuda", 0)}


@pytest.mark.parametrize(
    ("rule", "values", "said"),
    [
        ("intervals", {"logging_strategy": "steps"}, ""),
        ("intervals", {"logging_steps": 0}, ""),  # not by steps
        ("intervals", {"logging_strategy": "steps", "logging_steps": 0}, "needs `logging_steps` above 0, got 0"),
        ("intervals", {"logging_strategy": "steps", "logging_steps": None}, "above 0, got None"),
        ("intervals", {"eval_steps": None}, ""),
        ("intervals", {"eval_steps": 0}, "`eval_steps` above 0"),
        ("intervals", {"save_steps": None}, "`save_steps` above 0"),
        ("intervals", {"save_steps": 0}, ""),
        ("intervals", {"save_steps": -1}, "below 0"),
        ("intervals", {"save_steps": 0.5}, ""),
        ("intervals", {"save_steps": 1}, ""),
        ("intervals", {"save_steps": 1.5}, "an integer"),
        ("intervals", {"save_steps": 2.0}, ""),
        ("metrics_needed", PLATEAU, ""),
        ("metrics_needed", {**UNSAVED, "eval_strategy": "no"}, ""),
        ("metrics_needed", {**PLATEAU, **UNSAVED, "eval_strategy": "no"}, "requires an eval strategy"),
        ("metrics_needed", {"save_strategy": "epoch"}, "to match"),
        ("metrics_needed", {**UNSAVED, "save_strategy": "epoch"}, ""),
        ("metrics_needed", {"save_strategy": "best", "eval_strategy": "epoch"}, ""),
        ("metrics_needed", {"save_strategy": "epoch", "eval_strategy": "epoch", "save_steps": 3}, ""),
        ("metrics_needed", {"save_steps": 3}, "round multiple"),
        ("metrics_needed", {**UNSAVED, "save_steps": 3}, ""),
        ("metrics_needed", {"save_steps": 3, "eval_steps": None}, ""),
        ("metrics_needed", {"save_steps": 0.3, "eval_steps": 0.1}, ""),
        ("metrics_needed", {"save_steps": 0.3, "eval_steps": 0.2}, "round multiple"),
        ("metrics_needed", {"save_steps": 1, "eval_steps": 0.1}, "round multiple"),
        ("metrics_needed", {"save_steps": 1 - 1e-10, "eval_steps": 1}, "round multiple"),
        ("workers_and_repository", {}, ""),
        ("workers_and_repository", {"dataloader_prefetch_factor": 2}, "no workers to load ahead"),
        ("workers_and_repository", {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1}, ""),
        ("workers_and_repository", {"dataloader_persistent_workers": True}, "no workers to keep"),
        ("workers_and_repository", {"hub_model_id": "owner/name"}, ""),
        ("workers_and_repository", {"hub_model_id": "a b"}, "names no repository"),
        ("workers_and_repository", {"hub_model_id": "a b", "push_to_hub": False}, ""),
        ("workers_and_repository", {"hub_revision": "branch"}, ""),
        ("workers_and_repository", {"hub_revision": " "}, "names no branch"),
        ("precision", {}, ""),
        ("precision", {"fp16": True}, ""),
        ("precision", {"bf16": True}, ""),
        ("precision", {"fp16": True, "bf16": True}, "at most one of fp16 and bf16"),
        ("precision", {"fp16_full_eval": True}, ""),
        ("precision", {"bf16_full_eval": True}, ""),
        ("precision", {"fp16_full_eval": True, "bf16_full_eval": True}, "at most one of them"),
        ("precision", {"bf16": True, "use_cpu": False}, "`bf16` on the CPU has to be asked for"),
        ("precision", {"bf16_full_eval": True, "use_cpu": False}, "`bf16_full_eval` on the CPU"),
        ("precision", {"use_cpu": False}, ""),
        ("precision", {"bf16": True, "use_cpu": False, **ON_GPU}, ""),
        ("precision", {"bf16": True, **ON_MAC}, "macOS 14"),
        ("precision", ON_MAC, ""),
        ("precision", {"mixed_precision": "bf16"}, ""),
        ("precision", {"mixed_precision": "fp16"}, ""),
        ("precision", {"mixed_precision": "fp8"}, "is not supported"),
        ("precision", {"fsdp": "full_shard"}, ""),
        ("precision", {"fp16": True, "fsdp": "full_shard"}, "requires a GPU"),
        ("precision", {"fp16": True, "deepspeed": "file"}, "requires a GPU"),
        ("precision", {"fp16": True, "fsdp": "full_shard", **ON_GPU}, ""),
        ("precision", {"tf32": True}, "requires an Ampere"),
        ("precision", {"tf32": False}, ""),
    ],
)
def test_each_condition_of_the_rules_over_several_fields(monkeypatch, rule, values, said):
    monkeypatch.setattr(arguments_rules, "_is_newer_mac", lambda: False)
    problems = list(getattr(arguments_rules, rule)(SimpleNamespace(**(CONTENT | values))))
    assert len(problems) == bool(said) and said in "".join(problems)
    for problem in problems:  # what is wrong, as a sentence, and then what to do
        fact, _, hint = problem.partition("\n\nHint: ")
        assert (fact[0] == "`" or fact[0].isupper()) and hint and not hint[0].isupper()


def test_bfloat16_on_a_newer_mac(monkeypatch):
    monkeypatch.setattr(arguments_rules, "_is_newer_mac", lambda: True)
    assert not list(arguments_rules.precision(SimpleNamespace(**(CONTENT | {"bf16": True} | ON_MAC))))


@pytest.mark.parametrize(
    ("has_mps", "workers", "context", "chosen"),
    [(True, 1, None, None), (True, 2, None, "fork"), (True, 2, "spawn", "spawn"), (False, 2, None, None)],
)
def test_several_workers_are_forked_beside_apples_gpu(monkeypatch, has_mps, workers, context, chosen):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    args = SimpleNamespace(dataloader_num_workers=workers, dataloader_multiprocessing_context=context)
    arguments_rules.follow_machine(args)
    assert args.dataloader_multiprocessing_context == chosen


FOLLOWING = vars(
    SimpleNamespace(
        eval_strategy="no", do_eval=False, eval_steps=None, logging_steps=7, use_cpu=False, dataloader_pin_memory=True,
        metric_for_best_model=None, load_best_model_at_end=False, lr_scheduler_type="linear", greater_is_better=None,
        torch_compile=False, torch_compile_mode=None, torch_compile_backend=None, fp16=False, bf16=False,
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "set_to"),
    [
        ({}, {}),
        ({"eval_strategy": "epoch"}, {"do_eval": True}),
        ({"eval_strategy": "steps"}, {"do_eval": True, "eval_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 3}, {"do_eval": True}),
        ({"use_cpu": True}, {"dataloader_pin_memory": False}),
        ({"load_best_model_at_end": True}, {"metric_for_best_model": "loss", "greater_is_better": False}),
        (PLATEAU, {"metric_for_best_model": "loss", "greater_is_better": False}),
        ({**PLATEAU, "metric_for_best_model": "f1"}, {"greater_is_better": True}),
        ({"metric_for_best_model": "f1", "greater_is_better": False}, {}),
        ({"torch_compile_mode": "default"}, {"torch_compile": True, "torch_compile_backend": "inductor"}),
        ({"torch_compile_backend": "eager"}, {"torch_compile": True}),
        ({"torch_compile": True}, {"torch_compile_backend": "inductor"}),
        ({"fp16": True}, {"mixed_precision": "fp16"}),
        ({"bf16": True}, {"mixed_precision": "bf16"}),
    ],
)
def test_values_follow_from_other_fields(monkeypatch, values, set_to):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    args = SimpleNamespace(**(FOLLOWING | values))
    arguments_rules.fill_in(args)
    infers = vars(args).pop("_infers_direction", False)
    assert vars(args) == FOLLOWING | {"mixed_precision": "no"} | values | set_to
    assert infers == ("greater_is_better" in set_to)


@pytest.mark.parametrize(
    ("source", "follows"),
    [(None, False), ((True, "f1"), True), ((False, "f1"), False), ((True, "loss"), False)],
)
def test_the_direction_follows_as_in_the_arguments_that_were_replaced(source, follows):
    args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=True, _infers_direction=False)
    if source is not None:
        source = SimpleNamespace(metric_for_best_model=source[1], greater_is_better=True, _infers_direction=source[0])
    arguments_rules.keep_direction(source, args)
    assert args._infers_direction is follows


@pytest.mark.parametrize(
    ("has_tf32", "tf32", "compiles", "number", "chosen"),
    [
        (True, None, False, "", None),
        (True, True, False, "", "tf32"),
        (True, False, False, "", "ieee"),
        (False, True, False, "", None),
        (True, None, True, "", "tf32"),
        (True, None, True, "fp16", None),
        (True, True, True, "fp16", "tf32"),
        (True, None, True, "bf16", "tf32"),
        (True, False, True, "bf16", "ieee"),
        (True, None, False, "bf16", None),
    ],
)
def test_tf32_is_chosen_for_the_process(monkeypatch, has_tf32, tf32, compiles, number, chosen):
    backends = SimpleNamespace(fp32_precision=None, cudnn=SimpleNamespace(allow_tf32=None))
    monkeypatch.setattr(arguments_rules, "has_tf32", lambda: has_tf32)
    monkeypatch.setattr(torch, "backends", backends)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: setattr(backends, "all", precision))
    args = SimpleNamespace(tf32=tf32, torch_compile=compiles, fp16=number == "fp16", bf16=number == "bf16")
    arguments_rules.choose_tf32(args)
    if chosen is None:
        assert (backends.fp32_precision, backends.cudnn.allow_tf32) == (None, None)
    else:
        assert (backends.fp32_precision, backends.cudnn.allow_tf32) == (chosen, chosen == "tf32")
        assert backends.all == ("high" if chosen == "tf32" else "highest")


@pytest.mark.parametrize(
    ("there", "release", "has"), [(False, (9, 0), False), (True, (8, 0), True), (True, (7, 5), False)]
)
def test_which_gpus_have_tf32(monkeypatch, there, release, has):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: release)
    assert arguments_rules.has_tf32() is has


@pytest.mark.parametrize(
    ("store", "folder", "found"),
    [(None, "out/a", None), ("s3://b", "out", "s3://b"), ("s3://b", "out/a", "s3://b/a"), ("s3://b", "other", None)],
)
def test_the_store_of_a_folder_that_takes_the_place_of_another(store, folder, found):
    assert arguments_rules._store_after(SimpleNamespace(output_store=store, output_dir="out"), folder) == found


@pytest.mark.parametrize(
    ("source", "given", "store"),
    [
        (None, {"output_dir": "out"}, None),
        (None, {"output_dir": "s3://b/c"}, "s3://b/c"),
        (None, {"output_dir": "s3://b/c", "output_store": "s3://b/c"}, "s3://b/c"),
        (None, {"output_dir": "out", "output_store": "s3://b"}, "s3://b"),
        ("s3://a", {"output_dir": "out/d"}, "s3://a/d"),
        ("s3://a", {"output_dir": "out/d", "output_store": None}, None),
        ("s3://a", {}, None),
    ],
)
def test_the_store_that_follows_from_the_output_folder(source, given, store):
    source = source and SimpleNamespace(output_store=source, output_dir="out")
    assert arguments_rules.with_store(source, {}, given).get("output_store") == store


@pytest.mark.parametrize(
    ("compat", "variable", "replaced", "given", "profile", "names"),
    [
        (None, None, None, {}, "5", []),
        ("5", None, None, {}, "5", []),
        ("4", None, None, {}, "4", ["report_to", "use_cache"]),
        (None, "4", None, {}, "4", ["report_to", "use_cache"]),
        ("5", "4", None, {}, "5", []),
        ("4", None, None, {"report_to": "none"}, "4", ["use_cache"]),
        ("4", None, None, {"report_to": None, "use_cache": None}, "4", ["report_to"]),
        (None, None, "4.46.0", {}, "4", ["use_cache"]),
        (None, None, "5.1.0", {}, "5", ["use_cache"]),
        (None, None, "6.0.0", {}, "5", ["use_cache"]),
        ("5", None, "4.46.0", {}, "5", []),
        ("4", None, "5.1.0", {}, "4", ["report_to", "use_cache"]),
    ],
)
def test_a_profile_gives_the_defaults_that_nobody_gave(monkeypatch, compat, variable, replaced, given, profile, names):
    monkeypatch.setattr(arguments_rules, "environment", {} if variable is None else {"HF_COMPAT_PROFILE": variable})
    releases = (
        [] if replaced is None else [arguments_rules.ReplacedRelease(release=replaced, defaults={"use_cache": 1})]
    )
    monkeypatch.setattr(arguments_rules, "_replaced", releases)
    ours = {name: SimpleNamespace(default=name) for name in ("report_to", "use_cache", "trackio_space_id")}
    checks = {**ours, "trackio_space_id": SimpleNamespace(default="a subclass's own")}
    found = arguments_rules.read_profile(compat, given, list(checks), checks, lambda: ours)
    assert (found[0], sorted(found[1])) == (profile, names)
    assert arguments_rules.read_profile(compat, given, [], checks, lambda: ours) == (profile, {})
