"""Public idioms of HF scripts, unchanged but for the import."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import hf_compat
from helpers import toy
from hf_compat import (
    EarlyStoppingCallback,
    IntervalStrategy,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_last_checkpoint,
)


def weighted(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))


def test_weighted_loss_with_the_signature_of_4_45(make_args):
    given = []

    class WeightedTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = weighted(outputs["logits"], labels)
            given.append((model.training, loss.item()))
            return (loss, outputs) if return_outputs else loss

    args = make_args(gradient_accumulation_steps=2, eval_strategy="epoch", logging_steps=1)
    evaluated = toy.rows(8)  # one batch
    trainer = WeightedTrainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=evaluated)
    trainer.train()
    losses = [loss for training, loss in given if training]
    assert len(losses) == 2 * 13
    windows = [losses[i : min(i + 2, end)] for end in (13, 26) for i in range(end - 13, end, 2)]
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-5)
    with torch.no_grad():
        logits = trainer.model.eval()(torch.stack([row["x"] for row in evaluated]))["logits"]
    expected = weighted(logits, torch.tensor([row["labels"] for row in evaluated])).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_stopping_by_a_dict_of_flags(make_args):
    class StopCallback(TrainerCallback):
        def on_step_end(self, args, state, control, logs=None, **kwargs):
            if state.global_step >= 10:
                return {"should_training_stop": True}

    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[StopCallback])
    assert trainer.train().global_step == 10


def test_a_dict_of_eval_sets_with_a_metric_that_reads_inputs(tmp_path):
    from sklearn.metrics import roc_auc_score

    class Binary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 2)

        def forward(self, input_ids, label=None):
            logits = self.linear(input_ids)
            return (torch.nn.functional.cross_entropy(logits, label), logits)

    def keep_name(features):
        return {
            "input_ids": torch.stack([f["x"] for f in features]),
            "label": torch.tensor([f["labels"] for f in features]),
        }

    def compute_metrics(prediction):
        assert prediction.inputs.shape == (len(prediction.label_ids), 8)
        scores = torch.tensor(prediction.predictions).softmax(-1)[:, 1].numpy()
        return {"auc": roc_auc_score(prediction.label_ids, scores)}

    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        evaluation_strategy=IntervalStrategy.STEPS,
        eval_steps=4,
        logging_dir=str(tmp_path / "logs"),
        include_inputs_for_metrics=True,
        label_names=["label"],
        num_train_epochs=1,
        no_cuda=True,
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    assert args.logging_dir == str(tmp_path / "logs")
    trainer = Trainer(
        model=Binary(),
        args=args,
        train_dataset=toy.rows(40, classes=2),
        eval_dataset={"first": toy.rows(20, 1, classes=2), "second": toy.rows(20, 2, classes=2)},
        data_collator=keep_name,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    for name, samples in trainer.eval_dataset.items():
        batch = keep_name(samples)
        with torch.no_grad():
            loss, logits = trainer.model(**batch)
        auc = roc_auc_score(batch["label"], logits.softmax(-1)[:, 1])
        assert metrics[f"eval_{name}_auc"] == pytest.approx(auc)
        assert metrics[f"eval_{name}_loss"] == pytest.approx(loss.item(), rel=0.2)  # a mean over batches, weighted


def test_pure_prediction_from_a_checkpoint(make_args, tmp_path):
    out = str(tmp_path / "out")
    Trainer(toy.Classifier(), make_args(save_strategy="epoch"), train_dataset=toy.rows()).train()
    training_args = make_args()
    training_args.label_names = []
    trainer = Trainer(toy.Classifier(), training_args)
    path = get_last_checkpoint(out)
    trainer._load_from_checkpoint(path)
    output = trainer.predict([{"x": row["x"]} for row in toy.rows(11)])
    assert output.predictions.shape == (11, 3)
    assert output.label_ids is None and "test_loss" not in output.metrics


def test_overriding_log_optimizer_and_loader(make_args):
    class Own(Trainer):
        def log(self, logs):  # the signature before 4.47
            logs["extra"] = 1.0
            super().log(logs)

        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0, total_iters=num_training_steps)

        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=10, shuffle=True, collate_fn=self.data_collator)

    trainer = Own(toy.Classifier(), make_args(logging_steps=1), train_dataset=toy.rows())
    assert trainer.train().global_step == 10  # 50 samples in batches of 10, twice
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert all(log["extra"] == 1.0 for log in trainer.state.log_history)
    assert {log["learning_rate"] for log in trainer.state.log_history if "loss" in log} == {0.5}


def test_datasets_with_extra_columns(make_args):
    import datasets

    rows = [{**b, "text": "words", "id": i} for i, b in enumerate(toy.labelled_blocks(30))]
    trainer = Trainer(toy.tiny_bert(), make_args(), train_dataset=datasets.Dataset.from_list(rows))
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}


def test_language_model_blocks_from_joined_and_cut_text(make_args):
    import datasets

    block_size = 12
    text = datasets.Dataset.from_dict({"ids": [[(i * j) % 32 for j in range(9)] for i in range(60)]})

    def group_texts(examples):
        joined = sum(examples["ids"], [])
        total = len(joined) // block_size * block_size
        blocks = [joined[i : i + block_size] for i in range(0, total, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    blocks = text.map(group_texts, batched=True, remove_columns=["ids"])
    args = make_args(eval_strategy="epoch", gradient_accumulation_steps=2)
    trainer = Trainer(toy.tiny_gpt2(), args, train_dataset=blocks, eval_dataset=blocks)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1


def test_arguments_changed_after_the_trainer_was_made(make_args):
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows())
    trainer.args.max_grad_norm = 0.0
    trainer.train_dataset = toy.rows(20)
    trainer.data_collator = lambda rows: {
        "x": torch.stack([r["x"] for r in rows]),
        "labels": torch.tensor([0] * len(rows)),
    }
    assert trainer.train().global_step == 10


def test_old_overrides_are_called_by_their_own_signature(make_args):
    calls = []

    class Old(Trainer):
        def training_step(self, model, inputs):
            calls.append("training_step")
            return super().training_step(model, inputs)

        def _get_train_sampler(self):
            calls.append("sampler")
            return super()._get_train_sampler()

        def get_batch_samples(self, epoch_iterator, num_batches):
            calls.append("get_batch_samples")
            return super().get_batch_samples(epoch_iterator, num_batches)

        def _save_checkpoint(self, model, trial, metrics=None):
            calls.append("_save_checkpoint")
            super()._save_checkpoint(model, trial)

        def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
            calls.append("maybe")
            super()._maybe_log_save_evaluate(tr_loss, None, model, trial, epoch, ignore_keys_for_eval, 0.0)

    args = make_args(num_train_epochs=1, save_strategy="epoch", max_steps=2)
    Old(toy.Classifier(), args, train_dataset=toy.rows(8)).train()
    assert set(calls) == {"training_step", "sampler", "get_batch_samples", "_save_checkpoint", "maybe"}


def test_the_name_tokenizer_is_understood(make_args):
    class Tokenizer:
        model_input_names = ("input_ids",)
        pad_token_id = 0

        def pad(self, features, padding=True, return_tensors="pt"):
            return toy.pad(features)

        def save_pretrained(self, folder):
            (__import__("pathlib").Path(folder) / "tokenizer.txt").write_text("saved")

    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, tokenizer=None, processing_class=None, **kwargs):
            seen.append((tokenizer, processing_class))

    tokenizer = Tokenizer()
    trainer = Trainer(
        toy.Tagger(), make_args(), train_dataset=toy.sequences(), tokenizer=tokenizer, callbacks=[Look],
        data_collator=toy.pad,
    )  # fmt: skip
    trainer.train()
    assert trainer.tokenizer is trainer.processing_class is tokenizer
    assert seen == [(tokenizer, tokenizer)]


def test_callbacks_of_transformers_run_unchanged(make_args):
    import transformers

    args = make_args(
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.5, num_train_epochs=9
    )

    def stopped(callback):
        from hf_compat import set_seed

        set_seed(0)
        trainer = Trainer(
            toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9), callbacks=[callback]
        )
        return trainer.train().global_step, set(trainer.state.stateful_callbacks)

    ours, theirs = stopped(EarlyStoppingCallback(1)), stopped(transformers.EarlyStoppingCallback(1))
    assert ours == theirs
    assert ours[0] < 9 * 13 and "EarlyStoppingCallback" in ours[1]


def test_arguments_of_transformers_are_understood(tmp_path):
    import transformers

    theirs = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=3, lr_scheduler_type="cosine", disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(toy.Classifier(), theirs, train_dataset=toy.rows())
    assert trainer.train().global_step == 3
    assert trainer.args.lr_scheduler_type.value == "cosine"


@pytest.mark.parametrize("how", ["class", "instance", "duck"])
def test_callbacks_as_class_instance_or_anything_with_events(make_args, how):
    seen = []

    class Own(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            seen.append(state.epoch)

    class Duck:
        def on_epoch_end(self, args, state, control, optimizer):  # names what it wants, takes nothing else
            seen.append(state.epoch)
            assert optimizer is not None

    callback = {"class": Own, "instance": Own(), "duck": Duck()}[how]
    Trainer(toy.Classifier(), make_args(), train_dataset=toy.rows(), callbacks=[callback]).train()
    assert seen == [1.0, 2.0]


@pytest.mark.parametrize("window", [1, 3])
def test_max_steps_of_0_ends_after_the_first_update(tmp_path, window):
    """Scripts pass `--max_steps 0` to skip the training: a linear schedule leaves the weights alone."""

    def trained(api):
        torch.manual_seed(0)
        args = api.TrainingArguments(
            str(tmp_path / api.__name__),
            max_steps=0,
            gradient_accumulation_steps=window,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = api.Trainer(model=toy.Classifier(), args=args, train_dataset=toy.rows(40))
        before = toy.weights(trainer).clone()
        trainer.train()
        assert torch.equal(toy.weights(trainer), before)
        return trainer.state.global_step, trainer.state.epoch, trainer.state.log_history[0]

    assert trained(hf_compat) == trained(transformers)


@pytest.mark.parametrize("by_batch", [False, True])
def test_arrays_among_the_metrics_are_given_back_as_arrays(tmp_path, by_batch):
    """Scripts plot a confusion matrix that `compute_metrics` has made. Logs and files hold lists of it."""

    def compute_metrics(prediction, compute_result=True):
        return {"per_class": np.array([1.0, 2.0]), "counts": torch.tensor([3, 4]), "one": np.float32(0.5)}

    def found(api):
        args = api.TrainingArguments(
            str(tmp_path / api.__name__), batch_eval_metrics=by_batch, use_cpu=True, report_to="none", disable_tqdm=True
        )
        torch.manual_seed(0)
        trainer = api.Trainer(toy.Classifier(), args, compute_metrics=compute_metrics)
        evaluated, predicted = trainer.evaluate(toy.rows(8)), trainer.predict(toy.rows(8)).metrics
        return trainer, evaluated, predicted

    (trainer, *mine), (_, *theirs) = found(hf_compat), found(transformers)
    for ours, upstreams in zip(mine, theirs, strict=True):
        assert list(ours) == list(upstreams)
        assert {name: type(value) for name, value in ours.items()} == {n: type(v) for n, v in upstreams.items()}
    assert mine[0]["eval_per_class"].sum() == 3 and mine[1]["test_counts"].sum() == 7
    assert trainer.state.log_history[-1]["eval_per_class"] == [1.0, 2.0]
    trainer.save_metrics("test", mine[1])
    assert json.loads((tmp_path / "hf_compat" / "all_results.json").read_text())["test_counts"] == [3, 4]
