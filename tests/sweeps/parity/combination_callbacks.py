"""Callbacks among the features of `combinations.py`: they set flags, change what is set, and call the Trainer."""

from __future__ import annotations

import copy

import torch

from helpers import toy
from sweeps.parity.combination_features import BEST, PLAIN, feature

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
          "on_epoch_begin", "on_epoch_end", "on_evaluate", "on_save", "on_log", "on_train_begin",
          "on_prediction_step")  # fmt: skip
OFTEN = ("on_step_end", "on_epoch_end", "on_step_begin", "on_substep_end")


def _sets(flag: str, step: int, value: bool = True):
    def method(self, args, state, control, **kwargs):
        if state.global_step == step:
            setattr(control, flag, value)

    return method


for event in EVENTS:
    for flag in toy.FLAGS:
        for step in (0,) if event == "on_train_begin" else (3, 5, 13):
            feature(
                f"{flag}_{event}_{step}",
                f"flag_{'often' if event in OFTEN else 'rarely'}",
                places=f"flag_{event}",
                callback=lambda event=event, flag=flag, step=step: {event: _sets(flag, step)},
            )
for flag in toy.FLAGS:
    feature(
        f"no_{flag}", "flag_undone", callback=lambda flag=flag: {"on_step_end": _sets(flag, 5, False)}, volatile=True
    )
feature(
    "early_stopping",
    "early",
    {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True},
    places="save eval rate early",
    extra=lambda api, model: {"callbacks": [api.EarlyStoppingCallback(1)]},
    volatile=True,
)
feature(
    "early_stopping_restored",
    "early",
    {**BEST, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
     "restore_callback_states_from_checkpoint": True},
    places="save eval rate early restore_callbacks",
    extra=lambda api, model: {"callbacks": [api.EarlyStoppingCallback(2, 0.001)]},
)  # fmt: skip


def acts(name: str, event: str, act, step: int = 3, family: str = "acts", **parts) -> None:
    """Add a callback that does something once, with the Trainer at hand."""

    def methods():
        def method(self, args, state, control, **kwargs):
            if state.global_step == step and not getattr(self, "is_done", False):
                self.is_done = True
                self.trainer.found.append(act(self.trainer, args, state, control, kwargs))

        return {event: method}

    feature(name, family, places=parts.pop("places", name), callback=methods, **{"volatile": True, **parts})


def _set_arg(name, value):
    return lambda trainer, args, state, control, kwargs: setattr(args, name, value)


def _set_state(name, value):
    return lambda trainer, args, state, control, kwargs: setattr(state, name, value)


for name, value in {
    "logging_steps": 1,
    "eval_steps": 1,
    "save_steps": 1,
    "max_grad_norm": 0.01,
    "save_total_limit": 1,
    "learning_rate": 0.5,
    "prediction_loss_only": True,
    "eval_strategy": "no",
    "logging_strategy": "no",
    "save_strategy": "no",
    "logging_nan_inf_filter": False,
    "max_steps": 9,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "load_best_model_at_end": False,
    "save_only_model": True,
    "output_dir": None,
    "label_smoothing_factor": 0.2,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "dataloader_drop_last": True,
    "batch_eval_metrics": False,
    "eval_delay": 8,
    "weight_decay": 0.5,
    "torch_empty_cache_steps": 1,
    "eval_accumulation_steps": 1,
    "seed": 9,
}.items():
    if value is not None:
        acts(f"arg_{name}", "on_step_end", _set_arg(name, value), family="changes_args")
for name, value in {"max_steps": 6, "logging_steps": 1, "eval_steps": 1, "save_steps": 1, "num_train_epochs": 1,
                    "epoch": 9.0, "best_metric": -1.0, "total_flos": 5.0, "global_step": 8}.items():  # fmt: skip
    acts(f"state_{name}", "on_step_end", _set_state(name, value), family="changes_state")


def _lower_rate(trainer, args, state, control, kwargs):
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-4


def _scale_base_rates(trainer, args, state, control, kwargs):
    trainer.lr_scheduler.base_lrs = [rate * 3 for rate in trainer.lr_scheduler.base_lrs]


def _new_optimizer(trainer, args, state, control, kwargs):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)


def _new_schedule(trainer, args, state, control, kwargs):
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)


def _freeze(trainer, args, state, control, kwargs):
    next(trainer.model.parameters()).requires_grad = False


def _smaller_eval(trainer, args, state, control, kwargs):
    trainer.eval_dataset = toy.rows(5, 8)


def _smaller_train(trainer, args, state, control, kwargs):
    trainer.train_dataset = toy.rows(11, 8)


def _mean_of_all(prediction):
    return {"size": sum(len(p) for p in prediction), "kinds": len(prediction)}


def _other_metrics(trainer, args, state, control, kwargs):
    trainer.compute_metrics = _mean_of_all


def _add_callback(trainer, args, state, control, kwargs):
    base = next(c for c in type(trainer.callback_handler.callbacks[0]).__mro__ if c.__name__ == "TrainerCallback")
    trainer.add_callback(type("Late", (base,), {"on_log": lambda self, a, s, c, logs=None, **k: logs.update(late=1)}))


def _drop_flow(trainer, args, state, control, kwargs):
    flow = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "DefaultFlowCallback")
    trainer.remove_callback(flow)


def _nothing(value):
    return None if value is None or isinstance(value, (str, int, float, dict, list, tuple)) else type(value).__name__


def _evaluate(trainer, args, state, control, kwargs):
    return trainer.evaluate()


def _evaluate_other(trainer, args, state, control, kwargs):
    return trainer.evaluate(toy.rows(7, 9), metric_key_prefix="extra")


def _predict(trainer, args, state, control, kwargs):
    return list(trainer.predict(toy.rows(6, 9)))


def _save_model(trainer, args, state, control, kwargs):
    trainer.save_model(f"{args.output_dir}/extra")


def _save_into_output(trainer, args, state, control, kwargs):
    trainer.save_model()
    trainer.save_state()


def _log_more(trainer, args, state, control, kwargs):
    trainer.log({"mine": 1.5})


def _eval_mode(trainer, args, state, control, kwargs):
    trainer.model.eval()


def _zero_grad(trainer, args, state, control, kwargs):
    trainer.model.zero_grad()


def _see(trainer, args, state, control, kwargs):
    """Look at what a callback may look at."""
    seen = {"keys": sorted(k for k in kwargs if k != "tokenizer"), "mode": trainer.model.training}
    seen["lr"] = [group["lr"] for group in trainer.optimizer.param_groups]
    seen["grads"] = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    seen["steps"] = [trainer.lr_scheduler.last_epoch] if hasattr(trainer.lr_scheduler, "last_epoch") else []
    seen["is_in_train"] = trainer.is_in_train
    return seen


def _save_checkpoint(trainer, args, state, control, kwargs):
    trainer._save_checkpoint(trainer.model, trial=None)


for event in ("on_step_end", "on_step_begin", "on_epoch_end", "on_log", "on_save", "on_substep_end",
              "on_pre_optimizer_step", "on_optimizer_step", "on_epoch_begin"):  # fmt: skip
    step = 0 if event == "on_epoch_begin" else 13 if event == "on_epoch_end" else 4
    for act in (_evaluate, _predict, _save_model, _save_into_output, _log_more, _see, _eval_mode, _zero_grad,
                _save_checkpoint, _evaluate_other):  # fmt: skip
        plain = PLAIN if act in (_predict, _evaluate_other) else ()
        acts(f"calls{act.__name__}_{event}", event, act, step, family="calls", tasks=plain, places=f"acts_{event}")
for act in (_lower_rate, _scale_base_rates, _new_optimizer, _new_schedule, _freeze, _smaller_eval, _smaller_train,
            _other_metrics, _add_callback, _drop_flow):  # fmt: skip
    plain = PLAIN if act in (_smaller_eval, _smaller_train, _other_metrics) else ()
    acts(f"does{act.__name__}", "on_step_end", act, family="does", tasks=plain)
    acts(
        f"does{act.__name__}_at_begin",
        "on_train_begin",
        act,
        0,
        family="does",
        tasks=plain,
        places=f"does{act.__name__}",
    )


def _replaces_control():
    def on_step_end(self, args, state, control, **kwargs):
        new = copy.copy(control)
        new.should_log = state.global_step % 2 == 1
        return new

    return {"on_step_end": on_step_end}


feature("control_replaced", "control", callback=_replaces_control)
