from dataclasses import dataclass

from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    model: str = "x"
    use_cache: bool = False


model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
Trainer(None, training_args).train()
