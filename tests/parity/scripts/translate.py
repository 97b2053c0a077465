"""Translation, as people's scripts do it: pairs under one column, label smoothing, beams, the best model at the end."""

import os
from dataclasses import dataclass, field

import datasets
import numpy as np
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class TranslationArguments:
    model: str
    pairs: str
    source_lang: str = "en"
    target_lang: str = "xx"
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all sentences to one length."})


options, args = HfArgumentParser((TranslationArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
padding = "max_length" if options.pad_to_max_length else False


def prepare(rows):
    sources = [pair[options.source_lang] for pair in rows["translation"]]
    targets = [pair[options.target_lang] for pair in rows["translation"]]
    prepared = tokenizer(sources, max_length=12, padding=padding, truncation=True)
    labels = tokenizer(text_target=targets, max_length=12, padding=padding, truncation=True)["input_ids"]
    pad = tokenizer.pad_token_id
    prepared["labels"] = [[-100 if token == pad else token for token in row] for row in labels]
    return prepared


raw = datasets.load_dataset("json", data_files=options.pairs, cache_dir=os.path.join(args.output_dir, "cache"))
data = raw["train"].map(prepare, batched=True, remove_columns=["translation"]).train_test_split(7, shuffle=False)
if options.pad_to_max_length:
    collator = default_data_collator
else:
    collator = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=4)


def exact(prediction):
    texts = [
        tokenizer.batch_decode(np.where(part < 0, tokenizer.pad_token_id, part), skip_special_tokens=True)
        for part in (prediction.predictions, prediction.label_ids)
    ]
    hits = [a == b for pair in zip(*texts, strict=True) for a, b in zip(*map(str.split, pair), strict=False)]
    return {"exact": float(np.mean(hits or [0.0])), "sum": int(prediction.predictions.sum())}


trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    data_collator=collator,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    compute_metrics=exact,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
trainer.save_model()
trainer.save_state()
trainer.save_metrics("eval", trainer.evaluate(max_length=6, num_beams=3))
trainer.save_metrics("predict", trainer.predict(data["test"], max_new_tokens=4).metrics)
