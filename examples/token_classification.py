"""Token classification: which words of Python's reference are code?

    python token_classification.py --output_dir FOLDER

Shows: words cut into subwords, labels at the first subword of each (-100 elsewhere, which the loss and the metric leave
out), and precision, recall and F1 of what is found. The reference puts code between quotation marks; the model sees the
words without them.
"""

import argparse
import re
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification
from transformers import PreTrainedTokenizerFast as Fast

from hf_compat import Trainer, TrainingArguments, set_seed


def tagged(paragraph: str) -> list[tuple[str, int]]:
    """Cut a paragraph into words, each with a 1 where it is quoted."""
    parts = re.findall(r'"[^"\n]+"|[^\s"]+', paragraph)
    return [(word, int(part[0] == '"')) for part in parts for word in part.strip('"').split()]


def make_tokenizer(texts) -> Fast:
    pieces = Tokenizer(models.BPE(unk_token="[UNK]"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, special_tokens=["[PAD]", "[UNK]"]))
    return Fast(tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", model_max_length=96)


def encode(tokenizer: Fast, words: list[tuple[str, int]]) -> dict:
    """Label the first subword of each word."""
    encoded = tokenizer([" " + word for word, _ in words], is_split_into_words=True, truncation=True)
    owners = encoded.word_ids()
    first = [owner != before for owner, before in zip(owners, [None, *owners], strict=False)]
    labels = [words[owner][1] if starts else -100 for owner, starts in zip(owners, first, strict=True)]
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def scores(prediction) -> dict[str, float]:
    counted = prediction.label_ids != -100
    guesses, labels = prediction.predictions.argmax(-1)[counted], prediction.label_ids[counted]
    hits = int((guesses & labels).sum())
    precision, recall = hits / max(1, guesses.sum()), hits / labels.sum()
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(1e-9, precision + recall)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/token_classification")
    args = TrainingArguments(
        output_dir=parser.parse_args().output_dir,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        eval_strategy="epoch",
        eval_loss_by_token=True,  # sentences of few tokens weigh less
        logging_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
    )
    set_seed(args.seed)
    texts = [text for name in sorted(topics)[::3] for text in topics[name].split("\n\n") if text.count('"') > 2]
    tokenizer = make_tokenizer(texts)
    rows = [encode(tokenizer, tagged(text)) for text in texts]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=args,
        train_dataset=[row for number, row in enumerate(rows) if number % 5],
        eval_dataset=rows[::5],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=scores,
    )
    trainer.train()
    found = trainer.evaluate()
    print("held out:", ", ".join(f"{name} {found[f'eval_{name}']:.3f}" for name in ("precision", "recall", "f1")))


if __name__ == "__main__":
    main()
