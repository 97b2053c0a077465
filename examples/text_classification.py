"""Text classification with `datasets`: from which chapter of Python's reference does a paragraph come?

    python text_classification.py --output_dir FOLDER

Shows: a `DatasetDict` that is tokenized by `map`, padding by batch, a metric after each epoch, the best model at the
end, and predictions for new text. But for one import it is a script for `transformers.Trainer`.
"""

import argparse
from pydoc_data.topics import topics

from datasets import ClassLabel, Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hf_compat import Trainer, TrainingArguments, set_seed

CHAPTERS = ["debugger", "formatstrings", "specialnames", "string-methods"]


def paragraphs() -> Dataset:
    rows = [(part, chapter) for chapter in CHAPTERS for part in topics[chapter].split("\n\n") if len(part) > 60]
    data = Dataset.from_dict({"text": [text for text, _ in rows], "label": [chapter for _, chapter in rows]})
    return data.cast_column("label", ClassLabel(names=CHAPTERS))


def make_tokenizer(texts) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/text_classification")
    args = TrainingArguments(
        output_dir=parser.parse_args().output_dir,
        num_train_epochs=5,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=True,
    )
    set_seed(args.seed)  # the model's first weights are drawn from it
    data = paragraphs().train_test_split(test_size=0.25, seed=0, stratify_by_column="label")
    tokenizer = make_tokenizer(data["train"]["text"])
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=64, hidden_dim=128, n_layers=2, n_heads=4, num_labels=len(CHAPTERS)
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    print(f"accuracy on held-out paragraphs: {trainer.evaluate()['eval_accuracy']:.3f}")
    new = "Set a breakpoint at the given line, and continue until it is reached."
    guess = trainer.predict(Dataset.from_dict(dict(tokenizer([new])))).predictions.argmax(-1)[0]
    print(f"{new!r} is from the chapter {CHAPTERS[guess]!r}")


if __name__ == "__main__":
    main()
