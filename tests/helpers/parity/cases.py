"""The configurations that must give the same numbers on both trainers.

One body runs them all (`runner.run_case`); `api` is `transformers` or `hf_compat`. A case is a dict:
`model`, `train`, `eval`: factories; `args`: training arguments; `extra(api)`: further keywords of the Trainer;
`trainer(api)`: a subclass; `after(trainer)`: what to do besides training, returning what is compared.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader

from helpers import toy

CASES: dict[str, dict] = {}
BASE = {
    "model": toy.Classifier,
    "train": toy.rows,
    "eval": lambda: toy.rows(21, seed=5),
    "args": {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    },
}
LM = {"model": toy.tiny_gpt2, "train": toy.blocks, "eval": lambda: toy.blocks(10, seed=9)}
BERT = {"model": toy.tiny_bert, "train": toy.labelled_blocks, "eval": lambda: toy.labelled_blocks(11)}
TAGS = {
    "model": toy.Tagger,
    "train": toy.sequences,
    "eval": lambda: toy.sequences(17, seed=8),
    "extra": lambda api: {"data_collator": toy.pad},
}
EVAL = {"eval_strategy": "steps", "eval_steps": 5}


def case(name: str, args: dict | None = None, **parts) -> None:
    assert name not in CASES, name
    CASES[name] = {**BASE, **parts, "args": {**BASE["args"], **(args or {})}}


def accuracy(prediction):
    guesses = prediction.predictions.argmax(-1)
    counted = prediction.label_ids != -100
    return {"accuracy": float((guesses == prediction.label_ids)[counted].mean()), "count": int(counted.sum())}


# The step ------------------------------------------------------------------------------------------------------------
case("baseline")
case("accumulation", {"gradient_accumulation_steps": 3})
case("accumulation_larger_than_epoch", {"gradient_accumulation_steps": 20})
case("short_last_window", {"gradient_accumulation_steps": 4, "num_train_epochs": 3, "logging_steps": 1})
case("fractional_epochs", {"num_train_epochs": 1.5, "gradient_accumulation_steps": 2})
case("max_steps_within_epoch", {"max_steps": 7, "gradient_accumulation_steps": 3})
case("max_steps_over_epochs", {"max_steps": 31, "gradient_accumulation_steps": 2})
case("drop_last", {"dataloader_drop_last": True, **EVAL})
case("two_workers", {"dataloader_num_workers": 2, **EVAL})
case("persistent_workers", {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, **EVAL})
case("no_clipping", {"max_grad_norm": 0.0})
case("hard_clipping", {"max_grad_norm": 0.01})
case("label_smoothing", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, **EVAL}, **BERT)
case("label_smoothing_causal_lm", {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, **EVAL}, **LM)
case("label_smoothing_padded", {"label_smoothing_factor": 0.2, **EVAL}, **{**TAGS, "model": toy.tagger_with_config})
case("nan_losses_filtered", {"logging_steps": 3}, model=toy.NanAt)
case("nan_losses_logged", {"logging_steps": 3, "logging_nan_inf_filter": False}, model=toy.NanAt)
case("logging_first_step", {"logging_first_step": True, "logging_steps": 5})
case("logging_by_epoch", {"logging_strategy": "epoch"})
case("logging_off", {"logging_strategy": "no"})
case(
    "ratios",
    {"logging_steps": 0.2, "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5},
)
case(
    "stream_without_length", {"max_steps": 9, "gradient_accumulation_steps": 2}, train=lambda: toy.Stream(toy.rows(23))
)
case("stream_that_ends", {"max_steps": 40}, train=lambda: toy.Stream(toy.rows(23)))
case(
    "stream_with_leftover_windows",
    {"max_steps": 11, "gradient_accumulation_steps": 3},
    train=lambda: toy.Stream(toy.rows(20)),
)
case("stream_with_length", {"gradient_accumulation_steps": 2, **EVAL}, train=lambda: toy.SizedStream(toy.rows(30)))
case("stream_told_its_epoch", {"max_steps": 20}, train=lambda: toy.ShuffledStream(toy.rows(20)))
case("model_init", {}, extra=lambda api: {"model": None, "model_init": lambda: toy.Classifier()}, model=None)
case(
    "model_init_of_a_trial",
    {},
    extra=lambda api: {"model": None, "model_init": lambda trial: toy.Classifier()},
    model=None,
    after=lambda t: t.train().training_loss,
)
case("other_seed", {"seed": 7})
case("data_seed", {"data_seed": 11, "gradient_accumulation_steps": 2})
case("sequential", {"train_sampling_strategy": "sequential"})
case("global_random_sampler", {"accelerator_config": {"use_seedable_sampler": False}})
case(
    "group_by_length", {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2, **EVAL}, **TAGS
)
REBALANCE = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2, **EVAL}
case("batch_rebalance", {**REBALANCE, "num_train_epochs": 3}, **{**TAGS, "train": lambda: toy.sequences(37)})
case(
    "batch_rebalance_drop_last",
    {**REBALANCE, "dataloader_drop_last": True},
    **{**TAGS, "train": lambda: toy.sequences(37)},
)
case(
    "random_collator",
    {"gradient_accumulation_steps": 3, **EVAL},
    **{**TAGS, "extra": lambda api: {"data_collator": toy.mask_at_random}},
)
case("random_dataset", {"gradient_accumulation_steps": 2, **EVAL}, train=lambda: toy.Noisy(toy.rows()))
case("keep_all_columns", {"remove_unused_columns": False})
case(
    "datasets_with_extra_columns",
    {**EVAL},
    model=toy.tiny_bert,
    train=lambda: as_dataset(toy.labelled_blocks()),
    eval=lambda: as_dataset(toy.labelled_blocks(11)),
)
case("auto_find_batch_size", {"auto_find_batch_size": True}, model=lambda: toy.OutOfMemoryAbove(64))
case(
    "auto_find_batch_size_shrinks",
    {"auto_find_batch_size": True, "per_device_train_batch_size": 8},
    model=lambda: toy.OutOfMemoryAbove(7),
)
case("eval_on_start", {"eval_on_start": True, **EVAL})
case("eval_delay_in_steps", {"eval_delay": 12, **EVAL})
case("eval_delay_in_epochs", {"eval_strategy": "epoch", "eval_delay": 2, "num_train_epochs": 3})
case("count_all_tokens", {"include_num_input_tokens_seen": "all", "logging_steps": 4}, **TAGS)
case("count_tokens_without_padding", {"include_num_input_tokens_seen": "non_padding"}, **TAGS)
case("empty_cache", {"torch_empty_cache_steps": 2})
case("full_determinism", {"full_determinism": True})
case("bf16", {"bf16": True, **EVAL})
case("bf16_causal_lm", {"bf16": True, "gradient_accumulation_steps": 2, **EVAL}, **LM)
case("causal_lm", {"gradient_accumulation_steps": 3, **EVAL}, **LM)
case(
    "causal_lm_tokens_of_this_device", {"gradient_accumulation_steps": 3, "average_tokens_across_devices": False}, **LM
)
case(
    "activation_checkpointing",
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    **LM,
)
case(
    "tuple_outputs",
    {**EVAL},
    model=toy.TupleRegressor,
    train=toy.regression_rows,
    eval=lambda: toy.regression_rows(13, 4),
)


def as_dataset(samples):
    import datasets

    return datasets.Dataset.from_list([{**sample, "note": "x", "id": i} for i, sample in enumerate(samples)])


def _summed_loss(outputs, labels, num_items_in_batch=None):
    total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / num_items_in_batch


case(
    "compute_loss_func",
    {"gradient_accumulation_steps": 3, **EVAL},
    extra=lambda api: {"compute_loss_func": _summed_loss},
)

# Optimizers ----------------------------------------------------------------------------------------------------------
for optim, options in {
    "adamw_torch": {"weight_decay": 0.1},
    "adamw_torch_fused": {"weight_decay": 0.1, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
    "sgd": {"optim_args": "momentum=0.9,nesterov=true"},
    "adafactor": {"weight_decay": 0.01},
    "adagrad": {"optim_args": "lr_decay=0.1"},
    "rmsprop": {"optim_args": "alpha=0.9,centered=True,momentum=0.1"},
}.items():
    case(f"optim_{optim}", {"optim": optim, **options, "gradient_accumulation_steps": 2})
case(
    "optim_schedule_free_adamw",
    {
        "optim": "schedule_free_adamw", "weight_decay": 0.1, "warmup_steps": 3, "gradient_accumulation_steps": 2,
        "save_strategy": "steps", "save_steps": 5, "load_best_model_at_end": True, **EVAL,
    },
)  # fmt: skip


class _OwnOptimizer:
    """Gives a trainer its own optimizer and schedule."""

    def __call__(self, api):
        model = toy.Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))}


case("own_optimizer", {}, model=None, extra=_OwnOptimizer())
case("optimizer_class", {}, extra=lambda api: {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-3})})

# Schedules -----------------------------------------------------------------------------------------------------------
for schedule, options in {
    "linear": {"warmup_steps": 4},
    "cosine": {"warmup_steps": 0.2},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 3}},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}, "warmup_steps": 3},
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 5},
    "inverse_sqrt": {"warmup_steps": 3},
    "reduce_lr_on_plateau": {
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.3},
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_steps": 2},
    "cosine_warmup_with_min_lr": {
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05},
        "warmup_steps": 6,
    },
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 9, "min_lr_ratio": 0.1}, "warmup_steps": 4},
    "greedy": {
        "lr_scheduler_kwargs": {"patience": 1, "min_lr": 1e-4, "smooth": True, "window_size": 3},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
}.items():
    case(f"schedule_{schedule}", {"lr_scheduler_type": schedule, "logging_steps": 1, **options})
case("warmup_of_everything", {"warmup_steps": 0.9999})

# Evaluation ----------------------------------------------------------------------------------------------------------


def evaluate_and_predict(trainer):
    prediction = trainer.predict(toy.rows(13, seed=6))
    return {
        "evaluate": trainer.evaluate(),
        "predictions": prediction.predictions,
        "labels": prediction.label_ids,
        "metrics": prediction.metrics,
    }


def predict_sequences(trainer):
    prediction = trainer.predict(toy.sequences(15, seed=12))
    return {"predictions": prediction.predictions, "labels": prediction.label_ids, "metrics": prediction.metrics}


METRICS = {"compute_metrics": accuracy}
case("metrics", {"eval_strategy": "epoch"}, extra=lambda api: METRICS, after=evaluate_and_predict)
case(
    "evaluate_before_training",
    {**EVAL},
    extra=lambda api: METRICS,
    before=evaluate_and_predict,
    after=evaluate_and_predict,
)
case(
    "several_eval_sets",
    {**EVAL, "metric_for_best_model": "b_loss"},
    extra=lambda api: METRICS,
    eval=lambda: {"a": toy.rows(9, 3), "b": toy.rows(10, 4)},
)
case(
    "other_prefix",
    {},
    extra=lambda api: METRICS,
    after=lambda t: [t.evaluate(metric_key_prefix="dev"), t.predict(toy.rows(5), metric_key_prefix="final").metrics],
)


def _by_batch():
    seen = []

    def metric(prediction, compute_result):
        seen.append(float((prediction.predictions.argmax(-1) == prediction.label_ids).float().mean()))
        return {"mean_of_batches": sum(seen) / len(seen)} if compute_result else {}

    return metric


case("batch_metrics", {"batch_eval_metrics": True, **EVAL}, extra=lambda api: {"compute_metrics": _by_batch()})


def _reads_everything(prediction):
    predictions, labels, inputs, losses = prediction
    return {
        "sum": float(np.abs(predictions).sum()),
        "inputs": int((inputs > 0).sum()),
        "losses": float(losses.sum()),
        "n": len(labels),
    }


case(
    "inputs_and_losses_for_metrics",
    {"include_for_metrics": ["inputs", "loss"], **EVAL},
    **{**TAGS, "extra": lambda api: {"data_collator": toy.pad, "compute_metrics": _reads_everything}},
)
case(
    "preprocessed_logits",
    {**EVAL},
    extra=lambda api: {
        "compute_metrics": lambda p: {"mean": float(p.predictions.mean())},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1) + labels,
    },
)
case("loss_only", {"prediction_loss_only": True, **EVAL}, extra=lambda api: METRICS, after=evaluate_and_predict)
case(
    "ignored_outputs",
    {},
    extra=lambda api: {},
    after=lambda t: [
        t.predict(toy.blocks(6), ignore_keys=["past_key_values", "hidden_states"]).predictions,
        t.evaluate(ignore_keys=[]),
    ],
    **{**LM},
)
case(
    "ragged_predictions",
    {**EVAL, "per_device_eval_batch_size": 3},
    **{**TAGS, "extra": lambda api: {"data_collator": toy.pad, "compute_metrics": accuracy}},
    after=predict_sequences,
)
case(
    "ragged_predictions_moved",
    {"eval_accumulation_steps": 2, "per_device_eval_batch_size": 3},
    **{**TAGS, "extra": lambda api: {"data_collator": toy.pad, "compute_metrics": accuracy}},
    after=predict_sequences,
)
case("batches_not_joined", {"eval_do_concat_batches": False}, after=evaluate_and_predict)
case(
    "batches_not_joined_moved",
    {"eval_do_concat_batches": False, "eval_accumulation_steps": 1},
    after=evaluate_and_predict,
)
case("unlabelled_test_set", {}, after=lambda t: list(t.predict([{"x": r["x"]} for r in toy.rows(11)])))
case("no_label_names", {"label_names": []}, after=lambda t: list(t.predict(toy.rows(11))))
case(
    "nested_outputs",
    {},
    model=toy.TupleRegressor,
    train=toy.regression_rows,
    eval=lambda: toy.regression_rows(13, 4),
    after=lambda t: list(t.predict(toy.regression_rows(9, 5))),
)
case("stream_evaluated", {**EVAL}, eval=lambda: toy.Stream(toy.rows(19, 5)), extra=lambda api: METRICS)
# A loader without a batch is started all the same: torch draws a seed for it, so the next dropout differs.
NO_BATCH = {"dataloader_drop_last": True, "per_device_eval_batch_size": 8, "logging_steps": 1}
OFTEN = {"eval_strategy": "steps", "eval_steps": 2}


def evaluate_and_predict_nothing(trainer):
    output = trainer.predict(toy.rows(4, 6))
    return [trainer.evaluate(), output.predictions, output.label_ids, output.metrics, torch.rand(3)]


case("evaluation_without_a_batch", {**NO_BATCH, **OFTEN}, eval=lambda: toy.rows(4, 5), extra=lambda api: METRICS)
case(
    "one_eval_set_without_a_batch",
    {**NO_BATCH, **OFTEN},
    eval=lambda: {"none": toy.rows(4, 5), "some": toy.rows(18, 3)},
    extra=lambda api: METRICS,
)
case(
    "no_batch_outside_training",
    {**NO_BATCH},
    eval=lambda: toy.rows(4, 5),
    before=evaluate_and_predict_nothing,
    after=evaluate_and_predict_nothing,
)
case("no_batch_for_workers", {**NO_BATCH, **OFTEN, "dataloader_num_workers": 1}, eval=lambda: toy.rows(4, 5))
case(
    "bf16_full_eval",
    {"bf16_full_eval": True},
    **{**BERT, "extra": lambda api: METRICS},
    after=lambda t: [t.evaluate(), t.predict(toy.labelled_blocks(7)).predictions],
)
case("bf16_evaluation_first", {"bf16": True}, before=evaluate_and_predict, after=evaluate_and_predict)
case("bert", {**EVAL, "weight_decay": 0.1}, **BERT, extra=lambda api: METRICS)

WORDS = {"model": toy.tiny_bert, "train": toy.tokenized, "eval": lambda: toy.tokenized(11)}
case(
    "with_a_tokenizer",
    {**EVAL, "save_strategy": "epoch", "train_sampling_strategy": "group_by_length"},
    **WORDS,
    extra=lambda api: {**METRICS, "processing_class": toy.tiny_tokenizer()},
)
case(
    "collator_with_a_tokenizer",
    {"save_strategy": "epoch", "save_only_model": True},
    **WORDS,
    extra=lambda api: {"data_collator": __import__("transformers").DataCollatorWithPadding(toy.tiny_tokenizer())},
)

# Saving --------------------------------------------------------------------------------------------------------------
SAVE = {"save_strategy": "steps", "save_steps": 4}
case("save_steps", {**SAVE, "gradient_accumulation_steps": 2})
case("save_epochs", {"save_strategy": "epoch"})
case("save_limit", {**SAVE, "save_total_limit": 2})
case(
    "save_limit_of_one_with_best",
    {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "num_train_epochs": 4,
        "learning_rate": 0.2,
    },
)
case("save_best", {"save_strategy": "best", "metric_for_best_model": "accuracy", **EVAL}, extra=lambda api: METRICS)
case("save_model_only", {**SAVE, "save_only_model": True})
case(
    "load_best",
    {
        **SAVE,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
        "metric_for_best_model": "eval_accuracy",
    },
    extra=lambda api: METRICS,
)
case("save_language_model", {**SAVE}, **LM)

# Callbacks -----------------------------------------------------------------------------------------------------------


def callback(**methods):
    """Extra keywords with a callback that has these methods."""

    def make(api):
        return {"callbacks": [type("Own", (api.TrainerCallback,), methods)()]}

    return make


def _stop_at(step):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step:
            control.should_training_stop = True

    return on_step_end


def _flags_now(self, args, state, control, **kwargs):
    if state.global_step in (3, 8):
        control.should_log = control.should_evaluate = control.should_save = True
    return control


def _leave_epoch(self, args, state, control, **kwargs):
    if state.global_step % 3 == 2:
        control.should_epoch_stop = True


def _stop_within_window(self, args, state, control, **kwargs):
    if state.global_step == 2:
        control.should_training_stop = True


def _replace_control(self, args, state, control, **kwargs):
    import copy

    new = copy.copy(control)
    new.should_log = state.global_step % 2 == 1
    return new


def _stop_after_epoch(self, args, state, control, **kwargs):
    control.should_training_stop = state.epoch >= 1


def _undo_stop(self, args, state, control, **kwargs):
    if state.epoch < 2.9:
        control.should_training_stop = False


case("stop_after_ten_steps", {**EVAL, **SAVE}, extra=callback(on_step_end=_stop_at(10)))
case("flags_of_a_callback", {"logging_strategy": "no"}, extra=callback(on_step_end=_flags_now))
case("flags_at_substeps", {"gradient_accumulation_steps": 3}, extra=callback(on_substep_end=_flags_now))
case(
    "epoch_stop",
    {"num_train_epochs": 4, "gradient_accumulation_steps": 2, **EVAL},
    extra=callback(on_step_end=_leave_epoch),
)
case("epoch_stop_at_begin", {"num_train_epochs": 3}, extra=callback(on_step_begin=_leave_epoch))
case(
    "stop_within_a_window",
    {"gradient_accumulation_steps": 3, **EVAL},
    extra=callback(on_substep_end=_stop_within_window),
)
case("stop_after_an_epoch", {"num_train_epochs": 3}, extra=callback(on_epoch_end=_stop_after_epoch))
case(
    "stop_at_train_begin",
    {},
    extra=callback(
        on_train_begin=lambda self, args, state, control, **kw: setattr(control, "should_training_stop", True)
    ),
)
case("stop_taken_back", {"num_train_epochs": 3}, extra=callback(on_step_end=_stop_at(4), on_epoch_end=_undo_stop))
case("control_replaced", {}, extra=callback(on_step_end=_replace_control))
case(
    "early_stopping",
    {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 12,
        "learning_rate": 0.3,
        "load_best_model_at_end": True,
    },
    extra=lambda api: {"callbacks": [api.EarlyStoppingCallback(2, 0.001)]},
)
case(
    "early_stopping_without_best",
    {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "accuracy"},
    extra=lambda api: {**METRICS, "callbacks": [api.EarlyStoppingCallback()]},
)


def _evaluate_in_between(api):
    class Extra(api.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                self.found = [
                    self.trainer.evaluate(toy.rows(7, 9), metric_key_prefix="extra"),
                    self.trainer.predict(toy.rows(6, 9)).metrics,
                ]

    return {"callbacks": [Extra()], **METRICS}


def _give_trainer(trainer):
    for candidate in trainer.callback_handler.callbacks:
        candidate.trainer = trainer


case("evaluation_from_a_callback", {**EVAL}, extra=_evaluate_in_between, before=_give_trainer)


def _without_flow(trainer):
    trainer.pop_callback(
        next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "DefaultFlowCallback")
    )


case("without_the_default_flow", {"max_steps": 3}, before=_without_flow)

# Overrides -----------------------------------------------------------------------------------------------------------


def subclass(**methods):
    return lambda api: type("OwnTrainer", (api.Trainer,), {name: make(api) for name, make in methods.items()})


def _weighted_loss(api):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0], device=labels.device)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=weight)
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _scaled_step(api):
    def training_step(self, *args, **kwargs):
        return api.Trainer.training_step(self, *args, **kwargs) * 2

    return training_step


def _plain_loader(api):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=6, shuffle=True, collate_fn=self.data_collator)

    return get_train_dataloader


def _plain_eval_loader(api):
    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(eval_dataset or self.eval_dataset, batch_size=6, collate_fn=self.data_collator)

    return get_eval_dataloader


def _prepared_loader(api):
    def get_train_dataloader(self):
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=6, shuffle=True, collate_fn=self.data_collator)
        )

    return get_train_dataloader


def _more_logs(api):
    def log(self, logs, start_time=None):
        logs["training_mode"] = self.model.training
        api.Trainer.log(self, logs, start_time)

    return log


def _own_optimizer(api):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        return self.optimizer

    return create_optimizer


def _argmax_predictions(api):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = api.Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        return loss, None if logits is None else torch.nn.functional.one_hot(logits.argmax(-1), 3), labels

    return prediction_step


def _reversed_sampler(api):
    def _get_train_sampler(self, train_dataset=None):
        return list(reversed(range(len(self.train_dataset))))

    return _get_train_sampler


case("weighted_loss", {"gradient_accumulation_steps": 2, **EVAL}, trainer=subclass(compute_loss=_weighted_loss))
case("training_step_wrapped", {"gradient_accumulation_steps": 2}, trainer=subclass(training_step=_scaled_step))
case("own_train_loader", {"gradient_accumulation_steps": 2}, trainer=subclass(get_train_dataloader=_plain_loader))
case("own_eval_loader", {**EVAL}, trainer=subclass(get_eval_dataloader=_plain_eval_loader), extra=lambda api: METRICS)
case("own_prepared_loader", {**EVAL}, trainer=subclass(get_train_dataloader=_prepared_loader))
case("log_overridden", {**EVAL}, trainer=subclass(log=_more_logs))
case("create_optimizer_overridden", {}, trainer=subclass(create_optimizer=_own_optimizer))
case(
    "prediction_step_overridden",
    {**EVAL},
    trainer=subclass(prediction_step=_argmax_predictions),
    extra=lambda api: METRICS,
)
case("sampler_overridden", {"gradient_accumulation_steps": 2}, trainer=subclass(_get_train_sampler=_reversed_sampler))

# Several calls -------------------------------------------------------------------------------------------------------


def _train_again(trainer):
    trainer.train_dataset = toy.rows(30, seed=15)
    return [trainer.train().training_loss, trainer.evaluate()]


def _resume(step):
    def resume(trainer):
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}")
        return [trainer.evaluate()]

    return resume


case("train_twice", {**EVAL}, after=_train_again)
case("resume_within_an_epoch", {**SAVE, "gradient_accumulation_steps": 2, "num_train_epochs": 3}, after=_resume(4))
case(
    "resume_at_an_epoch_end",
    {"save_strategy": "epoch", "gradient_accumulation_steps": 2, "num_train_epochs": 3},
    after=_resume(7),
)
case(
    "resume_early_stopping",
    {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 5,
        "learning_rate": 0.3,
        "load_best_model_at_end": True,
        "restore_callback_states_from_checkpoint": True,
    },
    extra=lambda api: {"callbacks": [api.EarlyStoppingCallback(2)]},
    after=_resume(26),
)
case(
    "resume_last_ignoring_data",
    {**SAVE, "ignore_data_skip": True},
    after=lambda t: t.train(resume_from_checkpoint=True).training_loss,
)

from helpers.parity import (
    field_cases,  # noqa: F401 - adds those of single fields
    metric_cases,  # noqa: F401 - adds those of every kind of metric
    model_cases,  # noqa: F401 - adds those that change the model
    seq2seq_cases,  # noqa: F401 - adds those of Seq2SeqTrainer
)
