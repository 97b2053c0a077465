"""`explain` lists the effect of each argument, the settings of Lightning, and the sizes of a run.

The sizes cover parameters, gradients and optimizer states in float32, as HF trains under autocast. Adam then takes 16
bytes a parameter. DeepSpeed's bf16 has parameters of 2 bytes and float32 masters. Activations are not counted, because
they depend on the model, the batch, the sequence length and activation checkpointing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum

from hf_compat.errors import ArgumentError, MissingOptimizer, UnsupportedArgument
from hf_compat.hf.argument_values import NEWEST, read_as
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.arguments_rules import PROFILES, followed
from hf_compat.hf.rows import OWN_ROWS, ROWS, RunParts
from hf_compat.hf.value_types import Range, number, plain
from hf_compat.interop.arguments import as_our_arguments, unknown_arguments
from hf_compat.optim.optimizers import state_bytes
from hf_compat.plan.argument_support import check_optimization, default_of, inert_settings, set_arguments
from hf_compat.plan.deepspeed import zero_stage
from hf_compat.plan.translate import LightningPlan, RunCounts, translate
from hf_compat.runtime.text import is_secret, shown
from hf_compat.tools.terminal import ShownAsPrinted

GIB = 2**30
# Generation → the release whose defaults it has.
RELEASES = {"4": "4.57", NEWEST: "5.23"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTraffic:
    """What processes do with a checkpoint's files, bytes.

    Args:
        read_back: By the first process, to hash the files of a save.
        resumed: By the process that reads most in a resume: its part of the hashes, then what it loads.
        held: At once in the memory of a machine's processes while they load.
    """

    read_back: float
    resumed: float
    held: float

    def lines(self) -> list[str]:
        """Describe them."""
        held = f"a machine holds up to {self.held / GIB:.1f} GiB of it" if self.held else "loads it part by part"
        return [
            f"the first process reads {self.read_back / GIB:.1f} GiB of a checkpoint back to hash it",
            f"a resume reads up to {self.resumed / GIB:.1f} GiB of a checkpoint in each process, and {held}",
        ]


def file_traffic(plan: LightningPlan, weights: float, optimizer: float, shares_optimizer: bool) -> FileTraffic:
    """Return what processes read and hold of a checkpoint.

    Args:
        plan: The plan of the run.
        weights: Size of the whole weights, bytes.
        optimizer: Size of the whole optimizer's state, bytes.
        shares_optimizer: Whether each process holds a part of the optimizer's state.
    """
    world, per_node = plan.world_size, min(plan.devices_per_node, plan.world_size)
    is_fsdp, on_one_machine = plan.strategy == "fsdp2", per_node == world
    shards = is_fsdp and plan.strategy_options["plan"].state_dict_type == "SHARDED_STATE_DICT"
    own_weights = weights / world if shards else weights
    # DeepSpeed writes the states of ZeRO in parts, too
    in_parts = shards or (shares_optimizer and not is_fsdp)
    own_optimizer = optimizer / world if in_parts else optimizer
    # Whole files and shards are hashed by the reading that loads them. DeepSpeed loads its own
    hashed = own_optimizer + weights / world if in_parts and not shards else 0
    held_optimizer = own_optimizer if is_fsdp and not shards else own_optimizer * per_node
    return FileTraffic(
        read_back=weights + optimizer if on_one_machine else own_weights + own_optimizer,
        resumed=hashed + own_weights + own_optimizer,
        # one after the other; shards are read part by part
        held=0 if shards else max(own_weights * per_node, held_optimizer),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """Sizes of a run, bytes. Parameters, gradients and optimizer are those on each device, files of a checkpoint.

    Args:
        sent: By each device in an update (ring algorithms).
        files: What processes read and hold of a checkpoint.
        sockets: Of the first process to the other ones, and of another one.
        gathered: Additional memory of global rank 0 while it writes a checkpoint.
        unknown: The optimizer whose states are not counted. Empty if they are.
    """

    parameters: float
    gradients: float
    optimizer: float
    sent: float
    weights_file: float
    optimizer_file: float
    files: FileTraffic
    sockets: tuple[int, int] = (0, 0)
    gathered: float = 0
    per_node: int = 1
    unknown: str = ""

    @property
    def on_device(self) -> float:
        """Memory of each device, without activations."""
        return self.parameters + self.gradients + self.optimizer

    def lines(self, write_speed: float = 1e9) -> list[str]:
        """Describe the sizes. `write_speed`, in bytes a second, determines the time of a checkpoint."""
        files = self.weights_file + self.optimizer_file
        more = []
        if self.unknown:
            more.append(f"not counted: the states of optim={self.unknown!r}, which depend on its options")
        if self.gathered:
            more.append(
                f"the first process gathers {self.gathered / GIB:.0f} GiB in its memory to write a checkpoint: "
                "`state_dict_type='SHARDED_STATE_DICT'` (FSDP 2) gathers nothing"
            )
        if any(self.sockets):
            more.append("sockets to other processes: {} of the first process, {} of another one".format(*self.sockets))
        if self.per_node > 1:
            more.append(f"a machine's {self.per_node} processes hold {self.per_node * self.on_device / GIB:.0f} GiB")
        return [
            f"each device holds {self.on_device / GIB:.1f} GiB and activations: "
            f"parameters {self.parameters / GIB:.1f}, gradients {self.gradients / GIB:.1f}, "
            f"optimizer {self.optimizer / GIB:.1f}",
            f"each device sends {self.sent / GIB:.1f} GiB an update",
            f"a checkpoint has {files / GIB:.0f} GiB (weights {self.weights_file / GIB:.0f}): "
            f"{files / write_speed:.0f} s at {write_speed / 1e9:g} GB/s",
            *self.files.lines(),
            *more,
        ]


def size_of_run(
    plan: LightningPlan,
    parameters: float,
    trained: float | None = None,
    optim: str = "adamw_torch",
    optim_args: str = "",
) -> RunSize:
    """Return the sizes of a run.

    Args:
        plan: The plan, whose strategy determines the sharding.
        parameters: Number of the model's parameters.
        trained: Number of parameters that are trained and saved, such as adapters. None means all.
        optim: Name of the optimizer.
        optim_args: Options of the optimizer.
    """
    in_halves, micro_batches = plan.precision != "32-true", plan.micro_batches_per_update
    halves = plan.strategy == "deepspeed" and in_halves  # of parameters and gradients, next to float32 masters
    kept, master = (2, 4) if halves else (4, 0)
    trained = parameters if trained is None else trained
    states = state_bytes(optim, optim_args)
    optimizer = trained * ((states or 0) + master)
    # The share of the parameters, the gradients and the optimizer states on one device
    stage = zero_stage(plan.strategy_options["config"]) if plan.strategy == "deepspeed" else 0
    stage = 3 if plan.strategy == "fsdp2" else stage
    sharded = {part for part, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)) if stage >= first}
    split, models = plan.sharing, plan.world_size // plan.sharing  # processes that share a layer, and how often
    kinds = ("parameters", "gradients", "optimizer")
    share = {part: 1 / (plan.world_size if part in sharded else split) for part in kinds}
    exchanges = micro_batches if plan.exchange_every_micro_batch else 1
    if plan.strategy == "fsdp2" and exchanges < micro_batches:
        share["gradients"] = 1 / split  # they stay unsharded until the window's last micro-batch
    gathered = 0.0
    if plan.strategy == "fsdp2" and plan.strategy_options["plan"].state_dict_type == "FULL_STATE_DICT":
        gathered = trained * kept + optimizer
    elif plan.strategy == "deepspeed" and "parameters" in sharded:
        gathered = trained * kept  # DeepSpeed's own files are each rank's
    # Bytes that a device sends in an update, before the factor of ring algorithms
    if "parameters" in sharded:
        # every micro-batch gathers all parameters twice, frozen ones as well, and reduces gradients
        reduces = micro_batches if plan.strategy == "deepspeed" else exchanges
        sent = parameters * 2 * micro_batches * (2 if in_halves else 4) + trained * reduces * kept
    else:
        sent = trained * 2 * kept * exchanges  # an all-reduce is a reduce-scatter and an all-gather
    others = plan.world_size - 1
    by_gloo = 0 if plan.device.startswith("cuda") else others  # it connects every two processes, NCCL a few
    return RunSize(
        parameters=parameters * kept * share["parameters"],
        gradients=trained * kept * share["gradients"],
        optimizer=optimizer * share["optimizer"],
        sent=sent / split * (models - 1) / models,
        weights_file=trained * kept,
        optimizer_file=optimizer,
        files=file_traffic(plan, trained * kept, optimizer, "optimizer" in sharded),
        sockets=(by_gloo + others, by_gloo + min(others, 1)),
        gathered=gathered,
        per_node=min(plan.devices_per_node, plan.world_size),
        unknown=optim if states is None else "",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedArgument:
    """One argument that was set away from its default. `becomes` is its destination, or why it has no effect."""

    name: str
    value: object
    becomes: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(ShownAsPrinted):
    """The effect of a set of arguments. `print` it, or read `to_json()`.

    Args:
        arguments: The arguments that were set away from their defaults.
        plan: The plan. None if an argument is refused.
        refused: The error that a run would raise. Empty if none.
        sizes: Descriptions of memory, traffic and checkpoints. Empty if the model's size is unknown.
        profile: The generation of transformers whose defaults apply.
        other_defaults: Arguments whose default differs from the current one.
    """

    arguments: tuple[ExplainedArgument, ...]
    plan: LightningPlan | None
    refused: str = ""
    sizes: tuple[str, ...] = ()
    profile: str = NEWEST
    other_defaults: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2, default=str)

    def __str__(self) -> str:
        names = [f"{argument.name}={argument.value!r}" for argument in self.arguments]
        width = min(max((len(name) for name in names), default=0), 48)
        lines = [f"  {name:<{width}}  → {a.becomes}" for name, a in zip(names, self.arguments, strict=True)]
        told = ["refused:", self.refused]
        if self.plan is not None:
            settings = {"precision": self.plan.precision, **self.plan.trainer_settings()}
            told = ["lightning.Trainer:", *(f"  {k}={value!r}" for k, value in settings.items() if value is not None)]
            if self.plan.world_size > 1:
                options = ", ".join(f"{k}={value!r}" for k, value in self.plan.strategy_options.items()) or "no options"
                told.append(f"  strategy={self.plan.strategy!r} over {self.plan.world_size} processes; {options}")
            if self.plan.sharing > 1:
                told += _shares_of_layers(self.plan)
            if (sequence := self.plan.sequence) is not None:
                told += _shares_of_sequences(sequence.sp_size, self.plan)
            told += [f"  {line}" for line in self.sizes]
            told.append(
                f"  one batch = one update = {self.plan.micro_batches_per_update} micro-batch(es) of "
                f"{self.plan.micro_batch_size}; clipping by the module at {self.plan.gradient_clip_norm}"
            )
        head = f"defaults of transformers {_release_of(self.profile)} (compat={self.profile!r}):"
        defaults = [head, *(f"  {line}" for line in self.other_defaults or ("as today's",)), ""]
        shown_first = defaults if self.profile != NEWEST or self.other_defaults else []
        return "\n".join([*shown_first, "arguments set away from their defaults:", *(lines or ["  none"]), "", *told])


def _shares_of_layers(plan: LightningPlan) -> list[str]:
    """Describe what a process of those that share layers holds and exchanges."""
    split, models, micro_batches = plan.sharing, plan.world_size // plan.sharing, plan.micro_batches_per_update
    return [
        f"  mesh: {models} models × {split} neighbouring processes that share each layer and read the same batches; "
        f"each holds 1/{split} of the split layers",
        f"  an update adds up within a model, {micro_batches} time(s): forward the result of each layer that is split "
        "by rows, backward the gradient of each that is split by columns (7 all-reduces in a layer of a Llama), each "
        f"of {plan.micro_batch_size} samples × tokens × hidden numbers, however many processes there are "
        "(counted for 8, 64 and 512: docs/scale.md#tensor-parallelism)",
    ]


def _shares_of_sequences(processes: int, plan: LightningPlan) -> list[str]:
    """Describe what a process of those that share sequences holds and exchanges."""
    samples, micro_batches = plan.micro_batch_size, plan.micro_batches_per_update
    return [
        f"  mesh: {plan.world_size // processes} groups × {processes} neighbouring processes that share each sequence; "
        f"each holds the model as ZeRO divides it, and 1/{processes} of the tokens of every sequence",
        f"  an update exchanges, around each attention layer and {micro_batches} time(s): 4 all-to-alls forward "
        f"(queries, keys, values, results) and 4 backward, each of {samples} samples × tokens / {processes} × (heads × "
        "numbers of a head), however many groups there are; and 1 all-gather of positions. Each micro-batch gathers "
        "losses and counts of tokens, "
        f"every {processes}. one the batches. Evaluations share nothing",
    ]


def explain(
    args: TrainingArguments,
    counts: RunCounts | None = None,
    parameters: float | None = None,
    trained: float | None = None,
    parts: RunParts | None = None,
) -> Explanation:
    """Explain the destination of each argument and the settings of the Lightning trainer.

    Args:
        args: The training arguments, or `transformers`' own.
        counts: Counts of the run, if its data is known.
        parameters: Number of the model's parameters. Adds the sizes of a run on each device.
        trained: Number of trained parameters, such as those of LoRA's adapters. None means all.
        parts: What a Trainer is given beside the arguments (`run_parts`), by which some have no effect.

    Returns:
        The explanation. Refused arguments are part of it, not raised.

    Raises:
        ArgumentError: `args` are not training arguments, or `parameters` is not a number.

    Examples:
        >>> explanation = explain(TrainingArguments("out", use_cpu=True, max_grad_norm=0.5))
        >>> [argument.name for argument in explanation.arguments if argument.value == 0.5]
        ['max_grad_norm']
    """
    unknown = unknown_arguments(args)
    args = as_our_arguments(args)
    if counts is not None and not isinstance(counts, RunCounts):
        raise ArgumentError(
            f"`{shown('counts', counts)}` is not a RunCounts.\n\nHint: leave it out, or call `make_run_counts`."
        )
    size, part = (
        None if given is None else float(str(read_as(name, number(Range(low=0)), given)))
        for name, given in (("parameters", parameters), ("trained", trained))
    )
    if size is not None and part is not None and part > size:
        raise ArgumentError(f"`trained={trained!r}` is more than `parameters={parameters!r}`.")
    plan: LightningPlan | None = None
    refused = ""
    try:
        check_optimization(args)
        plan = translate(args, counts)
    except (ArgumentError, MissingOptimizer, UnsupportedArgument) as error:
        refused = str(error)
    by_profile = args._defaults_of_profile
    todays = {field.name: default_of(field) for field in fields(args)} | PROFILES[NEWEST]
    sizes: tuple[str, ...] = ()
    if plan is not None and size:
        optim = str(plain(args.optim))
        held = size_of_run(plan, size, part, optim, str(args.optim_args or "")).lines()
        kept = "one input of each layer is kept, and the largest layer's activations come on top"
        way = "`gradient_checkpointing=True` keeps one input of each layer instead"
        sizes = (
            *held,
            f"activations are not counted: they grow with {plan.micro_batch_size} samples "
            "(`per_device_train_batch_size`) times the length of a sequence; "
            f"{kept if args.activation_checkpointing else way}",
        )
    return Explanation(
        arguments=(*_explained(args, unknown, by_profile, parts), *_unknown(unknown)),
        plan=plan,
        refused=refused,
        sizes=sizes,
        profile=args.compat if args.compat in RELEASES else NEWEST,  # a subclass may have a field of that name
        other_defaults=tuple(
            f"{shown(name, getattr(args, name))}  (transformers {RELEASES[NEWEST]}: {todays[name]!r})"
            for name in by_profile
        ),
    )


def _release_of(profile: str) -> str:
    """The release whose defaults a profile has."""
    replaced = followed()
    return RELEASES[profile] if replaced is None or replaced.generation != profile else replaced.release


def _shown(name: str, value: object) -> object:
    """A value without its secrets, and those in nested dicts and lists."""
    if is_secret(name) and value is not None:
        return "<hidden>"
    if isinstance(value, Mapping):
        return {key: _shown(str(key), item) for key, item in value.items()}
    return [_shown("", item) for item in value] if isinstance(value, list) else value


def _unknown(values: Mapping[str, object]) -> Iterator[ExplainedArgument]:
    for name, value in values.items():
        becomes = "nothing: an argument of a newer transformers, which this release of hf_compat does not know"
        yield ExplainedArgument(name=name, value=_shown(name, value), becomes=becomes)


def _explained(
    args: TrainingArguments, unknown: Collection[str], by_profile: Collection[str], parts: RunParts | None
) -> Iterator[ExplainedArgument]:
    """Yield the arguments that are set away from today's defaults, by the user or by another generation's."""
    inert = {one.name: one.why for one in inert_settings(args, parts)}
    for name, value in set_arguments(args).items():
        if name not in unknown:
            value = value.value if isinstance(value, Enum) else value
            row = ROWS.get(name) or OWN_ROWS.get(name)
            if row is None:
                becomes = "a field of your subclass"
            elif name in inert:
                becomes = f"no effect here: {inert[name]}"
            else:
                becomes = row.to
            if row is not None and row.derived is not None and value == row.derived.value(args):
                becomes += f" (follows from `{row.derived.source}`)"
            if name in by_profile:
                becomes += f" (the default of transformers {_release_of(args.compat)})"
            yield ExplainedArgument(name=name, value=_shown(name, value), becomes=becomes)
