"""Write words backwards with a small T5: evaluations generate."""

import argparse
import keyword

import numpy as np
from datasets import Dataset
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="seq2seq")
parser.add_argument("--num_beams", type=int, default=2)
options = parser.parse_args()

set_seed(7)
tokenizer = ByT5Tokenizer()
words = sorted(set(keyword.kwlist + keyword.softkwlist) | set(dir(str)))


def prepare(rows):
    prepared = tokenizer(rows["word"])
    prepared["labels"] = tokenizer(text_target=[word[::-1] for word in rows["word"]])["input_ids"]
    return prepared


data = Dataset.from_dict({"word": words}).map(prepare, batched=True, remove_columns=["word"])
split = data.train_test_split(test_size=12, seed=7)
config = T5Config(
    vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)


def metrics(prediction):
    generated, labels = (
        tokenizer.batch_decode(np.where(part < 0, tokenizer.pad_token_id, part), skip_special_tokens=True)
        for part in (prediction.predictions, prediction.label_ids)
    )
    same = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in zip(generated, labels, strict=True)]
    return {"letters": float(np.mean(same)), "length": float(np.mean([len(text) for text in generated]))}


args = Seq2SeqTrainingArguments(
    output_dir=options.output_dir,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=5,  # the last one is short
    learning_rate=5e-3,
    num_train_epochs=1,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="epoch",
    predict_with_generate=True,
    generation_max_length=10,
    generation_num_beams=options.num_beams,
    label_smoothing_factor=0.1,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
    compute_metrics=metrics,
)
trainer.train()
print(trainer.evaluate(max_length=8, num_beams=1))
predicted = trainer.predict(split["test"], num_beams=3)
print(tokenizer.batch_decode(np.where(predicted.predictions < 0, 0, predicted.predictions), skip_special_tokens=True))
trainer.save_model()
