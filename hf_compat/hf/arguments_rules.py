"""Normalise `TrainingArguments`, derive values, check rules over several fields, and choose defaults.

Each rule yields error messages, and `TrainingArguments._validate_args` raises one error for all of them. Checks of
single fields are in `argument_values.py`. A profile changes only the defaults, to those of another generation of
transformers. Under `patch()` or `hf-compat run`, a script's arguments have the installed release's defaults.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError, warn_user
from hf_compat.hf.argument_values import COMPAT, NEWEST, ArgumentCheck, ArgumentValue, read_as
from hf_compat.hf.enums import INTERVAL_KINDS, IntervalStrategy, SaveStrategy, SchedulerType, with_platforms_tracker
from hf_compat.hf.legacy import Translation
from hf_compat.hf.rows import ROWS
from hf_compat.hf.value_types import plain
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.launch import environment
from hf_compat.runtime.stores import folder_for, note_store, store_of
from hf_compat.runtime.text import brief, shown

if TYPE_CHECKING:
    from hf_compat.hf.fields import TrainingFields


# The form of a repository's name on the Hub.
_REPOSITORY = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def normalise_arguments(args: TrainingFields) -> None:
    """Normalise every field. `fill_in` comes next."""
    for name, row in ROWS.items():
        if row.none_means is not None and getattr(args, name) is None:  # a subclass's default
            object.__setattr__(args, name, copy.copy(row.none_means))
        if row.form is not None:  # the value has already been checked
            object.__setattr__(args, name, row.form(getattr(args, name)))
    if (address := store_address(str(args.output_dir))) is not None:
        object.__setattr__(args, "output_dir", folder_for(address))
        args.__dict__["output_store"] = address
    if environment.get("KUBEFLOW_TRAINER_SERVER_URL") is not None:
        args.report_to = with_platforms_tracker(args.report_to)  # type: ignore[arg-type]  # a list by now
    config: ArgumentValue = args.accelerator_config  # an object by now
    num_steps = (config.gradient_accumulation_kwargs or {}).get("num_steps")
    if num_steps is not None and args.gradient_accumulation_steps == 1:  # else the Trainer refuses it, as upstream
        args.gradient_accumulation_steps = num_steps
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing or False
    args.gradient_checkpointing = args.activation_checkpointing
    if args.activation_checkpointing_kwargs is None:
        args.activation_checkpointing_kwargs = args.gradient_checkpointing_kwargs
    args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs


def formed(args: TrainingFields, name: str, value: ArgumentValue) -> ArgumentValue:
    """Normalise a value that is assigned to complete arguments. The store follows the output folder."""
    row = ROWS.get(name)
    if row is not None and row.form is not None:
        value = row.form(value)
    if name == "output_dir":
        address = store_address(value)
        args.__dict__["output_store"] = address or _store_after(args, value)
        value = value if address is None else folder_for(address)
        note_store(value, args.output_store)
        if args.output_store is None and store_of(str(args.output_dir)) is not None:
            warn_user(
                f"`{shown('output_dir', value)}` is another folder, so nothing of it is stored in "
                f"{store_of(str(args.output_dir))}.\n\nHint: set `output_store`, too, or an address as `output_dir`."
            )
    elif name == "output_store":
        note_store(str(args.output_dir), value)
        make_folder_of_store(args, value)
    return value


def _store_after(args: TrainingFields, folder: str) -> str | None:
    """The store of a folder that takes the place of the output folder: within the store, if it is within the folder."""
    if args.output_store is None:
        return None
    name = os.path.relpath(folder, str(args.output_dir)).replace(os.sep, "/")
    if name == ".":
        return args.output_store
    return None if name.startswith("..") else f"{args.output_store}/{name}"


def with_store(
    source: TrainingFields | None, by_place: Mapping[str, object], given: dict[str, ArgumentValue]
) -> dict[str, ArgumentValue]:
    """Add the `output_store` that follows from the output folder of a call of the constructor.

    Args:
        source: The arguments of which `dataclasses.replace` makes others.
        by_place: Values by position.
        given: Values by name.

    Raises:
        ArgumentError: Two stores are named.
    """
    folder = {**by_place, **given}.get("output_dir")
    address = store_address(folder) if isinstance(folder, str) else None
    explicit = given.get("output_store")
    if address is not None:
        if explicit is not None and store_address(str(explicit)) != address:
            raise ArgumentError(
                f"`{shown('output_dir', folder)}` and `{shown('output_store', explicit)}` are two stores.\n\n"
                "Hint: name one of them. With `output_store`, `output_dir` is the folder of this machine."
            )
        return {**given, "output_store": address}
    if source is None or "output_store" in given or not isinstance(folder, str):
        return given
    return {**given, "output_store": _store_after(source, os.path.expanduser(folder))}


def make_folder_of_store(args: TrainingFields, address: str | None) -> None:
    """Make the folder of this machine, in which scripts look for checkpoints before they make a Trainer."""
    if address is not None:
        with contextlib.suppress(OSError):  # the Trainer says so
            os.makedirs(str(args.output_dir), exist_ok=True)


def fill_in(args: TrainingFields) -> None:
    """Set values that follow from other fields, `mixed_precision` last."""
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.metric_for_best_model is None and (
        args.load_best_model_at_end or args.lr_scheduler_type in METRIC_SCHEDULES
    ):
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
        args._infers_direction = True
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.fp16 or args.bf16:
        args.mixed_precision = "fp16" if args.fp16 else "bf16"
    else:  # the variable of `accelerate launch --mixed_precision`
        args.mixed_precision = str(environment.get("ACCELERATE_MIXED_PRECISION", "no")).lower()


def follow_machine(args: TrainingFields) -> None:
    """Set the value that follows from other fields and this machine."""
    import torch

    if (
        args.dataloader_num_workers > 1
        and args.dataloader_multiprocessing_context is None
        and torch.backends.mps.is_available()
    ):
        args.dataloader_multiprocessing_context = "fork"


def keep_direction(source: TrainingFields | None, args: TrainingFields) -> None:
    """Let the direction follow as in the arguments that these were made from, if it is that of the same metric."""
    if source is not None and source._infers_direction:
        is_same_metric = args.metric_for_best_model == source.metric_for_best_model
        if is_same_metric and args.greater_is_better == source.greater_is_better:
            args._infers_direction = True


def check_again(args: TrainingFields) -> None:
    """Check fields again that may have been set after the constructor, before they end training late."""
    problems = [*intervals(args), *workers_and_repository(args)]
    config: ArgumentValue = args.accelerator_config
    num_steps, steps = (config.gradient_accumulation_kwargs or {}).get("num_steps"), args.gradient_accumulation_steps
    if num_steps not in (None, steps):
        problems.append(
            _problem(
                f"The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is another number: "
                f"they are {num_steps} and {steps}, and both say how many micro-batches an update has.",
                "keep one of them.",
            )
        )
    if problems:
        raise ArgumentError("\n\n".join(problems))


def _problem(fact: str, hint: str) -> str:
    return f"{fact}\n\nHint: {hint}"


def intervals(args: TrainingFields) -> Iterator[str]:
    """Check the numbers of updates between logs, evaluations and saves."""
    for kind in INTERVAL_KINDS:
        if getattr(args, f"{kind}_strategy") != "steps":
            continue
        steps = getattr(args, f"{kind}_steps")
        if steps is None and kind == "eval":  # set after the constructor, so the state's number applies, as upstream
            continue
        if steps is None or (steps == 0 and kind != "save"):
            yield _problem(
                f"`{kind}_strategy='steps'` needs `{kind}_steps` above 0, got {brief(steps)}.",
                f"give a number of updates, or a share below 1, or set `{kind}_strategy='no'`.",
            )
        elif steps < 0:
            yield _problem(
                f"`{kind}_steps={brief(steps)}` is below 0.", f"use `{kind}_strategy='no'` to switch it off."
            )
        elif steps > 1 and steps != int(steps):
            yield _problem(f"`{kind}_steps={brief(steps)}` must be an integer if bigger than 1.", "round it.")


def metrics_needed(args: TrainingFields) -> Iterator[str]:
    """Check that evaluations give the metric that a schedule or the choice of the best model needs."""
    if args.lr_scheduler_type in METRIC_SCHEDULES and args.eval_strategy == IntervalStrategy.NO:
        yield _problem(
            f"`lr_scheduler_type='{plain(args.lr_scheduler_type)}'` requires an eval strategy: it follows a metric.",
            "set `eval_strategy` to 'steps' or 'epoch'.",
        )
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if args.eval_strategy != args.save_strategy:
        yield _problem(
            "`load_best_model_at_end=True` needs the evaluation and the save strategy to match, got "
            f"`eval_strategy='{plain(args.eval_strategy)}'` and `save_strategy='{plain(args.save_strategy)}'`.",
            "set both to 'steps' or both to 'epoch', or use `save_strategy='best'`.",
        )
        return
    saves, evaluates = args.save_steps, args.eval_steps
    if args.eval_strategy != IntervalStrategy.STEPS or not evaluates or saves % evaluates == 0:
        return
    ratio = saves / evaluates
    if not (saves < 1 and evaluates < 1 and math.isclose(ratio, round(ratio), rel_tol=1e-9)):
        yield _problem(
            f"`load_best_model_at_end=True` needs `save_steps={brief(args.save_steps)}` to be a round multiple of "
            f"`eval_steps={brief(args.eval_steps)}`, both as counts or both as shares below 1.",
            "make it one, or use `save_strategy='best'`.",
        )


def workers_and_repository(args: TrainingFields) -> Iterator[str]:
    """Check that options of workers come with workers, and pushes with a repository."""
    for name, what in (
        ("dataloader_prefetch_factor", "has no workers to load ahead"),
        ("dataloader_persistent_workers", "has no workers to keep"),
        ("dataloader_multiprocessing_context", "starts no workers"),
    ):
        value = getattr(args, name)
        if value not in (None, False) and args.dataloader_num_workers <= 0:
            yield _problem(f"`{name}={brief(value)}` {what}.", "set `dataloader_num_workers` above 0.")
    if not args.push_to_hub:
        return
    if args.hub_model_id is not None and _REPOSITORY.fullmatch(args.hub_model_id) is None:
        yield _problem(
            f"`hub_model_id={brief(args.hub_model_id)}` names no repository, and `push_to_hub=True` needs one.",
            "write 'name' or 'owner/name', or leave it out to use the last part of `output_dir`.",
        )
    if args.hub_revision is not None and not args.hub_revision.strip():
        yield _problem(
            f"`hub_revision={brief(args.hub_revision)}` names no branch, and `push_to_hub=True` pushes to one.",
            "name it, or leave it out to use the main branch.",
        )


def precision(args: TrainingFields) -> Iterator[str]:
    """Check the number formats on this device."""
    if args.fp16 and args.bf16:
        yield _problem("`fp16` and `bf16` are both on.", "at most one of fp16 and bf16 can be True.")
    if args.fp16_full_eval and args.bf16_full_eval:
        yield _problem("`fp16_full_eval` and `bf16_full_eval` are both on.", "at most one of them can be True.")
    on_cpu = args.device.type == "cpu"
    asks, name = (True, "bf16") if args.bf16 else (args.bf16_full_eval, "bf16_full_eval")
    if args.device.type == "mps" and asks and not _is_newer_mac():
        yield _problem(f"`{name}` on Apple's GPU requires macOS 14.", "leave it out.")
    if asks and not args.use_cpu and on_cpu:
        yield _problem(
            f"`{name}` on the CPU has to be asked for: your setup doesn't support bf16/gpu.",
            "set `use_cpu=True` to train under bfloat16 on the CPU.",
        )
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        yield _problem(
            f"ACCELERATE_MIXED_PRECISION={brief(args.mixed_precision)}, set by `accelerate launch`, is not supported.",
            "choose no, bf16 or fp16.",
        )
    if args.fp16 and on_cpu and (args.fsdp or args.deepspeed):
        yield _problem("`fp16=True` with `fsdp` or `deepspeed` requires a GPU.", "use `bf16=True` on the CPU.")
    if args.tf32 and not has_tf32():
        yield _problem("`tf32=True` requires an Ampere or newer GPU.", "leave `tf32` out.")


# The rules over several fields, in the order of their messages
RULES = (intervals, metrics_needed, workers_and_repository, precision)


def _is_newer_mac() -> bool:
    import torch

    return torch.backends.mps.is_macos_or_newer(14, 0)


def has_tf32() -> bool:
    """Whether the GPU of this process supports TF32, as Ampere and newer ones do."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def choose_tf32(args: TrainingFields) -> None:
    """Switch TF32 on or off for the whole process, or leave it if the arguments do not set it.

    Mirrors:
        `transformers.TrainingArguments.__post_init__`. Compiling switches it on, except with float16.
    """
    wanted = args.tf32
    if args.torch_compile and ((wanted is None and not args.fp16) or args.bf16) and wanted is not False:
        wanted = True
    if wanted is None or not has_tf32():
        return
    import torch

    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "tf32" if wanted else "ieee"
        # Set torch's older names as well. Otherwise Lightning, which reads them, gets an error.
        torch.set_float32_matmul_precision("high" if wanted else "highest")
        torch.backends.cudnn.allow_tf32 = wanted
    else:  # torch before 2.9
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted


VARIABLE = "HF_COMPAT_PROFILE"
# Generation → the defaults of its last release that differ. `use_cache=None` keeps the value of the model, as in 4.x.
# `python tests/hf/defaults_of_4_57.py` compares with the release.
PROFILES: dict[str, Translation] = {
    "4": {"report_to": "all", "trackio_space_id": "trackio", "use_cache": None},
    NEWEST: {"report_to": "none", "trackio_space_id": None, "use_cache": False},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedRelease:
    """The release that ours replaces."""

    release: str  # its version
    defaults: Translation  # those of its defaults that differ from ours

    @property
    def generation(self) -> str:
        """The release's generation, or the newest if it is unknown."""
        generation = self.release.partition(".")[0]
        return generation if generation in PROFILES else NEWEST


_replaced: list[ReplacedRelease] = []  # at most one


def follow(replaced: ReplacedRelease | None) -> None:
    """Use a release's defaults as those of its generation, and that generation by default. None undoes this."""
    _replaced[:] = [] if replaced is None else [replaced]


def followed() -> ReplacedRelease | None:
    """The release that ours replaces."""
    return _replaced[0] if _replaced else None


def generation_beside() -> str | None:
    """The generation of the loaded or installed transformers, or None if it is missing."""
    release: object = getattr(sys.modules.get("transformers"), "__version__", None) or _installed_release()
    return None if release is None else str(release).partition(".")[0]


@functools.cache
def _installed_release() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_profile(
    compat: object,
    given: Mapping[str, ArgumentValue],
    known: Collection[str],
    checks: Mapping[str, ArgumentCheck],
    checks_of_ours: Callable[[], Mapping[str, ArgumentCheck]],
) -> tuple[str, Translation]:
    """Choose the generation, and its defaults of the arguments that are not given."""
    named = compat or environment.get(VARIABLE) or (_replaced[0].generation if _replaced else NEWEST)
    if named == NEWEST and not _replaced:
        return NEWEST, {}
    profile, ours = str(read_as(VARIABLE, COMPAT, named)), checks_of_ours()
    its_defaults = (one.defaults for one in _replaced if one.generation == profile)
    return profile, {
        name: default
        for name, default in next(its_defaults, {} if profile == NEWEST else PROFILES[profile]).items()
        if name in known
        and (name not in given or (name == "report_to" and given[name] is None))  # the default in 4.x
        and checks[name].default == ours[name].default
    }
