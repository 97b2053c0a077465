#!/usr/bin/env python
"""Sequence classification, in the style of transformers 4.19."""
# You can also adapt this script on your own text classification task.

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Optional

import datasets
import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PretrainedConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.versions import require_version

require_version("datasets>=1.8.0", "To fix: pip install -r requirements.txt")

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """
    Arguments pertaining to which model we are going to fine-tune from.
    """

    hidden_size: int = field(default=8, metadata={"help": "Width."})
    cache_dir: Optional[str] = field(default=None, metadata={"help": "Where."})


@dataclass
class OurTrainingArguments(TrainingArguments):
    evaluation_strategy: str = field(default="epoch", metadata={"help": "When to evaluate."})
    no_cuda: bool = True


def main():
    parser = HfArgumentParser((ModelArguments, OurTrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, training_args = parser.parse_args_into_dataclasses()

    logging.basicConfig(format="%(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"Process rank: {training_args.local_rank}, device: {training_args.device}, n_gpu: {training_args.n_gpu}"
        + f"distributed training: {bool(training_args.local_rank != -1)}, 16-bits training: {training_args.fp16}"
    )

    # Detecting last checkpoint.
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train and not training_args.overwrite_output_dir:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is None and len(os.listdir(training_args.output_dir)) > 0:
            raise ValueError("Use --overwrite_output_dir to overcome.")

    set_seed(training_args.seed)
    rows = [{"input_ids": [1, 2 + n % 5, 3], "attention_mask": [1, 1, 1], "label": n % 2} for n in range(16)]
    data = datasets.Dataset.from_list(rows)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=16,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    assert isinstance(config, PretrainedConfig) and DataCollatorWithPadding is not None
    model = AutoModelForSequenceClassification.from_config(config)

    def compute_metrics(p: EvalPrediction):
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        return {"accuracy": (np.argmax(preds, axis=1) == p.label_ids).astype(np.float32).mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data if training_args.do_train else None,
        eval_dataset=data if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        tokenizer=None,
        data_collator=default_data_collator,
    )

    if training_args.do_train:
        checkpoint = None
        if training_args.resume_from_checkpoint is not None:
            checkpoint = training_args.resume_from_checkpoint
        elif last_checkpoint is not None:
            checkpoint = last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(data)
        trainer.save_model()  # Saves the tokenizer too for easy upload
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.evaluation_strategy != "no" and trainer.tokenizer is None:
        metrics = trainer.evaluate(eval_dataset=data)
        trainer.log_metrics("eval", metrics)
    print("done", trainer.state.global_step, torch.cuda.is_available() and not training_args.no_cuda)


def _mp_fn(index):
    # For xla_spawn (TPUs)
    main()


if __name__ == "__main__":
    main()
