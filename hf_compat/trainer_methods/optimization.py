"""Optimizer, schedule and clipping."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hf_compat.errors import warn_once
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.hf.enums import OptimizerNames, SchedulerType
from hf_compat.interop.deepspeed import whole_size
from hf_compat.interop.transformers_models import global_of_trainer
from hf_compat.optim import optimizers
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule, Schedule, follows_metric, get_scheduler, make_schedule
from hf_compat.optim.optimizers import LayerWiseDummyOptimizer
from hf_compat.optim.plain_optimizers import ClassAndKeywords, keep_embeddings_in_32_bit
from hf_compat.optim.stepping import stepping_of, unprepared
from hf_compat.plan.deepspeed import schedule_section
from hf_compat.runtime.inspection import parameters_of
from hf_compat.runtime.launch import launcher_variables
from hf_compat.trainer_methods.base import StepsBase

# As in torch: `params` and the group's options.
ParameterGroup: TypeAlias = dict[str, Any]


class OptimizationMethods(StepsBase):
    """The overridable methods of optimization, of a Trainer and of native mode."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` unless they are set."""
        self.create_optimizer()
        self.optimizer = unprepared(self.optimizer)
        if self.is_deepspeed_enabled:  # its engine drops empty groups, for which a schedule would still have rates
            self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set `optimizer` unless it is set, with weight decay on all parameters except biases and norms.

        Mirrors:
            `transformers.Trainer.create_optimizer`, 5.23.
        """
        if self.optimizer is None:
            target = self.model if model is None else model
            if self.optimizer_cls_and_kwargs is not None:
                optimizer_class, keywords = self.optimizer_cls_and_kwargs
            else:
                optimizer_class, keywords = self.get_optimizer_cls_and_kwargs(self.args, target)
            keywords = dict(keywords)
            decaying = set(self.get_decay_parameter_names(target))
            groups: list[ParameterGroup] = [
                {"params": [], "weight_decay": self.args.weight_decay},
                {"params": [], "weight_decay": 0.0},
            ]
            for name, parameter in target.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decaying]["params"].append(parameter)
            for name in ("params", "model", "optimizer_dict"):  # a subclass may return its own parameters
                groups = keywords.pop(name, groups)
            self.optimizer = optimizer_class(groups, **keywords)
            keep_embeddings_in_32_bit(target, optimizer_class, keywords)
            stepping_of(self.optimizer).attach()
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler | Schedule | DeepSpeedSchedule:
        """Set `lr_scheduler` unless it is set. DeepSpeed's configuration may ask for one of its own.

        Mirrors:
            `transformers.Trainer.create_scheduler`, 5.23.
        """
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        args, own = self.args, self.optimizer if optimizer is None else optimizer
        self._created_lr_scheduler = True
        section = schedule_section(args, launcher_variables(), num_training_steps)
        if section is not None:
            self.lr_scheduler = DeepSpeedSchedule(section, own)
            return self.lr_scheduler
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        is_layerwise = optimizer is None and isinstance(self.optimizer, LayerWiseDummyOptimizer)
        if is_layerwise and kind != SchedulerType.CONSTANT.value:
            warn_once(
                f"`optim={OptimizerNames(args.optim).value!r}`: each parameter's optimizer keeps "
                f"`learning_rate={args.learning_rate}`. The schedule {kind!r} only sets the logged rate, "
                "as in transformers 5.\n\nHint: set `lr_scheduler_type='constant'`. Or override `create_scheduler` and "
                "return `get_scheduler(…, optimizer=self.optimizer, …)`, which gives each parameter a schedule."
            )
        # as upstream, with an optimizer passed each parameter of a layerwise one gets a schedule
        make = make_schedule if optimizer is None else get_scheduler
        replaced = global_of_trainer("get_scheduler")
        self.lr_scheduler = (replaced if callable(replaced) else make)(
            args.lr_scheduler_type,
            optimizer=own,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # a dict once normalised
        )
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> ClassAndKeywords:
        """Choose the optimizer's class and keywords for `optim` and `optim_args`."""
        return optimizers.get_optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """List the names of the parameters with weight decay."""
        return optimizers.get_decay_parameter_names(model)

    def _get_learning_rate(self) -> float:
        """Read the learning rate of the first parameter group."""
        scheduler = self.lr_scheduler
        if scheduler is None or follows_metric(scheduler):
            rate = self.optimizer.param_groups[0]["lr"]
        else:
            rate = scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip gradients to `max_grad_norm`, and return their norm before clipping."""
        return self.accelerator.clip_grad_norm_(parameters_of(model), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> torch.Tensor | float:
        """Measure the gradients' norm, unless clipping has done so."""
        if grad_norm is None:
            return self.accelerator.clip_grad_norm_(parameters_of(model), float("inf"))
        return grad_norm

    def get_num_trainable_parameters(self) -> int:
        """Count the trainable parameters."""
        return sum(whole_size(parameter) for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """List the learning rate of each parameter group.

        Raises:
            ValueError: There is no optimizer yet.
        """
        return [group["lr"] for group in self._existing_optimizer().param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> ParameterGroup | list[list[nn.Parameter]]:
        """Find the group of a parameter, or list the parameters of all groups."""
        groups = self._existing_optimizer().param_groups
        if param is not None:
            for group in groups:
                if any(param is candidate for candidate in group["params"]):
                    return group
        return [group["params"] for group in groups]

    def _existing_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("Trainer optimizer is None, please make sure you have setup the optimizer before.")
        return self.optimizer
