"""What 5.23's Trainer does otherwise than that of 4.46, put into the latter. `mends.py` has what is common to more."""

from __future__ import annotations

import functools
import importlib
import inspect
import textwrap
import time
from collections.abc import Callable

REASONS = {
    "best_evaluation": "it looks for the best evaluation only where it saves",
    "rate_of_this_update": "it logs the learning rate of the next update",
    "mean_of_micro_batches": "it adds up the losses of an update's micro-batches instead of taking their mean",
    "short_windows": "it makes no update of an epoch's last micro-batches, where they are too few: the next gets them",
    "save_after_the_last_epoch": 'it saves once more after the last update under `save_strategy="epoch"`',
    "rate_of_tokens": "it logs no rate of tokens",
    "kept_eval_loader": "it begins persistent workers anew for each evaluation, which draws a random number",
    "nine_tenths": "its Accelerate halves the batch size where memory is too small; later ones take a tenth off",
    "tokenizer_of_collator": "it does not save the tokenizer of the data collator",
    "labels_of_peft": "it looks for the labels of a PEFT model in the wrapper, and finds none",
}


def edited(function: Callable, changes: dict[str, str]) -> Callable:
    """Return a function with pieces of its source replaced, each of which has to be there."""
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    scope: dict = {}
    exec(compile(source, f"edited {function.__name__}", "exec"), function.__globals__, scope)
    return scope[function.__name__]


def _short_windows(trainer: type, used: set[str]) -> None:
    """Make an update of an epoch's last micro-batches, however few; count the run's updates so."""
    size, left = "args.gradient_accumulation_steps", "steps_in_epoch % args.gradient_accumulation_steps"
    loop = edited(
        trainer._inner_training_loop,
        {
            f"= len_dataloader // {size}": f"= len_dataloader // {size} + int(len_dataloader % {size} > 0)",
            f"remainder = num_examples % {size}": f"remainder = {left}",
            f"total_updates = steps_in_epoch // {size} + 1": f"total_updates = -(-steps_in_epoch // {size})",
            f"total_batched_samples % {size} == 0": f"(step + 1) % {size} == 0 or (step + 1) == steps_in_epoch",
        },
    )

    def _inner_training_loop(self, *args, **kwargs):
        if self.args.gradient_accumulation_steps > 1:
            used.add("short_windows")
        return loop(self, *args, **kwargs)

    trainer._inner_training_loop = _inner_training_loop


def _save_after_the_last_epoch(trainer: type, used: set[str]) -> None:
    flow = importlib.import_module("transformers.trainer_callback").DefaultFlowCallback
    as_it_was = flow.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        should_save = control.should_save
        control = as_it_was(self, args, state, control, **kwargs)
        if args.save_strategy == "epoch" and control.should_save and not should_save:
            control.should_save = False
            used.add("save_after_the_last_epoch")
        return control

    flow.on_step_end = on_step_end


def _rate_of_tokens(trainer: type, used: set[str]) -> None:
    measured = importlib.import_module("transformers.trainer_utils").speed_metrics
    as_it_was = trainer.log

    def log(self, logs, *args, **kwargs):
        if self.args.include_num_input_tokens_seen and "loss" in logs:
            logs |= measured("train", time.time() - 1, num_tokens=self.state.num_input_tokens_seen)
            used.add("rate_of_tokens")
        return as_it_was(self, logs, *args, **kwargs)

    trainer.log = log


def _kept_eval_loader(trainer: type, used: set[str]) -> None:
    as_it_was = trainer.get_eval_dataloader

    def get_eval_dataloader(self, eval_dataset=None):
        if not self.args.dataloader_persistent_workers:
            return as_it_was(self, eval_dataset)
        kept = vars(self).setdefault("_prepared_eval_loaders", {})
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in kept:
            used.add("kept_eval_loader")
        else:
            kept[key] = as_it_was(self, eval_dataset)
        return kept[key]

    trainer.get_eval_dataloader = get_eval_dataloader


def _nine_tenths(trainer: type, used: set[str]) -> None:
    memory = importlib.import_module("accelerate.utils.memory")
    memory.it_shrank = functools.partial(used.add, "nine_tenths")
    mended = edited(
        memory.find_executable_batch_size, {"batch_size //= 2": "it_shrank(); batch_size = int(batch_size * 0.9)"}
    )
    for module in (memory, importlib.import_module("accelerate.utils")):
        module.find_executable_batch_size = mended


def _tokenizer_of_collator(trainer: type, used: set[str]) -> None:
    as_it_was = trainer._save

    def _save(self, output_dir=None, state_dict=None):
        as_it_was(self, output_dir, state_dict)
        tokenizer = getattr(self.data_collator, "tokenizer", None)
        if self.processing_class is None and tokenizer is not None:
            tokenizer.save_pretrained(output_dir or self.args.output_dir)
            used.add("tokenizer_of_collator")

    trainer._save = _save


def _labels_of_peft(trainer: type, used: set[str]) -> None:
    found = importlib.import_module("transformers.utils")
    as_it_was = trainer.__init__

    @functools.wraps(as_it_was)
    def made(self, *args, **kwargs):
        as_it_was(self, *args, **kwargs)
        if hasattr(self.model, "get_base_model") and hasattr(self.model, "peft_config"):
            kind = type(self.model.get_base_model())
            self.can_return_loss = found.can_return_loss(kind)
            if self.args.label_names is None:
                self.label_names = found.find_labels(kind)
            used.add("labels_of_peft")

    trainer.__init__ = made


def _best_evaluation(trainer: type, used: set[str]) -> None:
    as_it_was = trainer._evaluate

    def _evaluate(self, *args, **kwargs):
        metrics = as_it_was(self, *args, **kwargs)
        name = self.args.metric_for_best_model
        if name is not None and not self.control.should_save:
            found = metrics[name if name.startswith("eval_") else f"eval_{name}"]
            best = self.state.best_metric
            if best is None or (found > best if self.args.greater_is_better else found < best):
                self.state.best_metric = found
                used.add("best_evaluation")
        return metrics

    trainer._evaluate = _evaluate


def _rate_of_this_update(trainer: type, used: set[str]) -> None:
    rate_now, step_as_it_was, log_as_it_was = (
        trainer._get_learning_rate, trainer.training_step, trainer._maybe_log_save_evaluate,
    )  # fmt: skip

    def training_step(self, *args, **kwargs):
        self._rate_of_update = rate_now(self)
        return step_as_it_was(self, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self._is_logging = True
        log_as_it_was(self, *args, **kwargs)
        self._is_logging = False

    def _get_learning_rate(self):
        found = rate_now(self)
        if not getattr(self, "_is_logging", False):
            return found
        if found != self._rate_of_update:
            used.add("rate_of_this_update")
        return self._rate_of_update

    trainer.training_step, trainer._get_learning_rate = training_step, _get_learning_rate
    trainer._maybe_log_save_evaluate = _maybe_log_save_evaluate


def _mean_of_micro_batches(trainer: type, used: set[str]) -> None:
    batches_as_it_was, step_as_it_was = trainer.get_batch_samples, trainer.training_step

    def get_batch_samples(self, *args, **kwargs):
        batches, count = batches_as_it_was(self, *args, **kwargs)
        self._micro_batches = len(batches)
        return batches, count

    def training_step(self, model, inputs, num_items_in_batch=None):
        if num_items_in_batch is not None or self.args.gradient_accumulation_steps == 1:
            return step_as_it_was(self, model, inputs, num_items_in_batch)
        backward, losses = self.accelerator.backward, []

        def of_the_mean(loss, **kwargs):
            losses.append(loss / self._micro_batches)
            backward(losses[0], **kwargs)

        self.accelerator.backward = of_the_mean
        try:
            step_as_it_was(self, model, inputs)
        finally:
            self.accelerator.backward = backward
        used.add("mean_of_micro_batches")
        return losses[0].detach()

    trainer.get_batch_samples, trainer.training_step = get_batch_samples, training_step


CHANGES = (
    _best_evaluation,
    _short_windows,
    _rate_of_this_update,
    _mean_of_micro_batches,
    _save_after_the_last_epoch,
    _rate_of_tokens,
    _kept_eval_loader,
    _nine_tenths,
    _tokenizer_of_collator,
    _labels_of_peft,
)
