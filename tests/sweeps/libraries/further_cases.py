"""Trainers of libraries for retrieval, entities and time series, and of one for adaptive losses, small."""

from __future__ import annotations

import importlib
import json
import random
from functools import partial
from pathlib import Path

import numpy
import torch

from sweeps.libraries import toys

TRAIN, EVAL = 60, 12


def retrieval_files(folder: Path, scores: bool) -> list[str]:
    """Write two files of queries with passages, as FlagEmbedding reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in range(2):
        lines = []
        for row in toys.preferences(TRAIN, number * TRAIN):
            line = {"query": row["prompt"], "pos": [row["chosen"]], "neg": [row["rejected"], row["prompt"][::-1]]}
            lines.append(json.dumps(line | ({"pos_scores": [0.9], "neg_scores": [0.2, 0.1]} if scores else {})))
        path = folder / f"{number}.jsonl"
        path.write_text("\n".join(lines))
        written.append(str(path))
    return written


def flag_embedding(models: Path, args: dict, kind: str, data=None, scores=False, **options):
    """Make the Trainer that FlagEmbedding's runner makes."""
    package = importlib.import_module(f"FlagEmbedding.finetune.{kind}")
    names = {
        "embedder.encoder_only.base": ("AbsEmbedder", "AbsEmbedder", "EncoderOnlyEmbedderRunner"),
        "embedder.encoder_only.m3": ("EncoderOnlyEmbedderM3", "AbsEmbedder", "EncoderOnlyEmbedderM3Runner"),
        "reranker.encoder_only.base": ("AbsReranker", "AbsReranker", "EncoderOnlyRerankerRunner"),
    }[kind]
    abstract = importlib.import_module(f"FlagEmbedding.abc.finetune.{kind.split('.')[0]}")

    def found(name):
        return getattr(package, name, None) or getattr(abstract, name)

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    args = args | {"eval_strategy": "no"}
    place = Path(args["output_dir"]).parent / "data"
    runner = found(names[2])(
        model_args=found(f"{names[0]}ModelArguments")(model_name_or_path=str(models / "bert")),
        data_args=found(f"{names[1]}DataArguments")(
            train_data=retrieval_files(place, scores), train_group_size=2, knowledge_distillation=scores, **(data or {})
        ),
        training_args=found(f"{names[0]}TrainingArguments")(**args, **options),
    )
    runner.tokenizer.eos_token = "[SEP]"  # M3 leaves it out of its sparse vectors
    return runner.trainer


def gliner(models: Path, args: dict, **options):
    from gliner import GLiNER, GLiNERConfig
    from gliner.training import Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GLiNERConfig(
        model_name=str(models / "bert"), hidden_size=32, max_width=4, dropout=0.1, num_rnn_layers=1, has_rnn=True
    )
    model = GLiNER.from_config(config)

    def rows(count, start=0):
        found = []
        for row in toys.texts(count, start):
            words = row["text"].split()[:12]
            spans = [[n, n, "long" if len(w) % 2 else "odd"] for n, w in enumerate(words) if len(w) > 6]
            found.append({"tokenized_text": words, "ner": spans})
        return found

    return Trainer(
        model=model,
        args=TrainingArguments(**{**args, **options}),
        train_dataset=rows(TRAIN),
        eval_dataset=rows(EVAL, TRAIN),
        processing_class=model.data_processor.transformer_tokenizer,
        data_collator=model._create_data_collator(),
    )


def chronos(models: Path, args: dict):
    """Fine-tune a small Chronos 2, which hands its loaders whole batches from a stream without an end."""
    from chronos.chronos2 import Chronos2Model
    from chronos.chronos2.config import Chronos2CoreConfig
    from chronos.chronos2.dataset import Chronos2Dataset, DatasetMode
    from chronos.chronos2.trainer import Chronos2Trainer, EvaluateAndSaveFinalStepCallback
    from transformers import TrainingArguments

    config = Chronos2CoreConfig(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.1, vocab_size=2,
        chronos_config={
            "context_length": 32, "output_patch_size": 4, "input_patch_size": 4, "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True, "use_arcsinh": True, "max_output_patches": 4,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    numpy.random.seed(0)
    model = Chronos2Model(config)
    series = [numpy.sin(numpy.arange(60) / (2 + n)).astype("float32") for n in range(12)]
    sizes = {"context_length": 24, "prediction_length": 8, "batch_size": 4, "output_patch_size": 4}
    return Chronos2Trainer(
        model=model,
        args=TrainingArguments(
            **{**args, "eval_steps": 5},
            prediction_loss_only=True,
            load_best_model_at_end=True,
            label_names=["future_target"],
        ),
        train_dataset=Chronos2Dataset(inputs=series, min_past=8, mode=DatasetMode.TRAIN, **sizes),
        eval_dataset=Chronos2Dataset(inputs=series[:5], mode=DatasetMode.VALIDATION, **sizes),
        callbacks=[EvaluateAndSaveFinalStepCallback()],
    )


def time_series(models: Path, args: dict):
    """Train granite's TinyTimeMixer with its callback and the schedule that its notebooks hand over."""
    import pandas
    from torch.optim.lr_scheduler import OneCycleLR
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
    from tsfm_public import ForecastDFDataset, TinyTimeMixerConfig, TinyTimeMixerForPrediction, TrackingCallback

    torch.manual_seed(0)
    config = TinyTimeMixerConfig(
        context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=8, num_layers=1,
        decoder_num_layers=1, decoder_d_model=8, num_input_channels=2, dropout=0.1, head_dropout=0.1,
    )  # fmt: skip
    model = TinyTimeMixerForPrediction(config)
    ticks = numpy.arange(120)
    frame = pandas.DataFrame({"time": ticks, "a": numpy.sin(ticks / 3), "b": numpy.cos(ticks / 5)})

    def rows(part):
        return ForecastDFDataset(
            part, timestamp_column="time", target_columns=["a", "b"], context_length=16, prediction_length=4
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Trainer(
        model=model,
        args=TrainingArguments(
            **{**args, "save_steps": 5, "eval_steps": 5},
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        ),
        train_dataset=rows(frame[:80]),
        eval_dataset=rows(frame[80:]),
        callbacks=[TrackingCallback(), EarlyStoppingCallback(early_stopping_patience=10)],
        optimizers=(optimizer, OneCycleLR(optimizer, 1e-3, total_steps=30)),
    )


def adaptive(models: Path, args: dict):
    from adaptive_trainer import trainers

    from sweeps.libraries import other_cases

    name = next(n for n in dir(trainers) if n.endswith("Trainer") and n != "Trainer")
    return other_cases.language_trainer(models, args, trainer_class=getattr(trainers, name))


BASE = "embedder.encoder_only.base"
SELF_DISTILLED = {"unified_finetuning": True, "use_self_distill": True, "self_distill_start_step": 5}
FLAG_EMBEDDING = {
    "flag-base": ("AbsEmbedderTrainer", "negatives in the batch", partial(flag_embedding, kind=BASE)),
    "flag-same": (
        "AbsEmbedderTrainer",
        "one file a batch, refreshed each epoch",
        partial(flag_embedding, kind=BASE, data={"same_dataset_within_batch": True}),
    ),
    "flag-distilled": (
        "AbsEmbedderTrainer",
        "distillation",
        partial(flag_embedding, kind=BASE, scores=True, kd_loss_type="kl_div"),
    ),
    "flag-m3": (
        "EncoderOnlyEmbedderM3Trainer",
        "three kinds of vectors, self-distillation",
        partial(flag_embedding, kind="embedder.encoder_only.m3", **SELF_DISTILLED),
    ),
    "flag-reranker": (
        "AbsRerankerTrainer",
        "cross encoder",
        partial(flag_embedding, kind="reranker.encoder_only.base"),
    ),
}
GLINER = {
    "gliner": ("Trainer", "own steps, loaders and files", gliner),
    "gliner-rates": (
        "Trainer",
        "two learning rates, best model",
        partial(gliner, others_lr=1e-2, load_best_model_at_end=True, eval_steps=5),
    ),
}
CHRONOS = {"chronos": ("Chronos2Trainer", "batches from a stream, best model", chronos)}
TSFM = {"tsfm": ("Trainer", "TinyTimeMixer, its callback, one cycle, best model", time_series)}
ADAPTIVE = {"adaptive": ("AdaptiveTrainer", "own loss and its own optimizer", adaptive)}
