"""Runs that push to a Hub of one's own, under either Trainer."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

import hf_compat
from helpers.hub_server import running_hub, talked_to
from hf_compat import Trainer

TOKEN = "hf_aSecretOfMine"
ROWS = [{"input_ids": [1 + i % 7, 2, 3], "labels": i % 2} for i in range(16)]


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=2, **sizes))


def make(folder, kind=Trainer, api=hf_compat, model=None, callbacks=None, **values):
    base = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    base |= {"disable_tqdm": True, "report_to": "none", "push_to_hub": True, "hub_token": TOKEN}
    args = api.TrainingArguments(str(folder / "run"), **{**base, **values})
    model = make_model() if model is None else model
    return kind(model, args, train_dataset=ROWS, eval_dataset=ROWS[:6], callbacks=callbacks)


class WaitsForPushes(hf_compat.TrainerCallback):
    """Lets no update begin while a push is under way: transformers sends the very files that the next save rewrites."""

    trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        under_way = getattr(self.trainer, "push_in_progress", None)
        if under_way is not None:
            under_way.wait_until_done()


def pushed_by(api, folder, monkeypatch, model=make_model, **values):
    """Train and push; return the commits."""
    with running_hub() as hub, talked_to(monkeypatch, hub):
        waits = WaitsForPushes()
        trainer = make(folder, api.Trainer, api, model(), [waits], hub_always_push=True, **values)
        waits.trainer = None if api is hf_compat else trainer
        trainer.train()
        trainer.push_to_hub(tags=["mine"], dataset="toys", language="en")
        return hub.commits, set(hub.tokens)
