"""The parts of an update: inputs, loss and backward of its micro-batches, clipping, optimizer and schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hf_compat.checkpoint.tensor_splits import splits_of
from hf_compat.data.collators import raise_for_bad_batch
from hf_compat.data.types import Batch, ModelOutput
from hf_compat.engine.loss_count import Count
from hf_compat.engine.losses import LossFacts, Maker, answer_of, is_trainable, note_answer, refuse, warn_of_mean
from hf_compat.engine.strategies import is_compiled as is_compiled_model
from hf_compat.errors import DataError, OverrideError, warn_once, warn_user
from hf_compat.hf.enums import SchedulerType
from hf_compat.hf.value_types import plain
from hf_compat.interop.deepspeed import is_partitioned, whole_size
from hf_compat.interop.releases import name_of_cache, of_transformers
from hf_compat.interop.transformers_models import global_of_trainer, is_causal_lm
from hf_compat.optim import optimizers
from hf_compat.optim.lr_schedulers import DeepSpeedSchedule, Schedule, follows_metric, get_scheduler, make_schedule
from hf_compat.optim.optimizers import keep_embeddings_in_32_bit
from hf_compat.optim.prepared import unwrap_optimizer
from hf_compat.optim.stepping import LayerWiseDummyOptimizer, behaviour_of
from hf_compat.plan.argument_support import check_optimizer, check_schedule
from hf_compat.plan.deepspeed import decays_all, schedule_section
from hf_compat.runtime.console import SharedLogger
from hf_compat.runtime.devices import empty_device_cache
from hf_compat.runtime.inspection import (
    accepts_keyword,
    accepts_positionally,
    dropping_unknown_keywords,
    is_replaced,
    mentions,
    reads_parameter,
)
from hf_compat.runtime.launch import environment
from hf_compat.runtime.meshes import ParameterGroup, split_by_mesh
from hf_compat.runtime.nested import Nested, find_batch_size, move_to_device, nested_detach
from hf_compat.runtime.text import brief
from hf_compat.trainer_methods.accelerate_facade import AcceleratorFacade
from hf_compat.trainer_methods.base import StepsBase, model_with_forward

logger = SharedLogger(__name__, "transformers.trainer")

# A micro-batch, mostly tensors, by the names of the forward's parameters.
Inputs: TypeAlias = dict[str, Any]
ITEMS = "num_items_in_batch"
_NO_CONTEXT = contextlib.nullcontext()  # reusable and reentrant


class StepMethods(StepsBase):
    """The overridable methods of a training step and of a prediction step, of a Trainer and of native mode."""

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward on one micro-batch.

        Args:
            model: The wrapped model (`model_wrapped`).
            inputs: The micro-batch.
            num_items_in_batch: Number of items in the whole window, which divides the loss.

        Returns:
            The detached loss, scaled for the window.

        Mirrors:
            `transformers.Trainer.training_step`.
        """
        self._asks_for_count = False  # see `judge_count`
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with context():
            self._tree.train(model)
            optimizer_train = getattr(self.optimizer, "train", None)
            if callable(optimizer_train):
                optimizer_train()
            inputs = self._prepare_inputs(inputs)
            compiled = self.accelerator.compiled_update
            with self.compute_loss_context_manager():
                compute_loss = dropping_unknown_keywords(self.compute_loss, ITEMS)
                if compiled is not None:
                    divisor = self._loss_divisor(num_items_in_batch)
                    done = compiled.run(compute_loss, model, inputs, num_items_in_batch, divisor)
                    if done is not None:
                        return done
                loss = compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            if not is_trainable(loss):
                self.check_loss(loss, inputs)
            assert isinstance(loss, torch.Tensor)
            del inputs
            every = self.args.torch_empty_cache_steps
            if every is not None and self.state.global_step % every == 0:
                empty_device_cache()
            divisor = self._loss_divisor(num_items_in_batch)
            if divisor != 1:
                loss = loss / divisor
            self.accelerator.backward(loss)
            return loss.detach()

    def _loss_divisor(self, num_items_in_batch: torch.Tensor | int | None) -> int:
        """The number that a micro-batch's loss is divided by: that of the window, unless the items counted do it."""
        micro_batches = self.current_gradient_accumulation_steps
        return 1 if micro_batches == 1 or self._is_scaled_for_window(num_items_in_batch) else micro_batches

    def watched_count(self, items: torch.Tensor | int | None) -> torch.Tensor | int | None:
        """Watch what the first micro-batch of a run does with the items counted."""
        # another graph would be compiled to find out
        is_compiled = self._compiled_model is not None or is_compiled_model(self.model) or self.is_deepspeed_enabled
        is_compiled |= self.accelerator.compiled_update is not None
        is_watched = type(items) is torch.Tensor and not is_compiled and self._count_factor() > 1
        return Count.of(items) if is_watched else items  # type: ignore[arg-type]  # a tensor

    def judge_count(self, items: torch.Tensor | int | None, loss: torch.Tensor, inputs: Inputs) -> None:
        """Warn if nothing divides the first micro-batch's loss: neither the items counted nor the micro-batches."""
        is_own_step, self._asks_for_count = self._asks_for_count, False  # our step would have noted that it ran
        divides = "training_step" in vars(self) if is_own_step else not self._is_scaled_for_window(items)
        if divides or self._count_factor() <= 1 or mentions(type(self), "accumulation"):
            return
        is_used = bool(items.uses) if isinstance(items, Count) else items is not None and self._reads_count()
        if not is_used:
            self._warn_of_ignored_count(loss, inputs, is_own_step)

    def _reads_count(self) -> bool:
        """Whether the code that computes the loss reads the items counted, or hands them on."""
        if is_replaced(self, "compute_loss", StepMethods):
            return reads_parameter(self.compute_loss, ITEMS)
        if self.compute_loss_func is not None:
            return reads_parameter(self.compute_loss_func, ITEMS)
        return reads_parameter(type(model_with_forward(self)).forward, ITEMS)

    def _count_factor(self) -> int:
        """The number of times that a loss is too large if it is not divided by the items counted."""
        is_exchanged = self.args.average_tokens_across_devices and not is_replaced(self, "compute_loss", StepMethods)
        ranks = self.accelerator.rank_slice.world_size if is_exchanged else 1
        return self.current_gradient_accumulation_steps * ranks

    def _warn_of_ignored_count(self, loss: torch.Tensor, inputs: Inputs, is_own_step: bool) -> None:
        facts, factor = self.facts_of_loss(loss, inputs), self._count_factor()
        who, way_out = facts.who, "set `trainer.loss_is_scaled_for_ga = False`"
        if is_own_step:
            who = f"`training_step` of {type(self).__name__}"
            way_out = "divide each loss by `current_gradient_accumulation_steps`"
        elif facts.maker is Maker.FORWARD:
            way_out = f"set `accepts_loss_kwargs = False` in {type(facts.model).__name__}"
        elif factor != self.current_gradient_accumulation_steps:
            way_out += " and `average_tokens_across_devices=False`"
        self._ignored_count = (
            f"{who} ignores `num_items_in_batch`, by which the losses of an update are divided. Loss and "
            f"gradients are {factor} times too large, as in transformers.",
            f"divide the sum of the losses by it, or {way_out}",
        )
        if self.args.process_index == 0:
            warn_user("{}\n\nHint: {}.".format(*self._ignored_count))

    def check_loss(self, loss: object, inputs: Inputs) -> None:
        """Refuse a loss that is not one number with a gradient. An override of the step may take one of a dimension."""
        facts = self.facts_of_loss(loss, inputs)
        if not (facts.is_one_number and is_replaced(self, "training_step", StepMethods)):
            refuse(facts)

    def facts_of_loss(self, loss: object, inputs: object, with_outputs: bool = False) -> LossFacts:
        """Collect what is known of a loss that `compute_loss` has returned, or for evaluations the outputs, too."""
        model, owner = model_with_forward(self), None
        maker = Maker.FORWARD if self.compute_loss_func is None else Maker.LOSS_FUNCTION
        if is_replaced(self, "compute_loss", StepMethods):
            maker, owner = Maker.COMPUTE_LOSS, getattr(self.compute_loss, "__self__", self)
        elif maker is Maker.FORWARD:
            owner = model
        return LossFacts(
            loss=loss,
            maker=maker,
            owner=owner,
            model=model,
            label_names=self.label_names,
            inputs=inputs,
            with_outputs=with_outputs,
        )

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Inputs
    ) -> tuple[Callable[[], AbstractContextManager[None]], Inputs]:
        """Give a micro-batch an empty context, and its inputs as they are.

        Mirrors:
            `transformers.Trainer._prepare_context_parallel_inputs`.
        """
        return contextlib.nullcontext, inputs

    def _is_scaled_for_window(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        # Overrides written for 4.45 or before lack the parameter
        return (counted or self.compute_loss_func is not None) and (
            accepts_keyword(self.compute_loss, ITEMS) and accepts_positionally(self.training_step, ITEMS, 2)
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Compute the loss of one micro-batch.

        Args:
            model: The model to call.
            inputs: The micro-batch. `labels` are removed if a function other than the model computes the loss.
            return_outputs: Whether to return the model's outputs, too.
            num_items_in_batch: Number of items in the whole window, for models and functions that divide by it.

        Returns:
            The loss, or the loss and the outputs.

        Raises:
            LossError: The model returned no loss.

        Mirrors:
            `transformers.Trainer.compute_loss`.
        """
        if (sequence := self.accelerator.sequence) is not None and self.model.training:
            compute = of_transformers("integrations.deepspeed", "deepspeed_sp_compute_loss", "`sp_size`")
            found: torch.Tensor = compute(self.accelerator, model, inputs, return_outputs, sequence)
            return found
        labels = None
        if (self.label_smoother is not None or self.compute_loss_func is not None) and "labels" in inputs:
            labels = inputs.pop("labels")
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = call_model(model, inputs)
        if self.compute_loss_func is not None:
            if labels is None:
                logger.warning_once("The inputs have no `labels`, so `compute_loss_func` gets `labels=None`.")
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None and self.label_smoother is not None:
            shift = is_causal_lm(self.accelerator.unwrap_model(model))
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=num_items_in_batch)
        else:
            loss = self._loss_of(outputs, inputs)
        divides = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_counted = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if is_counted and divides and (ranks := self.accelerator.rank_slice.world_size) > 1:
            loss = loss * ranks  # it is divided by the items of all ranks, and gradients are averaged over them
        return (loss, outputs) if return_outputs else loss

    def _loss_of(self, outputs: ModelOutput, inputs: Inputs) -> torch.Tensor:
        """Find the loss among a model's outputs: under `loss` in a mapping or object, first in a tuple."""
        loss: torch.Tensor | None
        if type(outputs) is dict or isinstance(outputs, Mapping):  # the first test avoids the slow abstract class
            loss = outputs.get("loss")
        elif isinstance(outputs, torch.Tensor):
            loss = outputs
        elif not isinstance(outputs, (list, tuple)) and getattr(outputs, "loss", None) is not None:
            loss = outputs.loss
        else:
            try:
                loss = outputs[0]
            except (TypeError, IndexError, KeyError):
                loss = None
        if loss is None:
            model = model_with_forward(self)
            facts = LossFacts(
                loss=None,
                maker=Maker.FORWARD,
                owner=model,
                model=model,
                label_names=self.label_names,
                inputs=inputs,
                answer=answer_of(outputs, None),
            )
            refuse(facts)
        note_answer(outputs, loss)
        return loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[None]:
        """Give the loss an empty context, as the model's forward runs under autocast itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[None]:
        """Give an empty context, as upstream has done since Accelerate wraps the forward."""
        return _NO_CONTEXT

    def _prepare_input(self, data: Nested) -> Nested:
        """Move nested tensors to this rank's device. As upstream, an override is called for every part."""
        half = None  # the precision in which DeepSpeed's engine holds the model
        if self.is_deepspeed_enabled:
            dtype = next((parameter.dtype for parameter in self.model.parameters()), torch.float32)
            half = None if dtype == torch.float32 else dtype
        if half is None and not is_replaced(self, "_prepare_input", StepMethods):
            return move_to_device(data, self.args.device)
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(part) for key, part in data.items()})  # type: ignore[call-arg]  # of the batch's own type
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(part) for part in data)
        moved = move_to_device(data, self.args.device)
        if half is not None and isinstance(moved, torch.Tensor) and moved.is_floating_point():
            return moved.to(half)
        return moved

    def _prepare_inputs(self, inputs: Inputs) -> Inputs:
        """Prepare a micro-batch for the model. Refuse an empty one."""
        inputs = self._prepare_input(inputs)
        try:
            is_empty = len(inputs) == 0
        except TypeError:
            raise_for_bad_batch(inputs, "the model")
            raise
        if is_empty:
            raise DataError(
                "The batch received was empty, your model won't be able to train on it: the data set has none of the "
                f"keys that the model accepts ({', '.join(self._signature_columns or [])}).\n\n"
                "Hint: rename its columns, or set `remove_unused_columns=False`."
            )
        return inputs

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        """Read the micro-batches of one window (fewer at the end of the data), and count the items to divide by."""
        batch_samples = list(islice(epoch_iterator, num_batches))
        return batch_samples, self._get_num_items_in_batch(batch_samples, device or self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | int | None:
        """Count the labels that are targets. None if no loss is divided by them."""
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return None
        if not batch_samples or not isinstance(batch_samples[0], Mapping) or "labels" not in batch_samples[0]:
            return None

        try:
            count = sum(self._targets_of(batch).ne(-100).sum() for batch in batch_samples)
        except (TypeError, AttributeError):  # labels that are not one tensor, as in detection
            return None
        if not isinstance(count, torch.Tensor):
            return count
        counted = 1  # how often a batch is counted
        if self.args.average_tokens_across_devices:
            count, counted = self.accelerator.gather(count.to(device)).sum(), self.accelerator.rank_slice.sharing
        return count.to(device) / counted  # a float, also where no batch is shared

    def _targets_of(self, batch: Inputs) -> torch.Tensor:
        """The labels that a micro-batch's loss is computed from, as the model shifts them."""
        if "shift_labels" in batch:
            return batch["shift_labels"]
        return batch["labels"][..., 1:] if self._loss_shifts_labels else batch["labels"]

    def _weight_in_evaluation(self, batch: Inputs) -> torch.Tensor:
        """The number of a batch's target tokens, for `eval_loss_by_token`. Without labels, that of its samples.

        A loss that was divided by the tokens of all ranks, and multiplied by these, gets its share of them.
        """
        items = self._get_num_items_in_batch([batch], self.args.device)
        if isinstance(items, torch.Tensor):
            return items / (self.accelerator.rank_slice.world_size if self.args.average_tokens_across_devices else 1)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            return self._targets_of(batch).ne(-100).sum().to(self.args.device)
        return torch.tensor(find_batch_size(batch) or 0, device=self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Nested | None, Nested | None]:
        """Run the model on one batch without gradients.

        Args:
            model: The model to call.
            inputs: The batch.
            prediction_loss_only: Return the loss only.
            ignore_keys: Outputs to leave out if the model returns a mapping.

        Returns:
            Loss, logits and labels. Each may be None.

        Mirrors:
            `transformers.Trainer.prediction_step`.
        """
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise_for_bad_batch(inputs, "`prediction_step`")
        with_loss = self._has_loss(inputs)
        inputs = self._prepare_inputs(inputs)
        # read now, as compute_loss may remove the labels from the inputs
        labels = [inputs.get(name) for name in self.label_names] if with_loss else []
        loss = None
        with torch.set_grad_enabled(False):  # takes half the time of `no_grad`
            if with_loss:
                if prediction_loss_only and self.args.use_liger_kernel:
                    inputs = {**inputs, "skip_logits": True}  # a keyword of Liger's forward
                items = self._get_num_items_in_batch([inputs], self.args.device)
                context, inputs = self._prepare_context_parallel_inputs(model, inputs)
                with self.compute_loss_context_manager(), context():
                    compute_loss = dropping_unknown_keywords(self.compute_loss, "return_outputs", ITEMS)
                    returned = compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss, outputs = self._checked_pair(returned, inputs)
                if loss.ndim:
                    given = {**inputs, **dict(zip(self.label_names, labels, strict=False))}
                    warn_of_mean(self.facts_of_loss(loss, given))
                    loss = loss.mean()
                loss = loss.detach()
            else:
                with self.compute_loss_context_manager():
                    outputs = call_model(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        named = outputs  # a dict, or the attributes of an object with a `loss`
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            is_plain = isinstance(outputs, (tuple, list, torch.Tensor))
            named = None if is_plain else getattr(outputs, "__dict__", None)
        if named is not None:
            left_out = [*self._ignored_keys(ignore_keys), *(["loss"] if with_loss else [])]
            logits = tuple([value for key, value in named.items() if key not in left_out])  # a generator is slower
        else:
            logits = outputs[1:] if with_loss else outputs
        known = nested_detach(labels[0] if len(labels) == 1 else tuple(labels)) if with_loss else None
        return loss, nested_detach(logits[0] if len(logits) == 1 else logits), known

    def _checked_pair(self, returned: ModelOutput, inputs: Inputs) -> tuple[torch.Tensor, ModelOutput]:
        """Refuse what `compute_loss` has returned unless it is the loss and the outputs."""
        is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        loss, outputs = returned if is_pair else (None, None)
        if not isinstance(loss, torch.Tensor):
            is_number = isinstance(loss, (int, float))
            refuse(self.facts_of_loss(loss if is_number else returned, inputs, with_outputs=not is_number))
        return loss, outputs

    def _has_loss(self, inputs: Inputs) -> bool:
        """Whether the model computes a loss from the inputs."""
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        return_loss = inputs.get("return_loss")
        return bool(self.can_return_loss if return_loss is None else return_loss)

    def _ignored_keys(self, ignore_keys: list[str] | None) -> list[str]:
        """List the outputs that predictions leave out, by default those that the model's configuration names."""
        if ignore_keys is not None:
            return ignore_keys
        if not hasattr(self.model, "config"):
            return []
        return getattr(self.model.config, "keys_to_ignore_at_inference", [name_of_cache()])

    def _track_num_input_tokens(self, inputs: Inputs) -> None:
        """Add a micro-batch's tokens to `state.num_input_tokens_seen` if the arguments ask for it."""
        how = str(self.args.include_num_input_tokens_seen)
        if how == "no":
            return
        name = getattr(self.model, "main_input_name", "input_ids")
        if not isinstance(inputs, Mapping) or name not in inputs:
            among = ", ".join(inputs) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
            logger.warning_once(
                f"`include_num_input_tokens_seen={brief(how)}` counts {brief(name)}, which is not among the inputs "
                f"({among}), so no tokens are counted. Set `main_input_name` on the model."
            )
            return
        pad = getattr(self.processing_class, "pad_token_id", None)
        if how == "non_padding" and "attention_mask" in inputs:
            count = int(inputs["attention_mask"].sum())
        elif how == "non_padding" and pad is not None:
            count = int((inputs[name] != pad).sum())
        else:
            count = int(inputs[name].numel())
            if how == "non_padding":
                logger.warning_once(
                    "Could not determine method to count non-padding tokens: there is no `attention_mask`, and no "
                    "`processing_class` with a `pad_token_id`. All tokens are counted."
                )
        if self.accelerator.num_processes > 1:
            count = int(self.accelerator.reduce(torch.tensor(count, device=self.args.device)))
            count //= self.accelerator.rank_slice.sharing
        self.state.num_input_tokens_seen += count

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Estimate the floating-point operations of forward and backward: 6 per token and parameter.

        Mirrors:
            `transformers.Trainer.floating_point_ops`: 0 for models that cannot count their parameters.

        Differs:
            Parameters that ZeRO 3 has sharded are counted. Upstream finds each of them empty.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        try:
            is_counted = hasattr(self.model, "num_parameters") and name in inputs
        except (TypeError, RuntimeError):  # a batch without names, for an overridden step
            return 0
        if not is_counted:
            return 0
        # Count once for each model. Iterating over all parameters takes as long as a small layer.
        known = self._counted_parameters
        if known is None or known[0] is not self.model:
            splits = splits_of(self.model)
            if splits or is_partitioned(self.model):
                embeddings = [name for name, part in self.model.named_modules() if isinstance(part, nn.Embedding)]
                left_out = {f"{name}.weight" for name in embeddings}
                counted = [pair for pair in self.model.named_parameters() if pair[0] not in left_out]
                size = sum(splits.whole_size(name, whole_size(part)) for name, part in counted)
            else:
                size = int(self.model.num_parameters(exclude_embeddings=True))  # type: ignore[operator]  # transformers'
            known = self._counted_parameters = (self.model, size)
        return 6 * int(inputs[name].numel()) * known[1]

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` unless they are set."""
        made = self.create_optimizer()
        if self.optimizer is None:
            raise OverrideError(
                f"`create_optimizer` of {type(self).__name__} has returned {type(made).__name__}, and has not set "
                "`self.optimizer`.\n\nHint: set it to what is returned."
            )
        self.optimizer = unwrap_optimizer(self.optimizer)
        if self.is_deepspeed_enabled:  # its engine drops empty groups, for which a schedule would still have rates
            self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Set `optimizer` unless it is set, with weight decay on all parameters except biases and norms.

        DeepSpeed's section `optimizer` asks for weight decay on all.

        Mirrors:
            `transformers.Trainer.create_optimizer`.
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
            all_decay = self.is_deepspeed_enabled and decays_all(self.args, environment)
            for name, parameter in target.named_parameters():
                if parameter.requires_grad:
                    groups[not all_decay and name not in decaying]["params"].append(parameter)
            self._optimizer_made_of = target
            for name in ("params", "model", "optimizer_dict"):  # a subclass may return its own parameters
                if name in keywords:
                    groups, self._optimizer_made_of = keywords.pop(name), None
            if self._optimizer_made_of is not None and self.accelerator.rank_slice.sharing > 1:
                groups = split_by_mesh(groups)
            self.optimizer = optimizer_class(groups, **keywords)
            if "bitsandbytes" in str(optimizer_class) and keywords.get("optim_bits") == 8:
                keep_embeddings_in_32_bit(target)
            behaviour_of(self.optimizer).attach()
            self._own_optimizer = self.optimizer
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler | Schedule | DeepSpeedSchedule:
        """Set `lr_scheduler` unless it is set. DeepSpeed's configuration may ask for one of its own.

        Mirrors:
            `transformers.Trainer.create_scheduler`.
        """
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        args, own = self.args, self.optimizer if optimizer is None else optimizer
        self._created_lr_scheduler = True
        asks = self.is_deepspeed_enabled or args.deepspeed or environment.get("ACCELERATE_USE_DEEPSPEED")
        section = schedule_section(args, environment, num_training_steps) if asks else None
        if section is not None:
            self.lr_scheduler = DeepSpeedSchedule(section, own)
            return self.lr_scheduler
        kind = plain(args.lr_scheduler_type)
        is_layerwise = optimizer is None and isinstance(self.optimizer, LayerWiseDummyOptimizer)
        if is_layerwise and kind != SchedulerType.CONSTANT.value:
            warn_once(
                f"`optim={brief(plain(args.optim))}`: each parameter's optimizer keeps "
                f"`learning_rate={args.learning_rate}`. The schedule {brief(kind)} only sets the logged rate, "
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

    get_optimizer_cls_and_kwargs = staticmethod(optimizers.get_optimizer_cls_and_kwargs)

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

    def clips_as_torch(self) -> bool:
        """Whether gradients are clipped as torch does it, and no override comes between them and the backward pass."""
        is_ours = not is_replaced(self.accelerator, "clip_grad_norm_", AcceleratorFacade)
        names = ("training_step", "_clip_grad_norm", "_get_grad_norm")
        return is_ours and not any(is_replaced(self, name, StepMethods) for name in names)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip gradients to `max_grad_norm`, and return their norm before clipping."""
        return self.accelerator.clip_grad_norm_(self._tree.parameters(model), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> torch.Tensor | float:
        """Measure the gradients' norm, unless clipping has done so."""
        if grad_norm is None:
            return self.accelerator.clip_grad_norm_(self._tree.parameters(model), float("inf"))
        return grad_norm

    def get_num_trainable_parameters(self) -> int:
        """Count the trainable parameters."""
        numbers = 0
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                numbers += whole_size(parameter)
        return numbers

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

    def _check_optimization(self) -> None:
        """Refuse options that the arguments' optimizer or schedule does not accept."""

        def overrides(*names: str) -> bool:
            return any(is_replaced(self, name, StepMethods) for name in names)

        if self.optimizer is not None or overrides("create_optimizer", "create_optimizer_and_scheduler"):
            return
        optimizer = None
        if self.optimizer_cls_and_kwargs is None and not overrides("get_optimizer_cls_and_kwargs"):
            optimizer = check_optimizer(self.args, self.model if isinstance(self.model, nn.Module) else None)
        if self.lr_scheduler is None and not overrides("create_scheduler"):
            check_schedule(self.args, optimizer)


def call_model(model: nn.Module, inputs: Inputs) -> ModelOutput:
    """Call a model with a batch's values by name."""
    try:
        return model(**inputs)
    except TypeError as error:
        raise_for_bad_batch(inputs, "the model")
        error.add_note(f"The model was called with {', '.join(inputs)}.")
        raise
