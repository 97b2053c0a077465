"""Train on several processes (`torchrun --nproc_per_node 2 two_processes.py`): data prepared once, metrics of all."""

import os
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorWithPadding,
    DistilBertConfig,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments(TrainingArguments):
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    num_train_epochs: float = 2
    learning_rate: float = 2e-3
    logging_steps: float = 2
    eval_strategy: str = "steps"
    eval_steps: float = 4
    save_strategy: str = "steps"
    save_steps: float = 4
    load_best_model_at_end: bool = True


(args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()
lines = [line.strip() for line in topics["customization"].splitlines() if len(line) > 20][:95]
data = Dataset.from_dict({"text": lines, "label": [int("object" in line) for line in lines]})
with args.main_process_first(desc="tokenising"):
    data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=40))
split = data.train_test_split(test_size=21, seed=2)
config = DistilBertConfig(
    vocab_size=len(tokenizer), dim=32, hidden_dim=64, n_layers=1, n_heads=2, max_position_embeddings=40
)


def metrics(prediction):
    hits = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {"accuracy": float(hits.mean()), "samples": len(hits)}


trainer = Trainer(
    model=AutoModelForSequenceClassification.from_config(config),
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=metrics,
)
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    print("processes:", os.environ.get("WORLD_SIZE", "1"), "best loss:", trainer.state.best_metric)
