import logging
from dataclasses import dataclass, field

from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import check_min_version, send_example_telemetry

check_min_version("4.40.0")
logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="bert-base-cased")


def main():
    model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    # Tracking the example usage
    send_example_telemetry("run_glue", model_args)
    logger.warning(f"rank {training_args.local_rank}, distributed: {training_args.local_rank != -1}")
    last = get_last_checkpoint(training_args.output_dir)
    if last is not None and training_args.overwrite_output_dir:
        last = None
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path)
    trainer = Trainer(model=model, args=training_args, tokenizer=tokenizer)
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
