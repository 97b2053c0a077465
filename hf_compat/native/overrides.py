"""What a subclass of `HFModule` overrides: methods of HF's Trainer, Lightning's hooks, and `training_step`.

Methods of HF's Trainer are called where HF calls them, or refused when the class is made. The module's own work in
Lightning's hooks runs even if an override does not call `super()`, because Lightning's own hooks are empty. A
user-defined `training_step` returns a loss for HF's update, or makes updates itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT, LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from hf_compat.callbacks.hf_in_lightning import as_lightning
from hf_compat.data.types import Batch
from hf_compat.engine.internals import attached_trainer
from hf_compat.engine.losses import LossFacts, Maker, hint_of, is_trainable, refuse
from hf_compat.engine.module import is_stepped_by_hf
from hf_compat.engine.strategies import autocast_of
from hf_compat.engine.windows import Items, Window
from hf_compat.errors import ArgumentError, LossError, OverrideError, warn_once, warn_user
from hf_compat.hf.enums import SchedulerType
from hf_compat.interop.patching import tell_of_newer_names
from hf_compat.native.steps import NativeSteps
from hf_compat.optim.lr_schedulers import follows_metric
from hf_compat.optim.stepping import OptimizerBehaviour
from hf_compat.runtime.devices import empty_device_cache
from hf_compat.runtime.inspection import dropping_unknown_keywords, is_replaced
from hf_compat.runtime.nested import nested_detach
from hf_compat.runtime.text import brief
from hf_compat.trainer_methods.base import model_with_forward

Method = Callable[..., object]  # or a hook, or a step
Given = ParamSpec("Given")
Result = TypeVar("Result")

# Hooks that Lightning calls in automatic optimization only, and their replacement in an HFModule.
OF_AUTOMATIC_OPTIMIZATION = {
    "optimizer_step": "change gradients or rates in `on_before_optimizer_step`, or the optimizer in "
    "`configure_optimizers`",
    "optimizer_zero_grad": "use `on_before_zero_grad`",
    "configure_gradient_clipping": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "clip_gradients": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "lr_scheduler_step": "return a schedule with its `interval` and `frequency` from `configure_optimizers`",
}


class OutputError(LossError, MisconfigurationException):
    """A user-defined `training_step` returned something that no update can be made of."""


def refuse_unused_hooks(module: pl.LightningModule, base: type[pl.LightningModule], may_read: bool) -> None:
    """Refuse a subclass's hooks that Lightning calls in automatic optimization only.

    Args:
        module: Of the subclass.
        base: HFModule.
        may_read: Whether its step may take its batches from Lightning's iterator.

    Raises:
        OverrideError: The message names the hook and its replacement.
    """
    for name, hint in OF_AUTOMATIC_OPTIMIZATION.items():
        if is_replaced(module, name, base):
            raise OverrideError(
                f"`{name}` of {type(module).__name__} would never be called, because an HFModule makes its updates "
                f"itself.\n\nHint: {hint}. Or set `automatic_optimization = True`. Then Lightning makes the updates."
            )
    step: Method | None = module.training_step  # Lightning says that None is none
    if step is not None and not may_read and "dataloader_iter" in inspect.signature(step).parameters:
        raise OverrideError(
            f"`training_step` of {type(module).__name__} takes `dataloader_iter`, and an HFModule reads its batches "
            "itself.\n\nHint: take `batch, batch_idx`; or set `automatic_optimization = True`. A step that makes "
            "its own updates (`automatic_optimization = False`) may read a DataLoader so."
        )


def trained_names(module: pl.LightningModule, frozen: bool = False) -> dict[str, nn.Parameter]:
    """The trained parameters by name, and on request the frozen ones, without those of metrics."""
    metrics = [part for name, part in module.named_modules() if isinstance(part, Metric) or name == "compute_metrics"]
    of_metrics = {id(parameter) for metric in metrics for parameter in metric.parameters()}
    named = module.named_parameters()
    return {name: p for name, p in named if (p.requires_grad or frozen) and id(p) not in of_metrics}


def parameters_outside_model(module: pl.LightningModule, model: nn.Module, frozen: bool = False) -> list[str]:
    """The names of trained parameters outside the model, and on request of frozen ones."""
    inside = {id(parameter) for parameter in model.parameters()}
    return [name for name, parameter in trained_names(module, frozen).items() if id(parameter) not in inside]


def tell_of_untrained(module: pl.LightningModule, names: Sequence[str]) -> None:
    """Warn once of parameters outside the model that have no gradient in the current update."""
    parameters = trained_names(module)
    without = [name for name in names if name in parameters and parameters[name].grad is None]
    if without:
        warn_once(
            f"{type(module).__name__} has parameters beside `model` that its loss does not depend on: "
            f"{_shown(without)}. They stay as they are.\n\n"
            "Hint: call them in `forward`, `compute_loss` or `training_step`, or freeze them (`requires_grad_(False)`)."
        )


def refuse_late(module: pl.LightningModule, optimized: frozenset[int]) -> None:
    """Refuse parameters that were added after the optimizer was made for those with the ids `optimized`.

    Raises:
        OverrideError: The message names the parameters.
    """
    groups = (group for optimizer in module.trainer.optimizers for group in optimizer.param_groups)
    known = optimized | {id(parameter) for group in groups for parameter in group["params"]}
    late = [name for name, parameter in trained_names(module).items() if id(parameter) not in known]
    if late:
        raise OverrideError(
            f"Parameters of {type(module).__name__} were added or unfrozen after its optimizer was made, which does "
            f"not hold them: {_shown(late)}.\n\n"
            "Hint: add and unfreeze them in `__init__`, `setup` or `configure_model`, or add a group to the optimizer."
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")


# Methods that HF's Trainer calls itself, by their replacement in a Lightning trainer.
_REFUSED: dict[str, tuple[str, ...]] = {
    "override `configure_optimizers`, which returns the optimizer and its schedule": ("_get_learning_rate",),
    "override `train_dataloader`, `val_dataloader` or `test_dataloader` of HFDataModule": (
        "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_dataloader", "_get_train_sampler",
        "_get_eval_sampler", "_get_collator_with_removed_columns", "_remove_unused_columns",
        "_set_signature_columns_if_needed", "num_examples", "get_batch_samples", "_get_num_items_in_batch",
        "get_total_train_batch_size", "set_initial_training_values", "_update_auto_batch_size",
    ),
    "override `validation_step` and `on_validation_epoch_end`, or give `compute_metrics=…`": (
        "evaluate", "_evaluate", "evaluation_loop", "prediction_loop", "_determine_best_metric",
    ),
    "override `on_save_checkpoint` or `on_load_checkpoint`, or give a ModelCheckpoint to lightning.Trainer": (
        "save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler",
        "_load_best_model", "_load_callback_state", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
        "_load_rng_state", "_load_scaler", "_push_from_checkpoint", "_finish_current_push", "init_hf_repo",
        "_tune_save_checkpoint", "_issue_warnings_after_load",
    ),
    "set `max_grad_norm`, or change gradients in `on_before_optimizer_step`": (
        "_clip_grad_norm", "_get_grad_norm", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm",
    ),
    "override `training_step`, or one of Lightning's hooks": (
        "_inner_training_loop", "_run_epoch", "_prepare_for_training", "_init_training_state", "_finalize_training",
        "_maybe_log_save_evaluate", "_track_num_input_tokens", "_defer_fsdp_gradient_reduction",
        "_sync_replicated_trainable_parameters", "_prepare_context_parallel_inputs", "floating_point_ops",
        "store_flos", "autocast_smart_context_manager", "_prepare_input",
    ),
    "make the model before the module, and leave processes, devices and folders to lightning.Trainer": (
        "call_model_init", "create_accelerator_and_postprocess", "_build_accelerator_args", "_move_model_to_device",
        "_wrap_model", "_validate_args", "_get_output_dir", "_hp_search_setup", "_report_to_hp_search", "get_cp_size",
        "get_sp_size", "get_tp_size",
    ),
}  # fmt: skip
# Methods that only users of HF's Trainer call. A module may have its own.
_OF_USERS = (
    "add_callback", "create_model_card", "end", "hyperparameter_search", "is_local_process_zero",
    "is_world_process_zero", "log_metrics", "metrics_format", "pop_callback", "predict", "push_to_hub",
    "remove_callback", "save_metrics", "save_state",
)  # fmt: skip
REFUSED = {name: hint for hint, names in _REFUSED.items() for name in names}
# The methods that a subclass may override, and how HF calls them: the number of values by position, and the keywords.
_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "compute_loss": (3, ("return_outputs",)),
    "prediction_step": (4, ("ignore_keys",)),
    "compute_loss_context_manager": (1, ()),
    "get_decay_parameter_names": (2, ()),
    "_prepare_inputs": (2, ()),
    "create_optimizer": (1, ()),
    "create_scheduler": (1, ("num_training_steps",)),
    "create_optimizer_and_scheduler": (2, ()),
    "get_optimizer_cls_and_kwargs": (2, ()),
}
# The attributes that HF's methods set on the Trainer.
_MADE_BY = {
    "create_optimizer": ("optimizer",),
    "create_scheduler": ("lr_scheduler",),
    "create_optimizer_and_scheduler": ("optimizer", "lr_scheduler"),
}
HONOURED = tuple(_CALLS)


def _of_steps(
    method: Callable[Concatenate[NativeSteps, Given], Result],
) -> Callable[Concatenate[OverridePoints, Given], Result]:
    """Make a module's method that calls the given method with the module's steps."""

    def call(self: OverridePoints, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return method(cast(NativeSteps, self.steps), *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class OverridePoints(pl.LightningModule):
    """The methods of HF's steps that a subclass may override, by HF's names and signatures."""

    compute_loss = _of_steps(NativeSteps.compute_loss)
    compute_loss_context_manager = _of_steps(NativeSteps.compute_loss_context_manager)
    prediction_step = _of_steps(NativeSteps.prediction_step)  # type: ignore[arg-type]  # its `**gen_kwargs`
    get_decay_parameter_names = _of_steps(NativeSteps.get_decay_parameter_names)
    _prepare_inputs = _of_steps(NativeSteps._prepare_inputs)
    create_scheduler = _of_steps(NativeSteps.create_scheduler)
    create_optimizer_and_scheduler = _of_steps(NativeSteps.create_optimizer_and_scheduler)
    get_optimizer_cls_and_kwargs = staticmethod(NativeSteps.get_optimizer_cls_and_kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer for all trained parameters.

        Mirrors:
            `transformers.Trainer.create_optimizer`.
        """
        steps = cast(NativeSteps, self.steps)
        if model is None and parameters_outside_model(self, steps.model):
            model = self
        return NativeSteps.create_optimizer(steps, model)


def call_overrides(module: OverridePoints, steps: NativeSteps) -> None:
    """Make the steps call the methods that a module, or its class, overrides."""
    attributes = vars(steps)
    for name in HONOURED:
        method = getattr(module, name)
        attributes.pop(name, None)
        if is_replaced(module, name, OverridePoints):
            made = _MADE_BY.get(name)
            attributes[name] = functools.partial(_make, module, steps, method, made) if made else method


def _make(
    module: OverridePoints, steps: NativeSteps, method: Method, names: Sequence[str], *args: object, **kwargs: object
) -> object:
    """Call a module's method that makes an optimizer or a schedule, and give the steps the result."""
    returned = method(*args, **kwargs)
    for name in names:
        set_here = module.__dict__.pop(name, None)  # HF's methods leave it on `self`
        made = returned if set_here is None and len(names) == 1 else set_here
        if made is not None:
            setattr(steps, name, made)
    return returned


def refuse_unheard_methods(kind: type[pl.LightningModule | pl.LightningDataModule], honoured: bool = True) -> None:
    """Refuse a class with a method of HF's Trainer that is never called, or not with this signature.

    Args:
        kind: A subclass of HFModule or HFDataModule.
        honoured: Whether the methods in `HONOURED` are called on it.

    Raises:
        OverrideError: The message names the method and the way out.
    """
    refused = REFUSED if honoured else {**REFUSED, **dict.fromkeys(_CALLS, "override it in the HFModule")}
    for name, hint in refused.items():
        if hasattr(kind, name):
            raise OverrideError(
                f"`{name}` of {kind.__name__} is a method of HF's Trainer, and a Lightning trainer would never call "
                f"it.\n\nHint: {hint}. A method of your own needs another name."
            )
    of_lightning = dir(pl.LightningModule if honoured else pl.LightningDataModule)
    tell_of_newer_names(kind, NativeSteps, "Trainer", [*refused, *_OF_USERS, *of_lightning])
    for name, (count, keywords) in _CALLS.items() if honoured else ():
        method, form = inspect.getattr_static(kind, name), vars(OverridePoints)[name]
        if not inspect.isfunction(method) or method is form:
            continue
        try:
            inspect.signature(method).bind(*range(count), **dict.fromkeys(keywords))
        except TypeError as error:
            raise OverrideError(
                f"`{name}{inspect.signature(method)}` of {kind.__name__} cannot be called as HF calls it: {error}.\n\n"
                f"Hint: take `{inspect.signature(form)}`. A method of your own needs another name."
            ) from error
    for name, first, instead in (("training_step", "model", "(batch, batch_idx)"), ("log", "logs", "(name, value)")):
        method = getattr(kind, name) if honoured else None  # a step that is None is Lightning's to refuse
        given = [] if method is None else list(inspect.signature(method).parameters)
        if given[1:2] == [first]:
            raise OverrideError(
                f"`{name}({', '.join(given[1:])})` of {kind.__name__} has the signature of HF's Trainer, and Lightning "
                f"calls it as `{name}{instead}`.\n\n"
                "Hint: override `compute_loss` for another loss, and `on_train_batch_end` to log."
            )


KEPT = (
    "configure_callbacks", "setup", "teardown", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_epoch_end",
    "on_test_epoch_end", "on_save_checkpoint", "on_load_checkpoint", "on_validation_model_eval",
    "on_test_model_eval", "on_predict_model_eval",
)  # fmt: skip
# In Fabric (`fabric.call(name)`) and in a loop by hand the other ones have nothing to do.
WITHOUT_A_TRAINER = frozenset({"configure_callbacks", "on_save_checkpoint", "on_load_checkpoint"})


_KEPT: WeakSet[Callable[..., object]] = WeakSet()  # forms of hooks that `keep_hooks` has made


def keep_hooks(kind: type[pl.LightningModule], base: type[pl.LightningModule] | None = None) -> None:
    """Run the base's hook after each hook of a subclass, or of a mixin beside the base, that has not called it.

    Without a base, the hooks are the base's own, and note that they run.
    """
    for name in KEPT:
        owner, hook = next((one, vars(one)[name]) for one in kind.__mro__ if name in vars(one))
        if base is None and inspect.isfunction(own := getattr(kind, name)):
            setattr(kind, name, _kept(name, own, None))
        elif base is not None and not issubclass(base, owner) and not (inspect.isfunction(hook) and hook in _KEPT):
            setattr(kind, name, _kept(name, hook, getattr(base, name)))


def keep_put_hooks(module: pl.LightningModule, base: type[pl.LightningModule]) -> None:
    """Also keep hooks that were put into a module, or into its class after it was made."""
    keep_hooks(type(module), base)
    attributes = vars(module)
    put: dict[str, tuple[Method, Method]] = attributes.setdefault("_hooks_put", {})
    for name in KEPT:
        hook = attributes.get(name)
        if hook is not None and (name not in put or put[name][1] is not hook):
            form = functools.partial(_kept(name, staticmethod(hook), getattr(base, name)), module)
            put[name] = hook, form
            attributes[name] = form


def leave_put_hooks(attributes: dict[str, object], all_of_them: bool = True) -> None:
    """Restore the hooks of `keep_put_hooks` in a module's attributes, or all that need no trainer stay."""
    put = cast(dict[str, tuple[Method, Method]], attributes.get("_hooks_put", {}))
    for name in [name for name in put if all_of_them or name not in WITHOUT_A_TRAINER]:
        hook, form = put.pop(name)
        if attributes.get(name) is form:
            attributes[name] = hook


def _kept(name: str, hook: object, of_base: Method | None) -> Method:
    """Make the form of a hook, as its class or a module holds it, that runs the base's, too."""

    @functools.wraps(cast(Method, hook))
    def run(self: pl.LightningModule, *args: object, **kwargs: object) -> object:
        bind = getattr(hook, "__get__", None)  # a mock has none
        own: Method = cast(Method, hook) if bind is None else bind(self, type(self))
        hooks_run: set[str] = self.__dict__.setdefault("_hooks_run", set())
        if of_base is None:
            hooks_run.add(name)
            is_needed = name in WITHOUT_A_TRAINER or attached_trainer(self) is not None
            return own(*args, **kwargs) if is_needed else None
        hooks_run.discard(name)
        result = own(*args, **kwargs)
        if name == "configure_callbacks":
            chosen = result or []  # Lightning takes None for none
            result = [as_lightning(one) for one in (chosen if isinstance(chosen, Sequence) else [chosen])]
        if name not in hooks_run:
            of_base(self, *args, **kwargs)
        return result

    _KEPT.add(run)
    return run


def serve_own_step(module: pl.LightningModule, stepping: OptimizerBehaviour) -> None:
    """Prepare a module with a user-defined `training_step` for its optimizers, as HF's steps do themselves.

    Raises:
        ArgumentError: Lightning is to accumulate or clip gradients, and the optimizer leaves none.
    """
    unset = {"accumulate_grad_batches": (1, 0), "gradient_clip_val": (None, 0)}
    for name, values in unset.items() if stepping.steps_in_backward and module.automatic_optimization else ():
        value = getattr(module.trainer, name)
        if value not in values:
            raise ArgumentError(
                f"`{name}={brief(value)}` of lightning.Trainer needs gradients, and this optimizer updates each "
                "parameter in the backward pass.\n\nHint: leave it out, or choose another optimizer."
            )
    if stepping.switches:
        own = module.on_train_batch_start

        def on_train_batch_start(batch: Batch, batch_idx: int) -> int | None:
            stepping.to_training()
            return own(batch, batch_idx)

        replace_hook(module, "on_train_batch_start", on_train_batch_start)


def replace_hook(module: pl.LightningModule, name: str, hook: Method) -> None:
    """Put a fit's form of a hook into a module itself, until `leave_own_step`. The author may have done so, too."""
    attributes = vars(module)
    before: dict[str, Method | None] = attributes.setdefault("_hooks_before", {})
    before[name] = attributes.get(name)
    attributes[name] = hook


def leave_own_step(attributes: dict[str, object]) -> None:
    """Restore the attributes of a module, or a copy of them, in which a fit has put its form of the step."""
    before = cast(dict[str, Method | None], attributes.pop("_hooks_before", {}))
    for name, hook in before.items():
        attributes.pop(name, None)
        if hook is not None:
            attributes[name] = hook
    own = attributes.pop("_own_step", None)
    if isinstance(own, (AuthorStep, GuardedStep)):
        attributes.pop("training_step", None)
        if own.before is not None:
            attributes["training_step"] = own.before


class AuthorStep:
    """A `training_step` that returns a loss. HF's update calls it for each micro-batch and trains with its loss.

    It replaces HF's own `training_step(model, inputs, num_items_in_batch)`.

    Attributes:
        runs: Whether the step is running.
        gave_loss: Whether it has returned a loss for the update under way.
        batch: Its last micro-batch.
        output: The mapping that it returned last, detached.
        logged: Names of the values that it has logged.
    """

    def __init__(self, module: pl.LightningModule, steps: NativeSteps) -> None:
        self.module, self.steps = module, steps
        self.before = module.__dict__.get("training_step")  # the author may have put it there
        self.step: Method = module.training_step
        self.takes_index = is_param_in_hook_signature(self.step, "batch_idx", min_args=2)
        self.runs = self.gave_loss = self._told_of_none = False
        self.batch_idx = 0
        self.batch: Batch = None
        self.output: Mapping[str, object] | None = None
        self.logged: set[str] = set()
        self._items: Items = None
        self._losses_of_hf: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, model: nn.Module, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Run the step on a micro-batch, then the backward pass of its loss.

        Raises:
            OverrideError: The step has made an update itself.
            OutputError: The step returned something else than Lightning takes.
            LossError: The loss has no gradient.
        """
        steps, updates = self.steps, self.module.trainer.global_step
        self._items, self._losses_of_hf = num_items_in_batch, {}
        batch = self.batch = steps._prepare_input(inputs)
        self.runs = True
        try:
            with autocast_of(self.module.trainer.precision_plugin, steps.args.device.type):
                result = self.step(batch, self.batch_idx) if self.takes_index else self.step(batch)
        finally:
            self.runs = False
        self.batch_idx += 1
        every = steps.args.torch_empty_cache_steps
        if every is not None and steps.state.global_step % every == 0:
            empty_device_cache()
        if self.module.trainer.global_step != updates:
            raise makes_updates(self.module, "stepped an optimizer")
        loss = self._loss_of(result)
        self.output = nested_detach(dict(result)) if isinstance(result, Mapping) else None
        if loss is None:
            return torch.zeros((), device=steps.args.device)  # as in Lightning, such a batch trains nothing
        self.gave_loss = True
        if not is_trainable(loss):
            facts = self._facts(loss)
            if not facts.is_one_number:
                refuse(facts)
        size = steps.current_gradient_accumulation_steps
        if size != 1:
            own, is_scaled = self._losses_of_hf.get(id(loss), (None, loss))
            # HF's own loss stays as it is, to the last bit
            is_of_hf = own is loss and steps._is_scaled_for_window(num_items_in_batch)
            loss = is_scaled if is_of_hf else loss / size
        self._losses_of_hf = {}
        steps.accelerator.backward(loss)
        return loss.detach()

    def _loss_of(self, output: object) -> torch.Tensor | None:
        """Judge what the step returned, as Lightning does where it makes the updates."""
        kind = type(self.module).__name__
        if output is None:
            if not self._told_of_none:
                warn_user(
                    f"{kind}'s `training_step` returned `None`, and such a batch trains nothing.\n\n"
                    "Hint: return the loss. If None is on purpose, ignore this warning."
                )
            self._told_of_none = True
            return None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor):
            return loss
        names = f" with {brief(list(output), 80)}" if isinstance(output, Mapping) else ""
        hint = "return the loss, or `{'loss': loss, …}`. None leaves a batch out"
        raise OutputError(  # in words that a test of Lightning's own error looks for
            f"`training_step` of {kind} returned a {type(output).__name__}{names}. It must return a Tensor, a dict, or "
            "None, and in a dict the 'loss' key needs to be present, with a Tensor.\n\n"
            f"Hint: {hint if loss is None else hint_of(self._facts(loss))}."
        )

    def _facts(self, loss: object) -> LossFacts:
        return LossFacts(
            loss=loss, maker=Maker.STEP, owner=self.module, model=model_with_forward(self.steps),
            label_names=self.steps.label_names, inputs=self.batch,
        )  # fmt: skip

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """The output of an update for callbacks: the step's mapping with the update's loss, or the loss."""
        return loss if self.output is None else {**self.output, "loss": loss}

    def loss_of_hf(self, batch: Batch) -> torch.Tensor:
        """Compute HF's loss of a micro-batch, for a step that calls `super().training_step(…)`.

        A loss that is divided by the items of the whole window is scaled to a mean over micro-batches, as any other
        loss is. Terms that the step adds then have the same weight.
        """
        with torch.autocast(self.steps.args.device.type, enabled=False):  # as HF, around the model's forward only
            loss = loss_of_micro_batch(self.steps, batch, self._items)
        size = self.steps.current_gradient_accumulation_steps
        shown = loss * size if size != 1 and self.steps._is_scaled_for_window(self._items) else loss
        self._losses_of_hf[id(shown)] = shown, loss
        return shown


def loss_of_micro_batch(steps: NativeSteps, batch: Batch, num_items: Items = None) -> torch.Tensor:
    """Compute HF's loss of a micro-batch, with its graph."""
    inputs = steps._prepare_inputs(batch)
    with steps.compute_loss_context_manager():
        compute_loss = dropping_unknown_keywords(steps.compute_loss, "num_items_in_batch")
        loss = compute_loss(steps.model_wrapped, inputs, num_items_in_batch=num_items)
    if not isinstance(loss, torch.Tensor):
        refuse(steps.facts_of_loss(loss, inputs))
    return loss


def loss_of_batch(steps: NativeSteps, batch: Batch | Window, is_final: bool = False) -> torch.Tensor:
    """Compute HF's loss of a batch or a window, with its graph. A window's is the loss of its update.

    A window's losses have to be numbers, as their sum would hide all else. So has one that is `final`: a caller who
    gets another one may take its mean.
    """
    micro_batches, items = (batch, batch.num_items) if isinstance(batch, Window) else ([batch], None)
    losses = []
    for inputs in micro_batches:
        loss = loss_of_micro_batch(steps, inputs, items)
        if (is_final or isinstance(batch, Window)) and torch.is_grad_enabled() and not is_trainable(loss):
            steps.check_loss(loss, inputs)
        losses.append(loss)
    if not isinstance(batch, Window):
        return losses[0]
    total = torch.stack(losses).sum()
    return total if steps._is_scaled_for_window(batch.num_items) else total / len(losses)


def makes_updates(module: pl.LightningModule, what: str) -> OverrideError:
    """Make the error for a step that makes updates without `automatic_optimization = False`."""
    return OverrideError(
        f"`training_step` of {type(module).__name__} {what}, and an update is made of the loss that it returns.\n\n"
        "Hint: set `self.automatic_optimization = False` after `super().__init__(…)` to make the updates in "
        "`training_step`. Or return the loss only, and HFModule makes them."
    )


class GuardedStep:
    """A user-defined `training_step`, checked for losses that train nothing and for a schedule that it never steps.

    Attributes:
        made_update: Whether the running step has called HFModule's.
        loss_of_update: The loss that HFModule's step returned.
    """

    def __init__(self, module: pl.LightningModule, steps: NativeSteps) -> None:
        self.module, self.steps = module, steps
        self.before = module.__dict__.get("training_step")
        self.step: Method = module.training_step
        self.made_update = self.has_run = False
        self.loss_of_update: torch.Tensor | None = None
        self._unstepped: list[tuple[LRSchedulerConfig, int]] | None = None  # and their counts, from the first update on
        self._calls = self._first_epoch = 0  # since then
        functools.update_wrapper(self, self.step)

    def update_made(self, loss: torch.Tensor | None) -> STEP_OUTPUT:
        """Note that the running step has called HFModule's, which made an update."""
        self.made_update, self.loss_of_update = True, loss
        return loss

    def __call__(self, batch: Batch | Window, *args: object, **kwargs: object) -> object:
        """Run the step.

        Raises:
            OverrideError: The step returned a loss that trains nothing, or reads a window as one batch.
        """
        self._tell_of_schedules()
        self.made_update, self.loss_of_update, updates = False, None, self.module.trainer.global_step
        schedules = [] if self._unstepped is not None else self._counted()
        is_first = not self.has_run
        passes: list[object] = []  # the gradients that reach a parameter
        if isinstance(batch, Window):
            batch.poses_as_batch = False
        try:
            with ExitStack() as stack:
                for parameter in self.module.parameters() if is_first else ():
                    if parameter.requires_grad:
                        hook = parameter.register_hook(lambda _: passes.append(True))  # type: ignore[no-untyped-call]
                        stack.enter_context(hook)
                result = self.step(batch, *args, **kwargs)
        finally:
            if isinstance(batch, Window):
                batch.poses_as_batch = True
        self._check(result, bool(passes))
        made_its_own = self.module.trainer.global_step > updates and not self.made_update
        if self._unstepped is None and (made_its_own or self.made_update):
            # HF's update leaves the author's schedules alone, and an update of the author's HF's
            self._unstepped = [(one, count) for one, count in schedules if self._is_of_hf(one) != self.made_update]
            self._first_epoch = self.module.trainer.current_epoch
        self._calls += self._unstepped is not None
        accumulated = self.steps.args.gradient_accumulation_steps
        if is_first and made_its_own and not isinstance(batch, Window) and accumulated > 1:
            raise OverrideError(
                f"`training_step` of {type(self.module).__name__} made an update of one batch, and "
                f"`gradient_accumulation_steps={accumulated}` of the arguments sets {accumulated}, which "
                "the schedule depends on.\n\nHint: leave the argument out, or take the data from an HFDataModule. "
                "Its batches are the micro-batches of an update."
            )
        self.has_run = True
        return result

    def _is_of_hf(self, config: LRSchedulerConfig) -> bool:
        return is_stepped_by_hf(config, self.steps.lr_scheduler)

    def _counted(self) -> list[tuple[LRSchedulerConfig, int]]:
        """The schedules that change rates by themselves, and how often each was stepped."""
        is_constant = self.steps.args.lr_scheduler_type == SchedulerType.CONSTANT
        return [
            (config, config.scheduler.last_epoch)
            for config in self.module.trainer.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler)
            and not follows_metric(config.scheduler)
            and not (is_constant and self._is_of_hf(config))
        ]

    def _tell_of_schedules(self) -> None:
        """Warn of each schedule that was to be stepped by now, and that nothing has stepped."""
        waiting, left = self._unstepped or [], []
        for config, count in waiting:
            epochs = self.module.trainer.current_epoch - self._first_epoch
            is_stepped = config.scheduler.last_epoch != count
            is_due = (self._calls if config.interval == "step" else epochs) >= config.frequency
            if not is_stepped and not is_due:
                left.append((config, count))
            elif not is_stepped:
                self._tell_of(config)
        if waiting:
            self._unstepped = left

    def _tell_of(self, config: LRSchedulerConfig) -> None:
        norm, is_of_hf = self.steps.args.max_grad_norm, self._is_of_hf(config)
        hint = "call `self.lr_schedulers().step()` after each step of the optimizer."
        if not is_of_hf:
            hint += " Or leave `automatic_optimization = False` out, and its `interval` and `frequency` count."
        elif norm:
            hint += f" `max_grad_norm={norm}` is left to the step, too: `self.clip_gradients(…)`."
        warn_user(
            f"`training_step` of {type(self.module).__name__} {'made' if is_of_hf else 'lets HFModule make'} an update "
            f"(`automatic_optimization = False`), and nothing has stepped {type(config.scheduler).__name__}: the "
            f"learning rate stays {config.scheduler.optimizer.param_groups[0]['lr']:g}.\n\nHint: {hint}"
        )

    def _check(self, result: object, ran_backward: bool) -> None:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor):
            return
        kind = type(self.module).__name__
        made = loss if self.loss_of_update is None else self.loss_of_update
        is_changed = loss is not made
        if is_changed and loss.shape == made.shape and not loss.requires_grad:
            is_changed = not torch.allclose(loss.to(made), made, 0, 0, equal_nan=True)
        if is_changed:
            raise OverrideError(
                f"`training_step` of {kind} changes the loss that `super().training_step()` returned. The update has "
                "been made by then, so the change would train nothing.\n\n"
                "Hint: override `compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None)`; return "
                "the loss as it is, and log other values by `self.log`."
            )
        if loss.requires_grad and not (self.made_update or self.has_run or ran_backward):
            raise OverrideError(
                f"`training_step` of {kind} returned a loss, and made no backward pass: nothing would be trained.\n\n"
                "Hint: set `self.automatic_optimization = True` after `super().__init__(…)`, and Lightning trains with "
                "the loss. Or call `self.manual_backward(loss)` and step `self.optimizers()`. Or override "
                "`compute_loss` instead of `training_step`."
            )
