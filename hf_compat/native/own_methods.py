"""Methods and hooks that a subclass of `HFModule` overrides.

Methods of HF's Trainer are called where HF calls them, or refused when the class is made. The module's own work in
Lightning's hooks runs even if an override does not call `super()`, because Lightning's own hooks are empty.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar, cast

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from hf_compat.callbacks.hf_in_lightning import as_lightning
from hf_compat.errors import OverrideError, warn_once
from hf_compat.native.steps import NativeSteps
from hf_compat.runtime.inspection import is_replaced

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Hooks that Lightning calls in automatic optimization only, and their replacement in an HFModule.
_OF_AUTOMATIC_OPTIMIZATION = {
    "optimizer_step": "change gradients or rates in `on_before_optimizer_step`, or the optimizer in "
    "`configure_optimizers`",
    "optimizer_zero_grad": "use `on_before_zero_grad`",
    "configure_gradient_clipping": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "clip_gradients": "set `max_grad_norm` in the arguments, or clip in `on_before_optimizer_step`",
    "lr_scheduler_step": "return a schedule with its `interval` and `frequency` from `configure_optimizers`",
}


def overrides_automatic_hooks(module: pl.LightningModule, base: type[pl.LightningModule]) -> bool:
    """Whether a subclass has hooks of its own that Lightning calls in automatic optimization only."""
    return any(is_replaced(module, name, base) for name in _OF_AUTOMATIC_OPTIMIZATION)


def refuse_unused_hooks(module: pl.LightningModule, base: type[pl.LightningModule]) -> None:
    """Refuse a subclass's hooks that Lightning calls in automatic optimization only.

    Raises:
        OverrideError: The message names the hook and its replacement.
    """
    for name, hint in _OF_AUTOMATIC_OPTIMIZATION.items():
        if is_replaced(module, name, base):
            raise OverrideError(
                f"`{name}` of {type(module).__name__} would never be called, because an HFModule makes its updates "
                f"itself.\n\nHint: {hint}. Or set `automatic_optimization = True`. Then Lightning makes the updates."
            )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise OverrideError(
            f"`training_step` of {type(module).__name__} takes `dataloader_iter`, and an HFModule reads its batches "
            "itself.\n\nHint: take `batch, batch_idx`; or set `automatic_optimization = True`."
        )


def trained_names(module: pl.LightningModule) -> dict[str, nn.Parameter]:
    """The trained parameters by name, without those of metrics."""
    metrics = [part for name, part in module.named_modules() if isinstance(part, Metric) or name == "compute_metrics"]
    of_metrics = {id(parameter) for metric in metrics for parameter in metric.parameters()}
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) not in of_metrics}


def names_beside(module: pl.LightningModule, model: nn.Module) -> list[str]:
    """The names of trained parameters outside the model."""
    inside = {id(parameter) for parameter in model.parameters()}
    return [name for name, parameter in trained_names(module).items() if id(parameter) not in inside]


def tell_of_untrained(module: pl.LightningModule, names: Sequence[str]) -> None:
    """Warn once of parameters outside the model that have no gradient in the current update."""
    parameters = dict(module.named_parameters())
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


Method = Callable[..., object]

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
REFUSED = {name: hint for hint, names in _REFUSED.items() for name in names}
# The methods that a subclass may override, and how HF calls them.
_CALLS: dict[str, Callable[[inspect.Signature], inspect.BoundArguments]] = {
    "compute_loss": lambda signature: signature.bind(None, "model", "inputs", return_outputs=True),
    "prediction_step": lambda signature: signature.bind(None, "model", "inputs", False, ignore_keys=None),
    "compute_loss_context_manager": lambda signature: signature.bind(None),
    "get_decay_parameter_names": lambda signature: signature.bind(None, "model"),
    "_prepare_inputs": lambda signature: signature.bind(None, "inputs"),
    "create_optimizer": lambda signature: signature.bind(None),
    "create_scheduler": lambda signature: signature.bind(None, num_training_steps=1),
    "create_optimizer_and_scheduler": lambda signature: signature.bind(None, 1),
    "get_optimizer_cls_and_kwargs": lambda signature: signature.bind("args", "model"),
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
            `transformers.Trainer.create_optimizer`, 5.23.
        """
        steps = cast(NativeSteps, self.steps)
        if model is None and names_beside(self, steps.model):
            model = self
        return NativeSteps.create_optimizer(steps, model)


def call_overrides(module: OverridePoints, steps: NativeSteps) -> None:
    """Make the steps call the methods that a module, or its class, overrides."""
    for name in HONOURED:
        method = getattr(module, name)
        vars(steps).pop(name, None)
        if is_replaced(module, name, OverridePoints):
            made = _MADE_BY.get(name)
            vars(steps)[name] = functools.partial(_make, module, steps, method, made) if made else method


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
    for name, hint in REFUSED.items():
        if hasattr(kind, name):
            raise _unheard(kind, name, hint)
    for name, call in _CALLS.items():
        if not honoured and hasattr(kind, name):
            raise _unheard(kind, name, "override it in the HFModule")
        if honoured:
            _check_form(kind, name, call)
    for name, first, instead in (("training_step", "model", "(batch, batch_idx)"), ("log", "logs", "(name, value)")):
        given = list(inspect.signature(getattr(kind, name)).parameters) if honoured else []
        if given[1:2] == [first]:
            raise OverrideError(
                f"`{name}({', '.join(given[1:])})` of {kind.__name__} has the signature of HF's Trainer, and Lightning "
                f"calls it as `{name}{instead}`.\n\n"
                "Hint: override `compute_loss` for another loss, and `on_train_batch_end` to log."
            )


def _unheard(kind: type, name: str, hint: str) -> OverrideError:
    return OverrideError(
        f"`{name}` of {kind.__name__} is a method of HF's Trainer, and a Lightning trainer would never call it.\n\n"
        f"Hint: {hint}. A method of your own needs another name."
    )


def _check_form(kind: type, name: str, call: Callable[[inspect.Signature], inspect.BoundArguments]) -> None:
    method = inspect.getattr_static(kind, name)
    if not inspect.isfunction(method) or method is vars(OverridePoints)[name]:
        return
    try:
        call(inspect.signature(method))
    except TypeError as error:
        raise OverrideError(
            f"`{name}{inspect.signature(method)}` of {kind.__name__} cannot be called as HF calls it: {error}.\n\n"
            f"Hint: take `{inspect.signature(vars(OverridePoints)[name])}`. A method of your own needs another name."
        ) from error


Hook = Callable[..., object]

KEPT = (
    "configure_callbacks", "setup", "teardown", "on_fit_start", "on_train_start", "on_train_epoch_start",
    "on_train_epoch_end", "on_validation_epoch_end",
    "on_test_epoch_end", "on_save_checkpoint", "on_load_checkpoint", "on_validation_model_eval",
    "on_test_model_eval", "on_predict_model_eval",
)  # fmt: skip


def note_hooks(module: type[pl.LightningModule]) -> None:
    """Make a class record which of its hooks have run."""
    for name in KEPT:
        setattr(module, name, _noting(name, getattr(module, name)))


def keep_hooks(subclass: type[pl.LightningModule], base: type[pl.LightningModule]) -> None:
    """Run the base's hook after each hook of a subclass that has not called it."""
    for name in KEPT:
        override = vars(subclass).get(name)
        if inspect.isfunction(override):
            hook = _with_adapters(override) if name == "configure_callbacks" else override
            setattr(subclass, name, _followed(name, hook, getattr(base, name)))


def _with_adapters(configure: Hook) -> Hook:
    """Wrap the HF callbacks that a `configure_callbacks` returns in adapters."""

    @functools.wraps(configure)
    def configured(self: pl.LightningModule) -> list[pl.Callback]:
        chosen = configure(self) or []  # Lightning takes None for none
        return [as_lightning(one) for one in (chosen if isinstance(chosen, Sequence) else [chosen])]

    return configured


def _noting(name: str, hook: Hook) -> Hook:
    @functools.wraps(hook)
    def run(self: pl.LightningModule, *args: object, **kwargs: object) -> object:
        if "_hooks_run" in self.__dict__:  # an override reads it
            self.__dict__["_hooks_run"].add(name)
        return hook(self, *args, **kwargs)

    return run


def _followed(name: str, override: Hook, base: Hook) -> Hook:
    @functools.wraps(override)
    def run(self: pl.LightningModule, *args: object, **kwargs: object) -> object:
        hooks_run: set[str] = self.__dict__.setdefault("_hooks_run", set())
        hooks_run.discard(name)
        result = override(self, *args, **kwargs)
        if name not in hooks_run:
            base(self, *args, **kwargs)
        return result

    return run
