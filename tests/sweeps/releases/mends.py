"""What 5.23's Trainer does otherwise, put into an older release's own: equal with it, a case differs for it alone.

Each mend notes when it has changed something; `REASONS` says what the release does without it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from sweeps.releases import mends_of_4_46

REASONS = {
    "grouped_evaluation": "it draws the order of a grouped evaluation from the random numbers of the training",
    "best_update": '`save_strategy="best"` does not note the best update in its state',
    "smoothed_loss": "it divides a smoothed loss by each micro-batch's own labels, not by those of the update",
    "optimizer_options": "it does not read `optim_args` for SGD, Adagrad and RMSprop",
    **mends_of_4_46.REASONS,
}
USED: set[str] = set()


def mend() -> None:
    """Put the mends into the installed transformers' Trainer."""
    trainer = importlib.import_module("transformers.trainer").Trainer
    for change in (_grouped_evaluation, _best_update, _smoothed_loss, _optimizer_options):
        change(trainer)
    if not hasattr(trainer, "_determine_best_metric"):  # before 4.47
        for change in mends_of_4_46.CHANGES:
            change(trainer, USED)


def _grouped_evaluation(trainer: type) -> None:
    grouped = importlib.import_module("transformers.trainer_pt_utils").LengthGroupedSampler
    as_it_was = trainer._get_eval_sampler

    def _get_eval_sampler(self, eval_dataset):
        sampler = as_it_was(self, eval_dataset)
        if isinstance(sampler, grouped) and sampler.generator is None:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler.generator = torch.Generator().manual_seed(seed)
            USED.add("grouped_evaluation")
        return sampler

    trainer._get_eval_sampler = _get_eval_sampler


def _best_update(trainer: type) -> None:
    as_it_was = getattr(trainer, "_determine_best_metric", None)
    if as_it_was is None:
        return
    save_as_it_was = trainer._save_checkpoint

    def _determine_best_metric(self, metrics, trial):
        is_new = as_it_was(self, metrics, trial)
        if is_new and self.state.best_global_step != self.state.global_step and self.args.save_strategy == "best":
            self.state.best_global_step = self.state.global_step
            USED.add("best_update")
        return is_new

    def _save_checkpoint(self, model, trial):
        save_as_it_was(self, model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.best_global_step}"
        if self.args.save_strategy == "best" and folder.is_dir():
            self.state.best_model_checkpoint = str(folder)

    trainer._determine_best_metric, trainer._save_checkpoint = _determine_best_metric, _save_checkpoint


def _smoothed_loss(trainer: type) -> None:
    from hf_compat.trainer_pt_utils import LabelSmoother

    as_it_was = trainer.compute_loss

    def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
        def smooth(outputs, labels, shift_labels=False):
            if num_items_in_batch is not None:
                USED.add("smoothed_loss")
            return LabelSmoother(self.args.label_smoothing_factor)(
                outputs, labels, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch
            )

        smoother = self.label_smoother
        self.label_smoother = smooth if smoother is not None else None
        try:
            return as_it_was(self, model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        finally:
            self.label_smoother = smoother

    trainer.compute_loss = compute_loss


def _optimizer_options(trainer: type) -> None:
    as_it_was = trainer.get_optimizer_cls_and_kwargs

    def get_optimizer_cls_and_kwargs(args, model=None):
        kind, options = as_it_was(args, model)
        if args.optim_args and getattr(args.optim, "value", args.optim) in ("sgd", "adagrad", "rmsprop"):
            pairs = (pair.split("=") for pair in args.optim_args.replace(" ", "").split(","))
            words = {"true": True, "false": False}
            options |= {n: words[text.lower()] if text.lower() in words else float(text) for n, text in pairs}
            USED.add("optimizer_options")
        return kind, options

    trainer.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)
