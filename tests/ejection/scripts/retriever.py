"""Train an encoder for retrieval: an own `_save` with names that only HF's trainer passes on, nested batches."""

import os
from dataclasses import dataclass, field

import torch
from texts import encoder, sentences
from torch import nn
from torch.utils.data import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer import TRAINING_ARGS_NAME, has_length, logger
from transformers.utils import ModelOutput


@dataclass
class RetrieverArguments(TrainingArguments):
    temperature: float = field(default=0.05, metadata={"help": "divides the scores"})
    pooling: str = field(default="cls", metadata={"help": "cls or mean"})


@dataclass
class Scores(ModelOutput):
    loss: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class Retriever(nn.Module):
    def __init__(self, language_model, pooling="cls", temperature=1.0):
        super().__init__()
        self.language_model = language_model
        self.pooling, self.temperature = pooling, temperature
        self.criterion = nn.CrossEntropyLoss()

    def embed(self, ids):
        hidden = self.language_model(**ids).last_hidden_state
        pooled = hidden.mean(1) if self.pooling == "mean" else hidden[:, 0]
        return nn.functional.normalize(pooled, dim=-1)

    def forward(self, question, answer):
        scores = self.embed(question) @ self.embed(answer).T / self.temperature
        return Scores(self.criterion(scores, torch.arange(len(scores), device=scores.device)), scores)

    def store(self, folder):
        self.language_model.save_pretrained(folder)


class Questions(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        ids = self.rows[place]["input_ids"]
        return ids[:6], ids[::-1]


@dataclass
class PairCollator:
    question_length: int = 5
    answer_length: int = 9

    def __call__(self, pairs):
        lengths = (self.question_length, self.answer_length)
        both = [torch.tensor([row[:size] for row in rows]) for rows, size in zip(zip(*pairs), lengths)]  # noqa: B905 - as scripts have it
        return {
            name: {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for name, ids in zip(("question", "answer"), both)  # noqa: B905 - as scripts have it
        }


class RetrieverTrainer(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        os.makedirs(output_dir, exist_ok=True)
        logger.info("model of %s rows goes to %s", has_length(self.train_dataset), output_dir)
        if not hasattr(self.model, "store"):
            raise NotImplementedError(f"{type(self.model).__name__} cannot be stored")
        self.model.store(output_dir)
        if self.processing_class is not None and self.is_world_process_zero():
            self.processing_class.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def main():
    (args,) = HfArgumentParser(RetrieverArguments).parse_args_into_dataclasses()
    args.per_device_train_batch_size = 4
    args.max_steps = 7
    args.save_steps = 4
    args.learning_rate = 5e-3
    args.logging_steps = 1
    args.remove_unused_columns = False
    set_seed(args.seed)
    trainer = RetrieverTrainer(
        model=Retriever(encoder(), pooling=args.pooling, temperature=args.temperature),
        args=args,
        train_dataset=Questions(sentences(24)),
        data_collator=PairCollator(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
