"""What training arguments say of this process: device, ranks, batch sizes, and whether it logs and saves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from hf_compat.errors import ArgumentError
from hf_compat.hf.enums import ParallelMode
from hf_compat.runtime.inspection import delegated
from hf_compat.runtime.launch import Launch, read_launch

if TYPE_CHECKING:
    import torch


class ProcessPlace:
    """The properties of `TrainingArguments` about processes. It adds the fields.

    Mirrors:
        `transformers.TrainingArguments`.
    """

    # Fields of the dataclass.
    ddp_backend: str | None
    ddp_timeout: int
    use_cpu: bool
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    log_on_each_node: bool
    save_on_each_node: bool
    # Notes of the constructor
    mixed_precision: str  # derived by arguments_rules.py
    _infers_direction: bool = False  # whether `greater_is_better` follows from the metric's name, and was not set
    _defaults_of_profile: tuple[str, ...] = ()  # the arguments that have another release's default

    @functools.cached_property
    def _launch(self) -> Launch:
        return read_launch()

    @functools.cached_property
    def device(self) -> torch.device:
        """The single device of this process."""
        from hf_compat.runtime.devices import choose_device

        return choose_device(self.use_cpu, self._launch)

    # The device, by upstream's name. Without a type, as `get_type_hints` would look for torch
    _setup_devices = delegated("device")
    world_size: int = delegated("_launch.world_size")
    """The number of processes that train together."""
    process_index: int = delegated("_launch.process_index")
    """Rank of this process over all machines."""
    local_process_index: int = delegated("_launch.local_process_index")
    """Rank of this process on its machine."""

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, at most 1 because `nn.DataParallel` is not used."""
        return int(self.device.type != "cpu")

    def _refuse_claims(self) -> None:
        """Refuse a subclass's own count of processes or rank, with which processes would wait forever."""
        names = ("world_size", "process_index", "local_process_index")
        for name in names if self._launch.world_size > 1 else names[:1]:
            claimed, started = getattr(self, name), getattr(self._launch, name)
            if claimed != started:
                raise ArgumentError(
                    f"{type(self).__name__}.{name} is {claimed}, and the launcher has started this process with "
                    f"{started}: processes would wait for each other in vain.\n\n"
                    "Hint: leave the property out, and start the processes by `torchrun --nproc-per-node`, or by "
                    "`hf-compat run --devices`."
                )

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Samples of a training micro-batch of this process."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)  # above 1 if a subclass says so

    @property
    def eval_batch_size(self) -> int:
        """Samples of an evaluation batch of this process."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a duration."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes to disk."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the main process run the block before the others, which then find its files.

        Args:
            local: Choose the first process of each machine. Otherwise choose the first of all.
            desc: Ignored. Upstream logs it.
        """
        from torch.distributed import barrier

        from hf_compat.runtime.collectives import start_processes

        self._refuse_claims()
        start_processes(self)
        waits = self.world_size > 1
        first = (self.local_process_index if local else self.process_index) == 0
        if waits and not first:
            barrier()
        try:
            yield
        finally:
            if waits and first:
                barrier()
