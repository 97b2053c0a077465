"""What the pages of the documentation take for granted: files in the reader's folder, and names in his program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning.pytorch.demos.boring_classes import BoringModel

import hf_compat
from helpers.hub_server import running_hub, talked_to
from helpers.toy import Classifier, rows

ROOT = Path(__file__).resolve().parents[2]
# A script for transformers that trains within a second.
SCRIPT = '''"""A toy classifier under transformers' Trainer."""

import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return torch.nn.functional.cross_entropy(logits, labels), logits


if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    rows = [{"x": torch.randn(4), "labels": index % 3} for index in range(24)]
    trainer = Trainer(Classifier(), args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    trainer.evaluate()
'''
SENTENCES = '''"""A project's own data and metric."""

from transformers import AutoTokenizer


def sentences(part):
    tokenizer = AutoTokenizer.from_pretrained("./model")
    texts = ["one good day", "a bad day", "good", "bad"] * (4 if part == "train" else 2)
    return [{**tokenizer(text), "labels": int("good" in text)} for text in texts]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
'''


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Validated(BoringModel):
    """A LightningModule that logs the loss of its validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))


def tokenizer():
    return transformers.AutoTokenizer.from_pretrained("model")


def sentences() -> list[dict]:
    return [{**tokenizer()(text), "labels": number % 2} for number, text in enumerate(["good day", "a bad day"] * 6)]


# Names that pages use without having made them, and how each is made.
MAKERS = {
    "model": Classifier,
    "module": Validated,
    "args": lambda: hf_compat.TrainingArguments("out", use_cpu=True),
    "accuracy": lambda: accuracy,
    "compute_metrics": lambda: accuracy,
    "tokenizer": tokenizer,
    "AutoModelForSequenceClassification": lambda: transformers.AutoModelForSequenceClassification,
    "MyLightningCallback": lambda: lightning.Callback,
    **dict.fromkeys(
        ("train", "validation", "train_dataset", "first_set", "second_set", "test_dataset"), lambda: rows(16)
    ),
}
NAMES = {
    "README": "AutoModelForSequenceClassification train validation tokenizer compute_metrics MyLightningCallback",
    "callbacks": "model module train validation",
    "contributing": "model",
    "customise": "model args train validation",
    "hub": "model train",
    "loggers": "model train",
    "metrics": "model args validation",
    "resume": "model args train",
    "native": "model accuracy train_dataset first_set second_set test_dataset",
}
# Files that pages use without having shown them. What has no source here is `SCRIPT`.
SOURCES = {
    "my_project.py": SENTENCES,
    "classification.py": (ROOT / "tests" / "scripts" / "classification.py").read_text(),
    "digits.py": (ROOT / "tests" / "scripts" / "plain_module.py").read_text(),
    "train_sft.py": (ROOT / "examples" / "lora_sft.py").read_text().replace("num_train_epochs=8", "max_steps=2"),
}
FILES = {
    "tutorial": "",
    "README": "script.py my_project.py",
    "command_compare": "script.py classification.py",
    "command_fit": "my_project.py",
    "command_run": "script.py package/module.py",
    "contributing": "digits.py",
    "libraries": "train_sft.py",
}


def save_model(folder: Path) -> None:
    """Save a tiny BERT with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "bad", "day", "good", "one"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=2, **sizes)).save_pretrained(folder)


def train(folder: Path) -> None:
    """Leave the folder of a run with a checkpoint of its eighth update."""
    settings = {"max_steps": 8, "save_steps": 8, "logging_steps": 2, "use_cpu": True, "disable_tqdm": True}
    trainer = hf_compat.Trainer(
        Classifier(), hf_compat.TrainingArguments(str(folder), **settings), train_dataset=rows()
    )
    trainer.train()
    trainer.save_state()


def names(page: str) -> dict[str, object]:
    """Make the names that a page uses without having made them."""
    torch.manual_seed(0)
    given = {name: MAKERS[name]() for name in NAMES.get(page, "").split()}
    return {**given, "train": sentences(), "validation": sentences()} if page == "README" else given


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page uses without having made them."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in FILES.get(page, "script.py train.py").split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SOURCES.get(name, SCRIPT))
    if page in ("command_line", "checkpoints"):
        train(folder / "out")
    if page in ("README", "command_fit"):
        save_model(folder / "model")
        (folder / "bert-base-uncased").symlink_to(folder / "model")


@contextlib.contextmanager
def surroundings(page: str, monkeypatch) -> Iterator[None]:
    """Give a page the services that it uses: a Hub, wandb without an account."""
    with contextlib.ExitStack() as stack:
        if page == "loggers":
            monkeypatch.setenv("WANDB_MODE", "offline")
        if page == "hub":
            hub = stack.enter_context(running_hub())
            stack.enter_context(talked_to(monkeypatch, hub))
        yield
