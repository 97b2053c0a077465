"""The schedules of a native fit. Each has one owner, which depends on who makes the updates.

    updates are made by    HF's schedule is stepped by    every other schedule is stepped by
    HFModule               each update                    Lightning
    Lightning              Lightning                      Lightning
    the author             each update by `super()`       the author

The end of an evaluation steps a schedule of HF's that follows a metric.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.types import LRSchedulerConfig

from hf_compat.engine.internals import automatic_schedules, check_schedules, is_in_resumed_epoch, replace_schedule_steps
from hf_compat.engine.module import is_stepped_by_hf
from hf_compat.native.overrides import replace_hook
from hf_compat.optim.lr_schedulers import follows_metric

if TYPE_CHECKING:
    from hf_compat.native.module import HFModule


def read_schedules(module: HFModule) -> None:
    """Read the schedules of the next `configure_optimizers` as in automatic optimization.

    In manual optimization Lightning drops the metric that a schedule follows, as the author steps schedules there. The
    configurations are in the module's `configured_schedules`, or None if there are several optimizers.

    The method may be a subclass's or LightningCLI's. It is called once a fit.
    """
    configure = module.configure_optimizers
    own = module.__dict__.get("configure_optimizers")  # LightningCLI puts one into the module itself

    @functools.wraps(configure)
    def configured() -> object:
        module.__dict__.pop("configure_optimizers", None)
        if own is not None:
            module.__dict__["configure_optimizers"] = own
        chosen = configure()
        optimizers, configs = ([], None) if chosen is None else automatic_schedules(chosen)
        module.__dict__["configured_schedules"] = configs
        return chosen if configs is None else (optimizers, [config.scheduler for config in configs])

    module.__dict__["configure_optimizers"] = configured


def take_schedules_read(module: HFModule) -> None:
    """Give Lightning the configurations that `read_schedules` has read."""
    read, strategy = {id(one.scheduler): one for one in module.configured_schedules or ()}, module.trainer.strategy
    strategy.lr_scheduler_configs = [read.get(id(one.scheduler), one) for one in strategy.lr_scheduler_configs]


class LightningSchedules:
    """The steps of Lightning's schedules in one fit, by its own code and rules.

    They are made at Lightning's moments, except one: what follows a metric is stepped at the end of an epoch before
    callbacks save. Lightning does so after, and a run that is resumed there has lost the step.
    """

    def __init__(self, module: HFModule) -> None:
        self.module, self.makes_updates = module, module.automatic_optimization
        self.own = replace_schedule_steps(module.trainer, self.step)
        configs = [config for config in module.trainer.lr_scheduler_configs if self.owns(config)]
        with self._posing(configs):
            check_schedules(configs, module)
        replace_hook(module, "on_train_epoch_end", functools.partial(self._end_epoch, module.on_train_epoch_end))

    def step(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the schedules that are due, in the place of Lightning's loop."""
        if self.module.trainer.lightning_module is not self.module:  # after a fit that has failed
            self.own(interval, update_plateau_schedulers)
        elif interval != "epoch" or not update_plateau_schedulers:
            self._step(interval, update_plateau_schedulers)

    def owns(self, config: LRSchedulerConfig) -> bool:
        """Whether Lightning steps a schedule: all but HF's, which HF steps itself."""
        of_hf = self.module.steps.lr_scheduler
        return not is_stepped_by_hf(config, of_hf) or (self.makes_updates and not follows_metric(of_hf))

    def _end_epoch(self, hook: Callable[[], None]) -> None:
        hook()
        if self.module.trainer.is_last_batch:
            self._step("epoch", True)

    def _step(self, interval: str, follows: bool) -> None:
        """Call Lightning's own code for its schedules, in which a module of HF's updates poses as automatic."""
        trainer = self.module.trainer
        own = [config for config in trainer.lr_scheduler_configs if self.owns(config)]
        if follows and is_in_resumed_epoch(trainer):  # its last batch may have been trained before, and logged nothing
            own = [config for config in own if config.monitor in trainer.callback_metrics]
        if own:
            with self._posing(own):
                self.own(interval, follows)

    @contextmanager
    def _posing(self, own: list[LRSchedulerConfig]) -> Iterator[None]:
        """Show Lightning these schedules, and automatic optimization."""
        strategy, attributes = self.module.trainer.strategy, vars(self.module)
        configs, set_before = strategy.lr_scheduler_configs, "_said_automatic" in attributes
        said = self.module._said_automatic  # or the class says it
        strategy.lr_scheduler_configs, attributes["_said_automatic"] = own, True
        try:
            yield
        finally:
            strategy.lr_scheduler_configs, attributes["_said_automatic"] = configs, said
            if not set_before:
                del attributes["_said_automatic"]
