"""The runs that `kill.py --shape NAME` kills: one for each way of training that keeps something of its own."""

from __future__ import annotations

from collections.abc import Callable

import hf_compat
from helpers import toy
from helpers.parity import model_cases, seq2seq_cases

SHAPES: dict[str, Callable[[str], hf_compat.Trainer]] = {}
Shape = Callable[[str], hf_compat.Trainer]


def shape(build: Shape) -> Shape:
    SHAPES[build.__name__] = build
    return build


def arguments(folder: str, kind: type = hf_compat.TrainingArguments, **more) -> hf_compat.TrainingArguments:
    """Return arguments of a run that saves at every update and evaluates at each third."""
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 4, "use_cpu": True,
        "learning_rate": 1e-2, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 1,
        "save_total_limit": 3, "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    return kind(folder, **{**settings, **more})


def classifier(args: hf_compat.TrainingArguments, **more) -> hf_compat.Trainer:
    parts = {"train_dataset": toy.rows(50), "eval_dataset": toy.rows(9, 5), **more}
    return hf_compat.Trainer(toy.Classifier(), args, **parts)


@shape
def plain(folder: str) -> hf_compat.Trainer:
    return hf_compat.Trainer(
        toy.Tagger(),
        arguments(folder),
        train_dataset=toy.sequences(50),
        eval_dataset=toy.sequences(9, 5),
        data_collator=toy.mask_at_random,  # draws random numbers, one batch ahead
    )


class Overridden(hf_compat.Trainer):
    """Takes part in writing, so its checkpoints are written in place."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        with open(f"{output_dir}.txt", "a") as file:
            file.write("beside")


@shape
def overridden(folder: str) -> hf_compat.Trainer:
    parts = {"train_dataset": toy.rows(50), "eval_dataset": toy.rows(9, 5)}
    return Overridden(toy.Classifier(), arguments(folder), **parts)


@shape
def seq2seq(folder: str) -> hf_compat.Trainer:
    options = {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2}
    return hf_compat.Seq2SeqTrainer(
        seq2seq_cases.tiny_t5(),
        arguments(folder, hf_compat.Seq2SeqTrainingArguments, num_train_epochs=2, **options),
        train_dataset=seq2seq_cases.pairs(40),
        eval_dataset=seq2seq_cases.pairs(6, 5),
        data_collator=seq2seq_cases.pad_pairs,
        compute_metrics=lambda found: {"tokens": float((found.predictions > 1).sum())},
    )


@shape
def adapters(folder: str) -> hf_compat.Trainer:
    data = {"train_dataset": toy.blocks(40), "eval_dataset": toy.blocks(6, 5)}
    return hf_compat.Trainer(model_cases.lora(), arguments(folder), **data)


@shape
def best_model(folder: str) -> hf_compat.Trainer:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_steps": 1, "learning_rate": 0.05}

    def accuracy(found):
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    # without it a resumed run counts its patience anew, here as under transformers
    args = arguments(folder, **best, num_train_epochs=10, restore_callback_states_from_checkpoint=True)
    stops = [hf_compat.EarlyStoppingCallback(early_stopping_patience=8)]
    return classifier(args, compute_metrics=accuracy, callbacks=stops)


@shape
def async_save(folder: str) -> hf_compat.Trainer:
    return classifier(arguments(folder, async_save=True))


@shape
def several_sets(folder: str) -> hf_compat.Trainer:
    return classifier(arguments(folder), eval_dataset={"a": toy.rows(9, 5), "b": toy.rows(10, 6)})


@shape
def plateau_compiled(folder: str) -> hf_compat.Trainer:
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    return classifier(arguments(folder, **plateau, **compiled, metric_for_best_model="loss"))


@shape
def schedule_free(folder: str) -> hf_compat.Trainer:
    return classifier(arguments(folder, optim="schedule_free_adamw", lr_scheduler_type="constant", warmup_steps=3))


@shape
def kept_workers(folder: str) -> hf_compat.Trainer:
    kept = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "max_steps": 20}
    streams = {"train_dataset": toy.ShuffledStream(toy.rows(41)), "eval_dataset": toy.Stream(toy.rows(9, 5))}
    return classifier(arguments(folder, **kept), **streams)
