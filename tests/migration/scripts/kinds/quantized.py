from dataclasses import dataclass, field

import transformers
from transformers import Seq2SeqTrainer


@dataclass
class TrainingArguments(transformers.Seq2SeqTrainingArguments):
    max_memory_MB: int = field(default=80000)
    report_to: str = field(default="none")
    group_by_length: bool = field(default=True)
    warmup_ratio: float = field(default=0.03)
    evaluation_strategy: str = field(default="steps")


class SavePeftModelCallback(transformers.TrainerCallback):
    def on_save(self, args, state, control, tokenizer, **kwargs):
        kwargs["model"].save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)


training_args = transformers.HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()[0]
trainer = Seq2SeqTrainer(model=None, tokenizer=None, args=training_args, callbacks=[SavePeftModelCallback])
