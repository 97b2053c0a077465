"""Tiny models of transformers with random weights, and rows of token ids for them."""

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def classifier(labels=3):
    """Return a classifier of `labels` classes."""
    return BertForSequenceClassification(BertConfig(**SIZES, num_hidden_layers=2, num_labels=labels))


def encoder():
    """Return an encoder."""
    return BertModel(BertConfig(**SIZES, num_hidden_layers=2))


def decoder(layers=2):
    """Return a decoder of some layers."""
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=64))


def sentences(count, seed=0, labels=3, length=10):
    """Return rows whose label follows from their first token."""
    ids = torch.randint(1, 40, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row.tolist(), "attention_mask": [1] * length, "labels": int(row[0]) % labels} for row in ids]
