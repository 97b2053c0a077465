"""Accumulate gradients where the last window of an epoch is shorter than the others."""

from dataclasses import dataclass
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ByT5Tokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments(TrainingArguments):
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 4
    num_train_epochs: float = 3
    learning_rate: float = 3e-3
    logging_steps: float = 1
    logging_first_step: bool = True
    save_strategy: str = "epoch"
    include_num_input_tokens_seen: str = "non_padding"


(args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)


class Unmasking(DataCollatorWithPadding):
    """Hides every fifth byte, and asks for it."""

    def __call__(self, features):
        batch = super().__call__(features)
        labels = batch["input_ids"].clone()
        labels[:, [i for i in range(labels.shape[1]) if i % 5]] = -100
        labels[labels == tokenizer.pad_token_id] = -100
        batch["input_ids"] = batch["input_ids"].masked_fill(labels != -100, tokenizer.unk_token_id)
        return {**batch, "labels": labels}


lines = [line.strip() for line in topics["formatstrings"].splitlines() if len(line) > 20]
data = Dataset.from_dict({"text": lines[:54]})  # 14 batches: windows of 4, 4, 4 and 2
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=40), remove_columns=["text"])
trainer = Trainer(
    model=BertForMaskedLM(config),
    args=args,
    train_dataset=data,
    data_collator=Unmasking(tokenizer),
    processing_class=tokenizer,
)
print(trainer.train().metrics)
trainer.save_model()
