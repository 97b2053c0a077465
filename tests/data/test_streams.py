"""Resuming iterable data is exact, by its own position or by reading up to the position."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, set_seed


class Positioned(toy.Stream):
    """A stateful stream that counts its reads."""

    def __init__(self, samples):
        super().__init__(samples)
        self.at = self.reads = 0

    def __iter__(self):
        while self.at < len(self.samples):
            self.at += 1
            self.reads += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def table():
    import datasets

    return datasets.Dataset.from_list([{"x": r["x"].tolist(), "labels": r["labels"]} for r in toy.rows(60)])


SOURCES = {
    "map-style": lambda: toy.Table(toy.rows(60)),
    "plain stream": lambda: toy.Stream(toy.rows(60)),
    "stream that is told its epoch": lambda: toy.ShuffledStream(toy.rows(60)),
    "stream that knows its position": lambda: Positioned(toy.rows(60)),
    "datasets table": table,
    "datasets iterable": lambda: table().to_iterable_dataset(num_shards=3),
    "noisy data": lambda: toy.Noisy(toy.rows(60)),
}


def run(make_args, folder, data, resume=None, trainer_class=Trainer, **values):
    base = {
        "gradient_accumulation_steps": 3,
        "max_steps": 9,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 2,
    }
    set_seed(3)
    args = make_args(output_dir=str(folder), **{**base, **values})
    words = isinstance(data, list) and "input_ids" in data[0]
    model, collate = (toy.Tagger(), toy.pad) if words else (toy.Classifier(), None)
    trainer = trainer_class(model, args, train_dataset=data, data_collator=collate)
    trainer.train(resume_from_checkpoint=resume)
    logs = [{k: v for k, v in log.items() if k not in TIMED} for log in trainer.state.log_history]
    return trainer.model.state_dict(), logs


TIMED = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.mark.parametrize("name", list(SOURCES))
def test_from_every_checkpoint(make_args, tmp_path, name):
    expected = run(make_args, tmp_path / "whole", SOURCES[name]())
    for step in (1, 4, 5, 6, 8):
        path = str(tmp_path / "whole" / f"checkpoint-{step}")
        found = run(make_args, tmp_path / f"from{step}", SOURCES[name](), path, save_strategy="no")
        assert same(found, expected), f"resumed at update {step}"


def test_what_was_trained_on_is_not_read_again_where_the_stream_knows_its_position(make_args, tmp_path):
    run(make_args, tmp_path / "whole", Positioned(toy.rows(60)))
    stream = Positioned(toy.rows(60))
    run(make_args, tmp_path / "again", stream, str(tmp_path / "whole" / "checkpoint-4"), save_strategy="no")
    # update 4 ends after 12 of the epoch's 15 batches of 4 samples; one more is read ahead and in the checkpoint
    # so two batches are left of this epoch; the next gives twelve to four updates, and one is read ahead
    assert stream.reads == (2 + 12 + 1) * 4


@pytest.mark.parametrize("kind", ["shuffled by the global generator", "grouped by length", "a loader of one's own"])
def test_orders_that_are_drawn_from_the_global_generator(make_args, tmp_path, kind):
    values, trainer_class, data = {}, Trainer, toy.rows(60)
    if kind == "shuffled by the global generator":
        values = {"accelerator_config": {"use_seedable_sampler": False}}
    elif kind == "grouped by length":
        values, data = {"train_sampling_strategy": "group_by_length"}, toy.sequences(60)
    else:

        class trainer_class(Trainer):
            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(
                    self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator
                )

    expected = run(make_args, tmp_path / "whole", data, trainer_class=trainer_class, **values)
    for step in (1, 4, 6):
        path = str(tmp_path / "whole" / f"checkpoint-{step}")
        values["save_strategy"] = "no"
        found = run(make_args, tmp_path / f"from{step}", data, path, trainer_class=trainer_class, **values)
        assert same(found, expected), f"resumed at update {step}"


def test_a_stream_in_a_loader_of_ones_own(make_args, tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    expected = run(make_args, tmp_path / "whole", toy.Stream(toy.rows(60)), trainer_class=Own)
    for step in (1, 4, 6):
        path = str(tmp_path / "whole" / f"checkpoint-{step}")
        values = {"trainer_class": Own, "save_strategy": "no"}
        assert same(run(make_args, tmp_path / f"from{step}", toy.Stream(toy.rows(60)), path, **values), expected), step


def test_an_evaluation_at_the_epochs_end_is_made_up_for(make_args, tmp_path):
    def train(folder, resume=None, **values):
        set_seed(3)
        args = make_args(
            output_dir=str(folder), eval_strategy="epoch", **{"save_strategy": "steps", "save_steps": 13, **values}
        )
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(), eval_dataset=toy.rows(9))
        trainer.train(resume_from_checkpoint=resume)
        return [log.get("eval_loss") for log in trainer.state.log_history], trainer.model.state_dict()

    expected = train(tmp_path / "whole")
    assert same(train(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-13"), save_strategy="no"), expected)


def test_a_stream_without_a_sample_is_an_error_as_upstream(tmp_path):
    for api in (transformers, hf_compat):
        args = api.TrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, disable_tqdm=True, report_to="none")
        with pytest.raises(ValueError, match=r"does not contain any data|gave no samples"):
            api.Trainer(toy.Classifier(), args, train_dataset=toy.Stream([])).train()


def test_a_stream_that_ends_for_good_keeps_what_was_trained(tmp_path, caplog):
    class Once(toy.Stream):
        def __iter__(self):
            yield from self.samples
            self.samples = []

    args = hf_compat.TrainingArguments(
        str(tmp_path), max_steps=9, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    trainer = Trainer(toy.Classifier(), args, train_dataset=Once(toy.rows(8)))
    assert trainer.train().global_step == 2 and "no samples in epoch 1" in caplog.text
