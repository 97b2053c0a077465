"""Find the words of Python's documentation that are code: a label for each byte."""

import keyword
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForTokenClassification,
    ByT5Tokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments(TrainingArguments):
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 1
    learning_rate: float = 2e-3
    logging_steps: float = 2
    eval_strategy: str = "steps"
    eval_steps: float = 5
    save_strategy: str = "no"
    train_sampling_strategy: str = "group_by_length"


(args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()


def is_code(word):
    return keyword.iskeyword(word.strip('".,:')) or "_" in word or "(" in word


def prepare(row):
    ids, labels = [], []
    for word in row["words"]:
        bytes_of_word = tokenizer(word + " ", add_special_tokens=False)["input_ids"]
        ids += bytes_of_word
        labels += [int(is_code(word))] * (len(bytes_of_word) - 1) + [-100]
    return {"input_ids": ids[:64], "labels": labels[:64]}


lines = [line.split() for line in topics["specialnames"].splitlines() if len(line) > 20]
data = Dataset.from_dict({"words": lines[:120]}).map(prepare, remove_columns=["words"])
split = data.train_test_split(test_size=20, seed=1)
names = {0: "text", 1: "code"}
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    id2label=names,
    label2id={name: label for label, name in names.items()},
)


def metrics(prediction):
    logits, labels = prediction
    counted = labels != -100
    hits = (np.argmax(logits, axis=-1) == labels)[counted]
    return {"accuracy": hits.mean(), "code": int((labels == 1).sum())}


trainer = Trainer(
    model=BertForTokenClassification(config),
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorForTokenClassification(tokenizer),
    processing_class=tokenizer,
    compute_metrics=metrics,
)
trainer.train()
predictions, labels, _ = trainer.predict(split["test"])
print("code found:", int((np.argmax(predictions, axis=-1) == 1)[labels != -100].sum()))
trainer.save_model()
