"""The `set_*` methods of `TrainingArguments`: groups of fields set in one call.

Each mirrors the method of the same name of `transformers.TrainingArguments`, 5.23. All values of a call are read before
the first one is set: a call that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from hf_compat.errors import ArgumentError
from hf_compat.hf.argument_values import ArgumentCheck, read_all
from hf_compat.hf.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType

Self = TypeVar("Self", bound="ArgumentSetters")
_COUNTING = (("logging_strategy", "logging_steps"), ("eval_strategy", "eval_steps"), ("save_strategy", "save_steps"))


class ArgumentSetters:
    """Group setters of `TrainingArguments`; each returns the arguments, so calls can be chained."""

    eval_strategy: IntervalStrategy | str

    @classmethod
    def _checks(cls) -> Mapping[str, ArgumentCheck]:
        """Return what each field may be."""
        raise NotImplementedError

    def _set(self: Self, **values: object) -> Self:
        good, problems = read_all(self._checks(), values)
        problems += [
            f"`strategy='steps'` needs `steps` above 0 (it sets `{steps}`).\n\nHint: give a number of updates."
            for kind, steps in _COUNTING
            if good.get(kind) == "steps" and good.get(steps) == 0
        ]
        if problems:
            raise ArgumentError("\n\n".join(problems))
        for name, value in good.items():
            setattr(self, name, value)
        return self

    def set_training(
        self: Self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set what training runs on, and `do_train`."""
        recompute = activation_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=recompute,
            gradient_checkpointing=recompute,
        )

    def set_evaluate(
        self: Self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:
        """Set when and how to evaluate, and `do_eval` with it; `jit_mode` is `jit_mode_eval`, of 4.x."""
        self._set_jit_mode(jit_mode)
        self._set(
            eval_strategy=strategy,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay if delay is not None else 0,
            prediction_loss_only=loss_only,
        )
        return self._set(do_eval=self.eval_strategy != IntervalStrategy.NO)

    def set_testing(self: Self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Set how to predict, and `do_predict`; `jit_mode` is `jit_mode_eval`, of 4.x."""
        self._set_jit_mode(jit_mode)
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def _set_jit_mode(self, jit_mode: bool) -> None:
        if jit_mode:
            setattr(self, "jit_mode_eval", jit_mode)  # noqa: B010 - an old name, which is no field

    def set_save(
        self: Self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to save and how much to keep."""
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self: Self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what is logged, when and where."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self: Self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set what is pushed to the Hub, and `push_to_hub`."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self: Self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its numbers."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self: Self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float = 0,
    ) -> Self:
        """Set the learning-rate schedule and its length.

        `warmup_ratio`, until 5.0, is a share that counts where `warmup_steps` is 0. 4.x had it before `warmup_steps`.
        """
        if warmup_ratio > 1:
            warmup_steps, warmup_ratio = warmup_ratio, warmup_steps
        return self._set(
            lr_scheduler_type=name,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps or warmup_ratio,
        )

    def set_dataloader(
        self: Self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
