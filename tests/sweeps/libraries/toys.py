"""Small models, tokenizers and data in the shapes that libraries ask for; made here, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def sentences() -> list[str]:
    """Split Python's own help texts into sentences, each once, in one order."""
    text = " ".join(topics[name] for name in ("assignment", "class", "function", "import", "try", "with"))
    found = re.split(r"(?<=[.:])\s+", re.sub(r"\s+", " ", text))
    return list(dict.fromkeys(sentence for sentence in found if 30 <= len(sentence) <= 120))


SENTENCES = sentences()


def make_tokenizer(folder: Path) -> None:
    """Train a tokenizer on the sentences, with a chat template."""
    learner = ByteLevelBPETokenizer()
    special = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    learner.train_from_iterator(SENTENCES, vocab_size=400, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def llama(labels: int | None = None) -> torch.nn.Module:
    """Make a small Llama: a language model, or a classifier of `labels` classes."""
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    if labels is None:
        return LlamaForCausalLM(config)
    config.num_labels = labels
    return LlamaForSequenceClassification(config)


def make_bert(folder: Path, kind: type) -> None:
    """Make a small BERT of a class with a tokenizer of whole words."""
    words = sorted({word for sentence in SENTENCES for word in re.findall(r"[a-z]+", sentence.lower())})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words[:400]]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=405, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    kind(config).save_pretrained(folder)


def make_models(folder: Path) -> None:
    """Write every model and tokenizer that the cases read into a folder."""
    for name, labels in (("llama", None), ("reward", 1)):
        llama(labels).save_pretrained(folder / name)
        make_tokenizer(folder / name)
    make_bert(folder / "bert", BertModel)
    make_bert(folder / "masked", BertForMaskedLM)


def _rows(count: int, start: int = 0) -> list[tuple[str, str, str]]:
    """Return (prompt, better, worse) texts."""
    chosen = [SENTENCES[(start + number) % len(SENTENCES)] for number in range(count)]
    return [(text[: len(text) // 2], text[len(text) // 2 :], text[::-1][: len(text) // 2]) for text in chosen]


def texts(count: int, start: int = 0) -> Dataset:
    """Plain text."""
    return Dataset.from_list([{"text": prompt + better} for prompt, better, _ in _rows(count, start)])


def completions(count: int, start: int = 0) -> Dataset:
    """Prompts and completions."""
    return Dataset.from_list([{"prompt": p, "completion": c} for p, c, _ in _rows(count, start)])


def conversations(count: int, start: int = 0) -> Dataset:
    """Two turns each."""
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]}
            for p, c, _ in _rows(count, start)
        ]
    )


def preferences(count: int, start: int = 0) -> Dataset:
    """Prompts with a chosen and a rejected completion."""
    return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in _rows(count, start)])


def judged(count: int, start: int = 0) -> Dataset:
    """Completions with a label: wanted or not."""
    return Dataset.from_list(
        [
            {"prompt": p, "completion": c if number % 2 else r, "label": bool(number % 2)}
            for number, (p, c, r) in enumerate(_rows(count, start))
        ]
    )


def prompts(count: int, start: int = 0) -> Dataset:
    """Prompts alone."""
    return Dataset.from_list([{"prompt": p} for p, _, _ in _rows(count, start)])
