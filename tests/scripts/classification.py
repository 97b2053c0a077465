"""Tell which chapter a line of Python's documentation is from: accuracy and F1, the best model at the end."""

from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

CHAPTERS = ("specialnames", "formatstrings", "debugger")


@dataclass
class Options:
    lines: int = field(default=40, metadata={"help": "Lines of each chapter."})


@dataclass
class Arguments(TrainingArguments):
    per_device_train_batch_size: int = 16
    num_train_epochs: float = 2
    learning_rate: float = 1e-3
    logging_steps: float = 3
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = 1
    load_best_model_at_end: bool = True
    metric_for_best_model: str = "f1"


options, args = HfArgumentParser((Options, Arguments)).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()

rows = [
    {"text": line.strip(), "label": label}
    for label, chapter in enumerate(CHAPTERS)
    for line in [line for line in topics[chapter].splitlines() if len(line) > 30][: options.lines]
]
data = Dataset.from_list(rows).map(lambda row: tokenizer(row["text"], truncation=True, max_length=48))
split = data.train_test_split(test_size=0.25, seed=0)

config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=len(CHAPTERS),
)


def metrics(prediction):
    guesses = np.argmax(prediction.predictions, axis=-1)
    return {
        "accuracy": accuracy_score(prediction.label_ids, guesses),
        "f1": f1_score(prediction.label_ids, guesses, average="macro"),
    }


trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=metrics,
)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_state()
predicted = trainer.predict(split["test"])
trainer.log_metrics("test", predicted.metrics)
trainer.save_metrics("test", predicted.metrics)
