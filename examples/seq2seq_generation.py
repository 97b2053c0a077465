"""Sequence to sequence: a small T5 learns to write dates as ISO does, and is judged by what it generates.

    python seq2seq_generation.py --output_dir FOLDER

Shows: `Seq2SeqTrainer` with `predict_with_generate`: metrics of an evaluation are of generated text, in which
`compute_metrics` counts the dates that are right to the last letter. The tokenizer is ByT5's, which has no files.
"""

import argparse
import random
from datetime import date

import numpy as np
from transformers import ByT5Tokenizer, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

from hf_compat import Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

TOKENIZER = ByT5Tokenizer()


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    days = [date.fromordinal(draw.randint(730120, 739251)) for _ in range(count)]  # 2000 to 2024
    return [(f"{day:%B} {day.day}, {day.year}", f"{day:%m-%d}") for day in days]


def encode(said: str, wanted: str) -> dict:
    return {"input_ids": TOKENIZER(said)["input_ids"], "labels": TOKENIZER(wanted)["input_ids"]}


def exact(prediction) -> dict[str, float]:
    tokens, labels = (np.where(ids < 0, 0, ids) for ids in (prediction.predictions, prediction.label_ids))
    texts, wanted = (TOKENIZER.batch_decode(ids, skip_special_tokens=True) for ids in (tokens, labels))
    return {"exact": float(np.mean([text == right for text, right in zip(texts, wanted, strict=True)]))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/seq2seq_generation")
    args = Seq2SeqTrainingArguments(
        output_dir=parser.parse_args().output_dir,
        max_steps=300,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        warmup_steps=20,
        eval_strategy="steps",
        eval_steps=100,
        logging_steps=50,
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=8,
        use_cpu=True,
    )
    set_seed(args.seed)
    config = T5Config(
        vocab_size=384,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    held_out = pairs(64, seed=2)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=[encode(*pair) for pair in pairs(4000, seed=1)],
        eval_dataset=[encode(*pair) for pair in held_out],
        processing_class=TOKENIZER,
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model),
        compute_metrics=exact,
    )
    trainer.train()
    output = trainer.predict([encode(*pair) for pair in held_out[:3]])
    texts = TOKENIZER.batch_decode(np.where(output.predictions < 0, 0, output.predictions), skip_special_tokens=True)
    for (said, _), text in zip(held_out, texts, strict=False):
        print(f"{said} → {text}")
    print(f"dates that are right: {trainer.evaluate()['eval_exact']:.0%}")


if __name__ == "__main__":
    main()
