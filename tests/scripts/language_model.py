"""Train a small GPT-2 on Python's documentation, in blocks of bytes."""

import argparse
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="language_model")
parser.add_argument("--learning_rate", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=42)
options = parser.parse_args()

set_seed(options.seed)
tokenizer = ByT5Tokenizer()
config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2)
config.eos_token_id = config.bos_token_id = tokenizer.eos_token_id


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=2048, return_attention_mask=False)


def into_blocks(rows):
    joined = [token for ids in rows["input_ids"] for token in ids]
    return {"input_ids": [joined[start : start + 64] for start in range(0, len(joined) - 63, 64)]}


texts = Dataset.from_dict({"text": [topics[name] for name in sorted(topics)[:8]]})
blocks = texts.map(tokenize, batched=True, remove_columns=["text"]).map(into_blocks, batched=True)
split = blocks.train_test_split(test_size=24, seed=options.seed)

args = TrainingArguments(
    output_dir=options.output_dir,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=options.learning_rate,
    seed=options.seed,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
    num_train_epochs=1,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=8,
    save_steps=8,
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model()
print(trainer.evaluate())
