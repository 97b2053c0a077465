"""Teach a small Llama questions and answers with TRL's SFTTrainer; only answers count."""

import argparse
from pydoc_data.topics import topics

from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="instructions")
parser.add_argument("--completion_only", action="store_true")
options = parser.parse_args()

set_seed(5)
tokenizer = ByT5Tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=tokenizer.pad_token_id,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
questions = [
    {"prompt": f"What is {name}?", "completion": " " + " ".join(topics[name].split()[:8])} for name in sorted(topics)
]
split = Dataset.from_list(questions).train_test_split(test_size=15, seed=5)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        output_dir=options.output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        max_length=64,
        completion_only_loss=options.completion_only or None,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=split["train"],
    eval_dataset=split["test"],
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
