"""Trainers of sentence-transformers and SetFit, small."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict

from sweeps.libraries import toys

TRAIN, EVAL = 60, 12


def pairs(count: int, start: int = 0) -> Dataset:
    rows = toys.preferences(count, start)
    return Dataset.from_list([{"anchor": row["prompt"], "positive": row["chosen"]} for row in rows])


def triplets(count: int, start: int = 0) -> Dataset:
    rows = toys.preferences(count, start)
    return Dataset.from_list([{"a": row["prompt"], "b": row["chosen"], "c": row["rejected"]} for row in rows])


def scored(count: int, start: int = 0) -> Dataset:
    rows = toys.judged(count, start)
    names = ("sentence1", "sentence2", "label")
    return Dataset.from_list(
        [dict(zip(names, (r["prompt"], r["completion"], float(r["label"])), strict=True)) for r in rows]
    )


def encoder(models: Path):
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    return SentenceTransformer(str(models / "bert"), device="cpu")


def sentence(models: Path, args: dict, loss: str, rows=pairs, evaluates=False, adapter=False, wrap=None, **options):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
    from sentence_transformers.sentence_transformer.evaluation import TripletEvaluator

    model = encoder(models)
    if adapter:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=4, lora_dropout=0.1, target_modules=["query", "value"]))
    made = getattr(losses, loss)(model)
    data: dict[str, Any] = {"train_dataset": rows(TRAIN), "eval_dataset": rows(EVAL, TRAIN)}
    if evaluates:
        tested = triplets(EVAL, TRAIN)
        data["evaluator"] = TripletEvaluator(list(tested["a"]), list(tested["b"]), list(tested["c"]), name="held out")
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**args, **options),
        loss=getattr(losses, wrap)(model, made, [32, 16]) if wrap else made,
        **data,
    )


def several_sets(models: Path, args: dict):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    model = encoder(models)
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**args, multi_dataset_batch_sampler="round_robin"),
        train_dataset=DatasetDict(pairs=pairs(TRAIN), scored=scored(TRAIN)),
        eval_dataset=DatasetDict(pairs=pairs(EVAL, TRAIN), scored=scored(EVAL, TRAIN)),
        loss={"pairs": losses.MultipleNegativesRankingLoss(model), "scored": losses.CosineSimilarityLoss(model)},
    )


def loss_with_parameters(models: Path, args: dict):
    """Train a loss that has weights of its own, which only the optimizer knows besides the model's."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    model = encoder(models)
    rows = [{"a": r["sentence1"], "b": r["sentence2"], "label": int(r["label"])} for r in scored(TRAIN + EVAL)]
    loss = losses.SoftmaxLoss(model, sentence_embedding_dimension=32, num_labels=2)
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**args),
        train_dataset=Dataset.from_list(rows[:TRAIN]),
        eval_dataset=Dataset.from_list(rows[TRAIN:]),
        loss=loss,
    )


def cross(models: Path, args: dict):
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    torch.manual_seed(0)
    model = CrossEncoder(str(models / "bert"), num_labels=1, device="cpu")
    return CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(**args),
        train_dataset=scored(TRAIN),
        eval_dataset=scored(EVAL, TRAIN),
        loss=BinaryCrossEntropyLoss(model),
    )


def sparse(models: Path, args: dict):
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    torch.manual_seed(0)
    model = SparseEncoder(str(models / "masked"), device="cpu")
    return SparseEncoderTrainer(
        model=model,
        args=SparseEncoderTrainingArguments(**args),
        train_dataset=pairs(TRAIN),
        eval_dataset=pairs(EVAL, TRAIN),
        loss=SpladeLoss(
            model,
            SparseMultipleNegativesRankingLoss(model),
            document_regularizer_weight=3e-3,
            query_regularizer_weight=3e-3,
        ),
    )


class SetFitRun:
    """SetFit's Trainer, which holds a Trainer of sentence-transformers, with the members that the worker asks for."""

    def __init__(self, models: Path, args: dict, **options: Any) -> None:
        from setfit import SetFitModel, Trainer, TrainingArguments

        torch.manual_seed(0)
        rows = [{"text": r["sentence1"] + r["sentence2"], "label": int(r["label"])} for r in scored(32)]
        names = ("logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "report_to", "seed")
        self.trainer = Trainer(
            model=SetFitModel.from_pretrained(str(models / "bert"), device="cpu"),
            args=TrainingArguments(
                output_dir=args["output_dir"],
                batch_size=4,
                max_steps=args["max_steps"],
                body_learning_rate=1e-3,
                show_progress_bar=False,
                **{name: args[name] for name in names},
                **options,
            ),
            train_dataset=Dataset.from_list(rows[:24]),
            eval_dataset=Dataset.from_list(rows[24:]),
            metric=lambda found, wanted: {
                "accuracy": float((torch.as_tensor(found) == torch.as_tensor(wanted)).float().mean())
            },
        )
        self.model = self.trainer.model.model_body
        self.state = self.trainer.st_trainer.state
        self.engine = self.trainer.st_trainer

    def train(self) -> None:
        self.trainer.train()
        self.state = self.trainer.st_trainer.state

    def evaluate(self) -> dict:
        found = self.trainer.evaluate()
        return found | {"head": self.trainer.model.model_head.coef_.tolist()}


SENTENCES = {
    "st-mnrl": (
        "SentenceTransformerTrainer",
        "pairs, in-batch negatives",
        partial(sentence, loss="MultipleNegativesRankingLoss"),
    ),
    "st-evaluator": (
        "SentenceTransformerTrainer",
        "triplets, evaluator, no duplicates in a batch",
        partial(sentence, loss="TripletLoss", rows=triplets, evaluates=True, batch_sampler="no_duplicates"),
    ),
    "st-matryoshka": (
        "SentenceTransformerTrainer",
        "Matryoshka loss",
        partial(sentence, loss="MultipleNegativesRankingLoss", wrap="MatryoshkaLoss"),
    ),
    "st-cached": (
        "SentenceTransformerTrainer",
        "cached gradients",
        partial(sentence, loss="CachedMultipleNegativesRankingLoss"),
    ),
    "st-lora": (
        "SentenceTransformerTrainer",
        "LoRA",
        partial(sentence, loss="MultipleNegativesRankingLoss", adapter=True),
    ),
    "st-sets": ("SentenceTransformerTrainer", "two data sets, two losses", several_sets),
    "st-softmax": ("SentenceTransformerTrainer", "loss with parameters", loss_with_parameters),
    "st-cross": ("CrossEncoderTrainer", "binary cross entropy", cross),
    "st-sparse": ("SparseEncoderTrainer", "SPLADE loss", sparse),
}
SETFIT = {"setfit": ("Trainer", "embeddings, then a head", SetFitRun)}
