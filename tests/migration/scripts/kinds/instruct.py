from dataclasses import dataclass, field
from typing import Optional

import transformers
from transformers import Trainer


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: Optional[str] = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=512)


def safe_save_model_for_hf_trainer(trainer: transformers.Trainer, output_dir: str):
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        trainer._save(output_dir, state_dict={key: value.cpu() for key, value in state_dict.items()})


def train():
    (training_args,) = transformers.HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained("x", cache_dir=training_args.cache_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained("x")
    trainer = Trainer(model=model, tokenizer=tokenizer, args=training_args)
    trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer=trainer, output_dir=training_args.output_dir)
