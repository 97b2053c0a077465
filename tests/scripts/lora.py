"""Fine-tune a language model with LoRA: only the adapter is trained and saved."""

from dataclasses import dataclass
from pydoc_data.topics import topics

from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments(TrainingArguments):
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    num_train_epochs: float = 1
    learning_rate: float = 1e-2
    logging_steps: float = 1
    save_steps: float = 5
    gradient_checkpointing: bool = True


(args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = ByT5Tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=tokenizer.pad_token_id,
)
lora = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(LlamaForCausalLM(config), lora)
model.print_trainable_parameters()

lines = [line.strip() for line in topics["typesseq"].splitlines() if len(line) > 30]
data = Dataset.from_dict({"text": lines[:60]})
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model()
