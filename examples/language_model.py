"""A small transformer language model on real text: the reference of Python's statements, from the standard library.

The script is written for `transformers.Trainer`; only the import of the Trainer differs.

    python examples/language_model.py --output_dir FOLDER
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

from transformers import GPT2Config, GPT2LMHeadModel

from hf_compat import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed

BLOCK = 64


def blocks(texts: list[str]) -> list[dict]:
    """Join texts as bytes and cut them into blocks; the model shifts the labels itself."""
    joined = "\n\n".join(texts).encode()
    starts = range(0, len(joined) - BLOCK + 1, BLOCK)
    return [{"input_ids": list(joined[s : s + BLOCK]), "labels": list(joined[s : s + BLOCK])} for s in starts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/language_model")
    output_dir = parser.parse_args().output_dir
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::12]
    train = blocks([text for text in texts if text not in held_out])
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=2,
        max_steps=400,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        weight_decay=0.01,
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
        save_total_limit=2,
        logging_steps=20,
        load_best_model_at_end=True,
        use_cpu=True,
    )
    set_seed(args.seed)  # the model's first weights are drawn from it
    config = GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_layer=2, n_head=4, n_embd=64, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=train,
        eval_dataset=blocks(held_out),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    metrics["eval_perplexity_per_byte"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
