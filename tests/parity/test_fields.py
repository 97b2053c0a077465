"""Every field of transformers' arguments is set by a parity case, or a reason says where else it is compared."""

import dataclasses

import transformers

from helpers.parity.cases import CASES

_SEVERAL = "it needs several processes: tests/distributed"
_STRATEGY = "it needs several processes: tests/distributed/test_strategies.py, tests/plan"
_HUB = "it changes what is pushed: tests/trainer_methods/test_hub.py"
_TRACKIO = "it changes what a tracker is told: tests/callbacks/test_trackers.py"
REASONS = {
    "output_dir": "every case has a folder of its own",
    "optim_target_modules": "it belongs to single optimizers: tests/optim",
    "tf32": "it changes nothing without an NVIDIA GPU",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "Liger's kernels need a GPU"),
    **dict.fromkeys(("log_on_each_node", "log_level_replica", "eval_use_gather_object", "save_on_each_node"), _SEVERAL),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _SEVERAL),
    **dict.fromkeys(("ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank"), _SEVERAL),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), _STRATEGY),
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"), _HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _HUB),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKIO),
    "enable_jit_checkpoint": "it answers signals: tests/faults/test_signals.py",
    "dataloader_pin_memory": "it changes nothing without a GPU",
    "skip_memory_metrics": "the machine's: tests/trainer_methods/test_memory_tracker.py compares the keys",
    "resume_from_checkpoint": "a flag for scripts; resuming is compared in tests/checkpoint/test_cross_resume.py",
}
FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def fields_of_cases() -> set[str]:
    found: set[str] = set()
    for case in CASES.values():
        found |= set(case["args"]) | set(case["arguments"]() if "arguments" in case else ())
    return found


def test_every_field_has_a_case_or_a_reason():
    missing = FIELDS - fields_of_cases() - set(REASONS)
    assert not missing, f"neither a case nor a reason: {sorted(missing)}"


def test_no_reason_is_stale_or_invented():
    assert set(REASONS) <= FIELDS, sorted(set(REASONS) - FIELDS)
    # a later case may set one of these, too; then its reason goes
    assert not set(REASONS) & fields_of_cases(), sorted(set(REASONS) & fields_of_cases())
