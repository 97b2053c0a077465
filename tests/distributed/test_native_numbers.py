"""The same model and data on two processes, under `hf_compat.Trainer` and in a Lightning trainer: equal bit for bit."""

from __future__ import annotations

import json
import os
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hf_compat
from helpers import toy
from helpers.forking import run_ranks
from hf_compat import HFDataModule, HFModule, Trainer, TrainingArguments

BASE = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no",
        "ddp_backend": "gloo"}  # fmt: skip
CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "short_last_window": {"gradient_accumulation_steps": 3},
    "exchange_every_micro_batch": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "hard_clipping": {"max_grad_norm": 0.05, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}
NODES = 2  # machines of one process each, which is what Lightning is told of two forked ranks


def model_of(name):
    hf_compat.set_seed(5)
    return toy.tiny_gpt2() if name == "causal_lm" else toy.Classifier()


def rows_of(name):
    return toy.blocks(30) if name == "causal_lm" else toy.rows(30)


def numbers(values):
    return [float(value) for value in values]


def weights(model):
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def of_model(found):
    """Weights of a module, by their names in its model."""
    return {name.removeprefix("model."): values for name, values in found.items()}


def write(folder, rank, **found):
    (folder / f"found{rank}.json").write_text(json.dumps(found))


def by_trainer(folder, name, values):
    def body(rank):
        torch.set_num_threads(1)
        args = TrainingArguments(str(folder / "out"), eval_strategy="epoch", **{**BASE, **values})
        model = model_of(name)
        trainer = Trainer(model, args, train_dataset=rows_of(name), eval_dataset=rows_of(name)[:9])
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        write(folder, rank, losses=losses, weights=weights(model), evaluated=trainer.evaluate()["eval_loss"])

    return run(folder, body)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.seen.append(float(trainer.strategy.reduce(loss.clone(), reduce_op="mean")))


def natively(folder, name, values, saver=None, resumes=None, kind=HFModule):
    def body(rank):
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning sets as many as there are cores
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = str(rank), "0"
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(variable, None)
        warnings.filterwarnings("ignore", message="Be aware that when using")
        args = TrainingArguments(str(folder / "out"), **{**BASE, **values})
        model, losses = model_of(name), Losses()
        if resumes is not None:
            torch.manual_seed(99)
            model = type(model)()
        module = kind(model, args)
        trainer = pl.Trainer(
            accelerator="cpu", strategy="ddp", devices=1, num_nodes=NODES, max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=saver is not None,
            callbacks=[losses, *([] if saver is None else [saver()])],
            precision="bf16-mixed" if values.get("bf16") else None,
        )  # fmt: skip
        data = HFDataModule(None, rows_of(name), rows_of(name)[:9])
        trainer.fit(module, data, ckpt_path=resumes)
        metrics = trainer.validate(module, data, verbose=False)[0]
        write(folder, rank, losses=losses.seen, weights=weights(module), evaluated=metrics["eval_loss"])

    return run(folder, body)


def run(folder, body):
    folder.mkdir(parents=True, exist_ok=True)
    ended = run_ranks(folder, body, world=NODES, seconds=120)
    assert [rank.status for rank in ended] == [0] * NODES, "\n".join(rank.said[-3000:] for rank in ended)
    found = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(NODES)]
    assert found[0]["weights"] == found[1]["weights"], "the ranks have the same model"
    return found[0]


@pytest.mark.parametrize("name", [*CASES, "causal_lm"])
def test_two_processes_give_the_same_losses_and_weights(tmp_path, name):
    values = CASES.get(name, {"gradient_accumulation_steps": 2})
    ours, native = by_trainer(tmp_path / "trainer", name, values), natively(tmp_path / "native", name, values)
    assert of_model(native["weights"]) == ours["weights"]
    assert native["losses"] == ours["losses"] and len(ours["losses"]) > 4
    assert native["evaluated"] == pytest.approx(ours["evaluated"], rel=1e-6)  # Lightning keeps 32 bits


@pytest.mark.parametrize("name", ["plain", "accumulation"])
def test_two_processes_go_on_within_an_epoch(tmp_path, name):
    ours = by_trainer(tmp_path / "trainer", name, CASES[name])
    kept = tmp_path / "kept"

    def saver():
        return ModelCheckpoint(kept, filename="{step}", every_n_train_steps=3, save_top_k=-1)

    whole = natively(tmp_path / "whole", name, CASES[name], saver)
    assert of_model(whole["weights"]) == ours["weights"]
    again = natively(tmp_path / "again", name, CASES[name], saver, resumes=str(kept / "step=3.ckpt"))
    assert of_model(again["weights"]) == ours["weights"] and again["losses"] == ours["losses"][3:]


class Forward(HFModule):
    def forward(self, x, labels=None):
        return self.model(x, labels)


class Step(HFModule):
    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


class Super(HFModule):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)}


class Head(HFModule):
    """A part beside the model: its gradients are exchanged, too, or the ranks would end with different ones."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.model(x)["logits"])
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("kind", [Forward, Step, Super])
def test_what_a_subclass_says_anew_changes_no_number_on_two_processes(tmp_path, kind):
    values = CASES["short_last_window"]
    plain, own = (natively(tmp_path / each.__name__, "x", values, kind=each) for each in (HFModule, kind))
    assert own["weights"] == plain["weights"] and own["losses"] == plain["losses"]
    assert own["evaluated"] == plain["evaluated"]


def test_a_head_beside_the_model_is_trained_alike_on_two_processes(tmp_path):
    found = [natively(tmp_path / str(rate), "x", {"learning_rate": rate}, kind=Head) for rate in (1e-2, 0.0)]
    assert found[0]["weights"]["head.weight"] != found[1]["weights"]["head.weight"]
