"""Train on a stream without a length: `max_steps` says where it ends."""

from dataclasses import dataclass
from pydoc_data.topics import topics

from datasets import IterableDataset
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments(TrainingArguments):
    max_steps: int = 12
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    learning_rate: float = 5e-3
    warmup_steps: float = 3
    logging_steps: float = 3
    save_steps: float = 6
    adam_beta2: float = 0.95


(args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()


def read_lines():
    for name in sorted(topics):
        for line in topics[name].splitlines():
            if len(line) > 40:
                yield {"text": line.strip()}


stream = IterableDataset.from_generator(read_lines).shuffle(seed=args.seed, buffer_size=100)
stream = stream.map(lambda row: tokenizer(row["text"], truncation=True, max_length=32), remove_columns=["text"])
config = GPTNeoXConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
trainer = Trainer(
    model=GPTNeoXForCausalLM(config),
    args=args,
    train_dataset=stream,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model()
