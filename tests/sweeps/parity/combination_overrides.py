"""Overrides of the Trainer's methods among the features of `combinations.py`."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from sweeps.parity.combination_features import PLAIN, feature


def override(name: str, method: str, make, **parts) -> None:
    feature(name, "override", places=parts.pop("places", method), methods={method: make}, **parts)


def _new_loss(api):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _old_loss(api):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        loss = 2 * outputs["loss"]
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _old_loss_under_theirs(api):
    """As in 4.45, whose call it is: divided by the micro-batches of the update in training."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.model_accepts_loss_kwargs = False
        outputs = model(**inputs)
        loss = 2 * outputs["loss"]
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _super_loss(api):
    def compute_loss(self, model, inputs, *args, **kwargs):
        found = api.Trainer.compute_loss(self, model, inputs, *args, **kwargs)
        self.seen_losses = getattr(self, "seen_losses", 0) + 1
        return found

    return compute_loss


def _logging_loss(api):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = api.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if model.training and self.state.global_step == 2:
            self.log({"inner": 1.0})
        return found

    return compute_loss


def _own_step(api):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss * self.args.gradient_accumulation_steps)
        return loss.detach()

    return training_step


def _doubled(api):
    def training_step(self, *args, **kwargs):
        return api.Trainer.training_step(self, *args, **kwargs) * 2

    return training_step


def _own_evaluation(api):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        found = api.Trainer.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)
        found[f"{metric_key_prefix}_extra"] = float(self.state.global_step)
        self.log({f"{metric_key_prefix}_extra": found[f"{metric_key_prefix}_extra"]})
        return found

    return evaluate


def _evaluation_without_super(api):
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = {f"{metric_key_prefix}_loss": float(self.state.global_step % 3)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    return evaluate


def _own_loop(api):
    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None,
                        metric_key_prefix="eval"):  # fmt: skip
        found = api.Trainer.evaluation_loop(
            self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        found.metrics[f"{metric_key_prefix}_description"] = len(description)
        return found

    return evaluation_loop


def _own_prediction(api):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = api.Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        return loss, None if logits is None else logits * 2, labels

    return prediction_step


def _own_log(api):
    def log(self, logs, start_time=None):
        logs["mode"] = self.model.training
        api.Trainer.log(self, logs, start_time)

    return log


def _old_log(api):
    def log(self, logs):
        logs["old"] = 1
        api.Trainer.log(self, logs)

    return log


def _old_log_under_theirs(api):
    """As of today: 5.23 passes the run's start."""

    def log(self, logs, start_time=None):
        logs["old"] = 1
        api.Trainer.log(self, logs)

    return log


def _silent_log(api):
    def log(self, logs, *args, **kwargs):
        self.state.log_history.append({**logs, "step": self.state.global_step})

    return log


def _own_save(api):
    def _save(self, output_dir=None, state_dict=None):
        api.Trainer._save(self, output_dir, state_dict)
        with open(f"{output_dir}/own.txt", "w") as file:
            file.write(str(sorted(state_dict or {})))

    return _save


def _own_save_model(api):
    def save_model(self, output_dir=None, _internal_call=False):
        api.Trainer.save_model(self, output_dir, _internal_call)
        self.found.append(bool(_internal_call))

    return save_model


def _own_save_checkpoint(api):
    def _save_checkpoint(self, model, trial):
        self.found.append(self.state.global_step)
        return api.Trainer._save_checkpoint(self, model, trial)

    return _save_checkpoint


def _no_save_checkpoint(api):
    def _save_checkpoint(self, model, trial, *args):
        self.save_model(f"{self.args.output_dir}/weights-{self.state.global_step}")

    return _save_checkpoint


def _flos(api):
    return lambda self, inputs: 7


def _clip(api):
    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return _clip_grad_norm


def _batch_samples(api):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = api.Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)
        self.found.append(len(batches))
        return batches, items

    return get_batch_samples


def _prepares_inputs(api):
    def _prepare_inputs(self, inputs):
        inputs = api.Trainer._prepare_inputs(self, inputs)
        return {**inputs, "x": inputs["x"] * 0.5}

    return _prepare_inputs


def _log_save(api):
    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self.state.global_step == 2:
            self.control.should_save = True
        return api.Trainer._maybe_log_save_evaluate(self, *args, **kwargs)

    return _maybe_log_save_evaluate


def _inner(api):
    def _inner_training_loop(self, *args, **kwargs):
        self.found.append("begins")
        output = api.Trainer._inner_training_loop(self, *args, **kwargs)
        self.found.append("ends")
        return output

    return _inner_training_loop


def _best_metric(api):
    def _determine_best_metric(self, metrics, trial):
        found = api.Trainer._determine_best_metric(self, metrics, trial)
        self.found.append(found)
        return found

    return _determine_best_metric


def _load_best(api):
    def _load_best_model(self):
        self.found.append("best")
        return api.Trainer._load_best_model(self)

    return _load_best_model


def _plain_train(self):
    return DataLoader(self.train_dataset, batch_size=6, shuffle=True, collate_fn=self.data_collator)


def _loader(api):
    return lambda self: _plain_train(self)


def _prepared(api):
    return lambda self: self.accelerator.prepare(_plain_train(self))


def _list_loader(api):
    def get_train_dataloader(self):
        return [self.data_collator(self.train_dataset[i : i + 4]) for i in range(0, 40, 4)]

    return get_train_dataloader


def _eval_loader(api):
    def get_eval_dataloader(self, eval_dataset=None):
        data = eval_dataset if eval_dataset is not None and not isinstance(eval_dataset, str) else self.eval_dataset
        return self.accelerator.prepare(DataLoader(data, batch_size=6, collate_fn=self.data_collator))

    return get_eval_dataloader


def _sampler(api):
    def _get_train_sampler(self, train_dataset=None):
        return list(reversed(range(len(self.train_dataset))))

    return _get_train_sampler


def _random_sampler(api):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=28)

    return _get_train_sampler


LOSSES = tuple(name for name in PLAIN)
override("loss_new", "compute_loss", _new_loss, tasks=("rows", "rows_few", "rows_normed", "stream", "rows_noisy"))
override("loss_old", "compute_loss", _old_loss, tasks=LOSSES, theirs={"compute_loss": _old_loss_under_theirs})
override("loss_super", "compute_loss", _super_loss)
override("loss_logs", "compute_loss", _logging_loss, volatile=True)
override("step_own", "training_step", _own_step)
override("step_doubled", "training_step", _doubled)
override("evaluate_more", "evaluate", _own_evaluation)
override("evaluate_alone", "evaluate", _evaluation_without_super)
override("evaluation_loop", "evaluation_loop", _own_loop)
override("prediction_step", "prediction_step", _own_prediction, tasks=PLAIN)
override("log_own", "log", _own_log)
override("log_old", "log", _old_log, theirs={"log": _old_log_under_theirs})
override("log_silent", "log", _silent_log)
override("save_own", "_save", _own_save)
override("save_model_own", "save_model", _own_save_model)
override("save_checkpoint_own", "_save_checkpoint", _own_save_checkpoint)
override("save_checkpoint_none", "_save_checkpoint", _no_save_checkpoint, volatile=True)
override("flos", "floating_point_ops", _flos)
override("clip_own", "_clip_grad_norm", _clip)
override("batch_samples", "get_batch_samples", _batch_samples)
override("prepare_inputs", "_prepare_inputs", _prepares_inputs, tasks=(*PLAIN, "regression"))
override("log_save", "_maybe_log_save_evaluate", _log_save)
override("inner_loop", "_inner_training_loop", _inner)
override("best_metric", "_determine_best_metric", _best_metric)
override("best_loaded", "_load_best_model", _load_best)
MAPPED = ("rows", "rows_few", "rows_normed", "regression", "tags", "bert")
override("train_loader", "get_train_dataloader", _loader, tasks=MAPPED, places="get_train_dataloader sampling")
override(
    "train_loader_prepared", "get_train_dataloader", _prepared, tasks=MAPPED, places="get_train_dataloader sampling"
)
override("train_loader_list", "get_train_dataloader", _list_loader, tasks=("rows", "rows_normed"),
         places="get_train_dataloader sampling")  # fmt: skip
override("eval_loader", "get_eval_dataloader", _eval_loader, tasks=("rows", "rows_few", "regression", "tags", "stream"))
override("train_sampler", "_get_train_sampler", _sampler, tasks=MAPPED, places="get_train_dataloader sampling")
override("train_sampler_random", "_get_train_sampler", _random_sampler, tasks=MAPPED,
         places="get_train_dataloader sampling")  # fmt: skip
