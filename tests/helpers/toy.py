"""Small models and data that tests share. No trainer, no transformers at import."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

#: Every event that a callback can be told of, in HF's order; and the flags of `TrainerControl`.
EVENTS = [
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
]
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Classifier(nn.Module):
    """Features → dropout → classes, with a LayerNorm so that weight decay has something to leave out."""

    def __init__(self, features: int = 8, classes: int = 3, dropout: float = 0.3):
        super().__init__()
        self.inner = nn.Linear(features, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(16, classes)

    def forward(self, x, labels=None):
        logits = self.outer(self.dropout(torch.relu(self.norm(self.inner(x)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class TupleRegressor(nn.Module):
    """Returns a tuple with the loss first, and two further outputs of different shapes."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.outer = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        guess = self.outer(self.dropout(x)).squeeze(-1)
        rest = (guess, (x[:, :2], guess.unsqueeze(-1)))
        return rest if labels is None else (nn.functional.mse_loss(guess, labels), *rest)


class Tagger(nn.Module):
    """One class a token, over sequences whose length differs from batch to batch."""

    def __init__(self, vocabulary: int = 20, classes: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 12)
        self.dropout = nn.Dropout(0.2)
        self.outer = nn.Linear(12, classes)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.outer(self.dropout(self.embedding(input_ids)))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def tagger_with_config():
    """A tagger with a `config`, which upstream's label smoothing asks for."""
    model = Tagger()
    model.config = type("Config", (), {"use_cache": None})()
    return model


class NanAt(nn.Module):
    """A classifier whose loss is not a number at some forward passes."""

    def __init__(self, steps=(3, 4, 9)):
        super().__init__()
        self.body = Classifier()
        self.steps, self.calls = set(steps), 0

    def forward(self, x, labels=None):
        out = self.body(x, labels)
        if self.training and labels is not None:
            self.calls += 1
            if self.calls in self.steps:
                out["loss"] = out["loss"] * 0 + float("nan")
                out["loss"] = out["loss"].detach() + 0 * self.body.outer.bias.sum()
        return out


class OutOfMemoryAbove(nn.Module):
    """Raises what an allocator raises when a batch has more than `limit` samples."""

    def __init__(self, limit: int):
        super().__init__()
        self.body, self.limit = Classifier(), limit

    def forward(self, x, labels=None):
        if len(x) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 sample too many")
        return self.body(x, labels)


def weights(module: nn.Module) -> torch.Tensor:
    """Return a copy of the weights of a native module's model, one after the other."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.model.parameters()])


def rows(count: int = 50, seed: int = 0, classes: int = 3) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(8, generator=generator), "labels": int(torch.randint(classes, (1,), generator=generator))}
        for _ in range(count)
    ]


def regression_rows(count: int = 30, seed: int = 2) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(8, generator=generator), "labels": float(torch.randn(1, generator=generator))}
        for _ in range(count)
    ]


def sequences(count: int = 40, seed: int = 1, vocabulary: int = 20, longest: int = 11) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, longest, (1,), generator=generator))
        ids = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [i % 4 for i in ids]})
    return found


def blocks(count: int = 40, seed: int = 3, vocabulary: int = 32, length: int = 12) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (count, length), generator=generator)
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]


def pad(features: list[dict]) -> dict:
    longest = max(len(f["input_ids"]) for f in features)
    batch = {
        "input_ids": torch.tensor([f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features]),
        "attention_mask": torch.tensor(
            [[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features]
        ),
    }
    if "labels" in features[0]:
        batch["labels"] = torch.tensor([f["labels"] + [-100] * (longest - len(f["labels"])) for f in features])
    return batch


def mask_at_random(features: list[dict]) -> dict:
    """A collator that draws from torch's global generator, as masked language modelling does."""
    batch = pad(features)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 0)
    return batch


class Table(Dataset):
    """A map-style data set that counts what is read of it."""

    def __init__(self, samples):
        self.samples, self.reads = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        return self.samples[index]


class Noisy(Table):
    """Draws from torch's global generator whenever a sample is read."""

    def __getitem__(self, index):
        sample = dict(self.samples[index])
        sample["x"] = sample["x"] + 0.1 * torch.randn(8)
        return sample


class Stream(IterableDataset):
    """Iterable data without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class SizedStream(Stream):
    """Iterable data with a length."""

    def __len__(self):
        return len(self.samples)


class ShuffledStream(Stream):
    """Iterable data whose order follows the epoch it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch))
        return (self.samples[i] for i in order.tolist())


def tiny_gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16} | options
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **settings))


def tiny_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | options
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=16, **sizes))


def split_layers(llama, processes: int, models: int):
    """Split each layer of a Llama by torch's plan between so many processes, which read the same batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (models, processes), mesh_dim_names=("dp", "tp"))["tp"]
    for layer in llama.model.layers:
        names = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
        plan = {name: ColwiseParallel() for name in names}
        parallelize_module(layer, mesh, plan | dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()))
    return llama


def tiny_bert(classes: int = 3):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=classes,
    )
    return BertForSequenceClassification(config)


def tiny_tokenizer():
    """A real fast tokenizer over words, made here since none can be downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i + 2 for i in range(30)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def tokenized(count: int = 36, classes: int = 3) -> list[dict]:
    tokenizer = tiny_tokenizer()
    texts = [" ".join(f"w{i % 30}" for i in s["input_ids"]) for s in sequences(count)]
    return [{**tokenizer(text), "label": len(text) % classes} for text in texts]


def labelled_blocks(count: int = 36, classes: int = 3) -> list[dict]:
    return [{"input_ids": b["input_ids"], "label": sum(b["input_ids"]) % classes} for b in blocks(count)]
