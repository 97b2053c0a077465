"""Summarisation, as people's scripts do it: three dataclasses, JSON lines, a tokenizer, generation within training."""

import os
from dataclasses import dataclass, field

import datasets
import numpy as np
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Model and tokenizer."})


@dataclass
class DataArguments:
    data: str = field(metadata={"help": "Folder with train.jsonl and eval.jsonl."})
    source_prefix: str = field(default="w1 ", metadata={"help": "Goes before every text."})
    max_source_length: int = field(default=24, metadata={"help": "Tokens of a text."})
    val_max_target_length: int = field(default=9, metadata={"help": "Tokens of a summary in evaluations."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams of the last evaluation and of predictions."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict so many."})


parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
model_args, data_args, training_args = parser.parse_args_into_dataclasses()
set_seed(training_args.seed)
tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)
files = {split: os.path.join(data_args.data, f"{split}.jsonl") for split in ("train", "eval")}
raw = datasets.load_dataset("json", data_files=files, cache_dir=os.path.join(training_args.output_dir, "cache"))


def prepare(rows):
    texts = [data_args.source_prefix + text for text in rows["article"]]
    prepared = tokenizer(texts, max_length=data_args.max_source_length, truncation=True)
    targets = tokenizer(text_target=rows["highlights"], max_length=data_args.val_max_target_length, truncation=True)
    prepared["labels"] = targets["input_ids"]
    return prepared


with training_args.main_process_first(desc="tokenising"):
    data = raw.map(prepare, batched=True, remove_columns=["article", "highlights"])


def shared_words(prediction):
    generated, labels = prediction
    generated = generated[0] if isinstance(generated, tuple) else generated
    texts = [
        tokenizer.batch_decode(np.where(part != -100, part, tokenizer.pad_token_id), skip_special_tokens=True)
        for part in (generated, labels)
    ]
    shares = [len({*a.split()} & {*b.split()}) / max(len({*b.split()}), 1) for a, b in zip(*texts, strict=True)]
    lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in generated]
    return {"shared": round(float(np.mean(shares)), 4), "gen_len": float(np.mean(lengths))}


training_args.generation_max_length = training_args.generation_max_length or data_args.val_max_target_length
if data_args.num_beams is not None:
    training_args.generation_num_beams = data_args.num_beams
trainer = Seq2SeqTrainer(
    model=model,
    args=training_args,
    train_dataset=data["train"] if training_args.do_train else None,
    eval_dataset=data["eval"],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    compute_metrics=shared_words if training_args.predict_with_generate else None,
)
if training_args.do_train:
    found = training_args.resume_from_checkpoint or get_last_checkpoint(training_args.output_dir)
    result = trainer.train(resume_from_checkpoint=found)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
if training_args.do_eval:
    metrics = trainer.evaluate(metric_key_prefix="eval")
    metrics["eval_samples"] = len(data["eval"])
    trainer.save_metrics("eval", metrics)
if training_args.do_predict:
    chosen = data["eval"].select(range(data_args.max_predict_samples or len(data["eval"])))
    output = trainer.predict(chosen, metric_key_prefix="predict", max_length=7, num_beams=data_args.num_beams)
    trainer.save_metrics("predict", output.metrics)
    if trainer.is_world_process_zero():
        tokens = np.where(output.predictions != -100, output.predictions, tokenizer.pad_token_id)
        lines = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        with open(os.path.join(training_args.output_dir, "generated_predictions.txt"), "w") as file:
            file.write("\n".join(line.strip() for line in lines))
