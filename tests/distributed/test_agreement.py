"""Ranks that disagree: a flag that one of them sets holds on all; arguments that differ are named at the start."""

from __future__ import annotations

import functools
import json
import logging

import numpy as np
import pytest
import torch

from helpers import toy
from helpers.forking import run_ranks
from hf_compat import Trainer, TrainerCallback, TrainingArguments, set_seed
from hf_compat.checkpoint import manifest
from hf_compat.errors import ArgumentError, ProcessError
from hf_compat.hf.callbacks import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback
from hf_compat.training_run import resumer
from hf_compat.training_run.flags import FlagSources, flag_sources
from hf_compat.training_run.same_on_ranks import compare_arguments, differences

TIMEOUT = 40  # ddp_timeout in seconds: a rank that waits for another one in vain makes the test fail


def arguments(folder, **values):
    base = {
        "per_device_train_batch_size": 2, "max_steps": 6, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "report_to": "none", "ddp_timeout": TIMEOUT, "gradient_accumulation_steps": 2, "logging_steps": 50,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**base, **values})


class SetFlag(TrainerCallback):
    """Set a flag at an event of update 3, on rank 1."""

    def __init__(self, event, flag):
        self.flag = flag
        setattr(self, event, self.set_it)

    def on_init_end(self, args, state, control, **kwargs): ...

    def set_it(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step in (2, 3):
            setattr(control, self.flag, True)


class Seen(TrainerCallback):
    def __init__(self):
        self.events = []

    def note(self, event, state):
        self.events.append((event, state.global_step))

    def on_log(self, args, state, control, **kwargs):
        self.note("log", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self.note("evaluate", state)

    def on_save(self, args, state, control, **kwargs):
        self.note("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.note("end", state)


CASES = [
    ("on_step_end", "should_training_stop"),
    ("on_step_end", "should_save"),
    ("on_step_end", "should_evaluate"),
    ("on_step_end", "should_log"),
    ("on_step_end", "should_epoch_stop"),
    ("on_step_begin", "should_training_stop"),
    ("on_substep_end", "should_training_stop"),
    ("on_substep_end", "should_epoch_stop"),
    ("on_optimizer_step", "should_save"),
    ("on_epoch_end", "should_training_stop"),
    ("on_epoch_end", "should_save"),
]


# With the callback on both ranks each event is agreed on as with it on one.
EVERYWHERE = (("on_step_end", "should_training_stop"), ("on_step_end", "should_save"), ("on_epoch_end", "should_save"))
ROWS = [
    *(pytest.param(*case, True, id="-".join(case)) for case in CASES),
    *(
        pytest.param(
            *case, False, id="-".join((*case, "everywhere")), marks=[pytest.mark.matrix] * (case not in EVERYWHERE)
        )
        for case in CASES
    ),
]


@pytest.mark.parametrize(("event", "flag", "on_one_rank_only"), ROWS)
def test_a_flag_of_one_rank_holds_on_all(tmp_path, event, flag, on_one_rank_only):
    def body(rank):
        set_seed(3)
        seen = Seen()
        callbacks = [seen] if rank == 0 and on_one_rank_only else [SetFlag(event, flag), seen]
        trainer = Trainer(
            toy.Classifier(), arguments(tmp_path / "out"), train_dataset=toy.rows(24), eval_dataset=toy.rows(8),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        (tmp_path / f"seen{rank}.json").write_text(json.dumps([seen.events, trainer.state.global_step]))

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended
    first, second = ((tmp_path / f"seen{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    events, updates = json.loads(first)
    assert (updates < 6) == (flag in ("should_training_stop", "should_epoch_stop"))
    wanted = {"should_save": "save", "should_evaluate": "evaluate", "should_log": "log"}.get(flag)
    assert wanted is None or any(event == wanted and step < 6 for event, step in events)


def test_metrics_that_differ_between_ranks_stop_all_of_them(tmp_path):
    def body(rank):
        set_seed(3)
        args = arguments(
            tmp_path / "out", eval_strategy="steps", eval_steps=1, metric_for_best_model="m", greater_is_better=True,
            save_strategy="best",
        )  # fmt: skip
        values = iter([1, 2, 3, 4, 5, 6, 7] if rank == 0 else [5, 4, 3, 2, 1, 0, 0])
        trainer = Trainer(
            toy.Classifier(), args, train_dataset=toy.rows(24), eval_dataset=toy.rows(8),
            compute_metrics=lambda prediction: {"m": float(next(values))},
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )  # fmt: skip
        trainer.train()
        print("updates", trainer.state.global_step)

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended
    assert all("updates 3" in rank.said for rank in ended)


DIFFERENT = [
    ("max_steps", 4, 6),
    ("num_train_epochs", 2.0, 3.0),
    ("per_device_train_batch_size", 2, 4),
    ("gradient_accumulation_steps", 1, 2),
    ("save_steps", 2, 3),
    ("eval_steps", 2, 3),
    ("logging_steps", 2, 3),
    ("eval_on_start", False, True),
    ("max_grad_norm", 0.0, 1.0),
    ("learning_rate", 0.1, 0.2),
    ("seed", 0, 1),
    ("data_seed", 0, 1),
    ("train_sampling_strategy", "random", "sequential"),
    ("remove_unused_columns", True, False),
    ("optim", "adamw_torch", "sgd"),
    ("label_smoothing_factor", 0.0, 0.1),
]


def test_arguments_that_differ_are_named_on_every_rank(tmp_path):
    def body(rank):
        for name, *values in DIFFERENT:
            common = {"eval_strategy": "steps", "save_strategy": "steps", "max_steps": -1, "eval_steps": 1}
            args = arguments(tmp_path / f"out{rank}", **{**common, name: values[rank]})
            trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24), eval_dataset=toy.rows(8))
            with pytest.raises(ArgumentError) as caught:
                trainer.train()
            assert f"`{name}` is {values[0]!r} on rank 0; {values[1]!r} on rank 1" in str(caught.value), caught.value
        args = arguments(tmp_path / "out", max_steps=2)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24))
        with pytest.raises(ArgumentError, match="`resume_from_checkpoint` is None on rank 0; 'checkpoint-2' on rank 1"):
            trainer.train(resume_from_checkpoint=None if rank == 0 else str(tmp_path / "checkpoint-2"))
        assert trainer.train().global_step == 2  # the same Trainer, once the ranks agree

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


class Order(Trainer):
    """Notes the samples that it trains on."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.samples += inputs["number"].tolist()
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("number")
        return super().compute_loss(model, inputs, return_outputs)


def test_a_seed_of_each_rank_is_refused_as_its_epochs_would_lack_samples(tmp_path):
    rows = [{**row, "number": place} for place, row in enumerate(toy.rows(16))]

    def body(rank):
        from torch.distributed import all_gather_object

        for seeds in ((0, 1), (5, 5)):
            plain = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 1}
            args = arguments(tmp_path / "out", seed=seeds[rank], remove_unused_columns=False, **plain)
            trainer = Order(toy.Classifier(), args, train_dataset=rows)
            trainer.samples = []
            if seeds[0] != seeds[1]:
                with pytest.raises(ArgumentError, match="`seed` is 0 on rank 0; 1 on rank 1"):
                    trainer.train()
                continue
            trainer.train()
            both = [None, None]
            all_gather_object(both, trainer.samples)
            assert sorted(both[0] + both[1]) == list(range(16)), "the hint, followed"

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


@pytest.mark.parametrize("samples", [13, 16])
def test_rows_predicted_by_length_are_in_the_order_of_the_data_set(tmp_path, samples):
    data = toy.sequences(samples)

    def body(rank):
        torch.manual_seed(0)
        model = toy.Tagger()
        values = {"per_device_eval_batch_size": 2, "train_sampling_strategy": "group_by_length"}
        found = Trainer(model, arguments(tmp_path / "out", **values), data_collator=toy.pad).predict(data)
        lengths = [len(row["labels"]) for row in data]
        assert [int((row != -100).sum()) for row in found.label_ids] == lengths
        model.eval()
        for row, one in zip(data, found.predictions, strict=True):
            right = model(**toy.pad([row]))["logits"][0].detach().numpy()
            np.testing.assert_allclose(one[: len(row["labels"])], right, rtol=1e-4, atol=1e-6)

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


def test_data_of_different_lengths_are_named(tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            from torch.utils.data import DataLoader

            rows = toy.rows(8 if self.args.process_index == 0 else 16)
            return DataLoader(rows, batch_size=2, collate_fn=self.data_collator)

    def body(rank):
        of_rank = toy.rows(16 if rank == 0 else 32)
        for kind, data in ((Own, toy.rows(8)), (Trainer, of_rank)):
            trainer = kind(toy.Classifier(), arguments(tmp_path / "out", max_steps=-1), train_dataset=data)
            with pytest.raises(ArgumentError, match=r"training data.*is 6 on rank 0; 12 on rank 1"):
                trainer.train()
        trainer = Trainer(toy.Classifier(), arguments(tmp_path / "out", max_steps=2), train_dataset=of_rank)
        assert trainer.train().global_step == 2, "each rank's updates are those of the arguments"

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


def test_settings_that_may_differ_do(tmp_path):
    def body(rank):
        own = {
            "report_to": ["tensorboard"] if rank == 0 else [],
            "dataloader_num_workers": rank,
            "run_name": f"r{rank}",
        }
        trainer = Trainer(toy.Classifier(), arguments(tmp_path / "out", **own), train_dataset=toy.rows(24))
        assert trainer.train().global_step == 6

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


def test_nothing_is_asked_where_the_arguments_alone_set_flags(tmp_path):
    """No message an update, neither ours nor Lightning's of SIGTERM, without callbacks of the user's own."""

    def body(rank):
        from torch import distributed

        counts = []
        for callbacks in ([], [Seen]):
            sent = []
            originals = {name: getattr(distributed, name) for name in ("all_reduce", "broadcast", "barrier")}
            for name, original in originals.items():
                setattr(distributed, name, lambda *a, _n=name, _o=original, **k: [sent.append(_n), _o(*a, **k)][1])
            by_length = []
            for updates in (4, 24):
                sent.clear()
                args = arguments(tmp_path / "out", max_steps=updates, gradient_accumulation_steps=1)
                Trainer(toy.Classifier(), args, train_dataset=toy.rows(96), callbacks=callbacks).train()
                by_length.append(len(sent))
            counts.append((by_length[1] - by_length[0]) / 20)
            for name, original in originals.items():
                setattr(distributed, name, original)
        print("messages an update:", counts)

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended
    assert all("messages an update: [0.0, 1.0]" in rank.said for rank in ended), ended


def test_which_callbacks_are_asked_about():
    class Own(DefaultFlowCallback): ...

    class WithEpochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs): ...

    ours = [DefaultFlowCallback(), PrinterCallback(), EarlyStoppingCallback()]
    assert flag_sources(ours, False, Trainer, 4) == FlagSources()
    assert flag_sources([TrainerCallback()], False, Trainer, 4) == FlagSources()
    assert flag_sources([*ours, Own()], False, Trainer, 4) == FlagSources(in_updates=True, in_epochs=True)
    assert flag_sources([*ours, WithEpochs()], False, Trainer, 4) == FlagSources(in_updates=True, in_epochs=True)
    assert flag_sources(ours, True, Trainer, 4) == FlagSources(in_updates=True, in_epochs=True)
    assert flag_sources(ours, False, type("Mine", (Trainer,), {}), 4) == FlagSources(in_updates=True)
    patched = DefaultFlowCallback()
    patched.on_step_end = lambda *args, **kwargs: None
    assert flag_sources([patched], False, Trainer, 4).in_updates
    patched = Trainer.__new__(Trainer)
    patched.__copy__ = lambda: None  # called by Python alone
    assert not flag_sources(ours, False, patched, 4).in_updates
    patched.log = functools.wraps(Trainer.log)(lambda *args: None)
    assert flag_sources(ours, False, patched, 4).in_updates
    at_substeps = SetFlag("on_substep_end", "should_save")
    assert flag_sources([at_substeps], False, Trainer, 4) == FlagSources(in_updates=True, in_windows=True)
    assert flag_sources([at_substeps], False, Trainer, 1) == FlagSources(in_updates=True)


def test_every_argument_is_shared_between_ranks_unless_its_row_says_otherwise(make_args, monkeypatch):
    logging.getLogger("hf_compat").setLevel(logging.ERROR)
    compared = []

    def note(mine, what, **others):
        compared.extend(mine)

    monkeypatch.setattr("hf_compat.training_run.same_on_ranks.refuse_differences", note)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    compare_arguments(make_args(async_save=True), None)
    shared = "seed data_seed optim_target_modules use_liger_kernel remove_unused_columns push_to_hub async_save"
    assert {*shared.split(), "learning_rate", "max_steps", "fsdp", "resume_from_checkpoint"} <= set(compared)
    assert not {"output_dir", "local_rank", "disable_tqdm", "report_to", "log_level", "hub_token"} & set(compared)


def test_differences_of_many_ranks_are_grouped():
    values = [{"max_steps": "4"}, {"max_steps": "6"}, {"max_steps": "4"}, {}]
    assert differences(values) == ["`max_steps` is 4 on ranks 0, 2; 6 on rank 1; not set on rank 3"]


UNEVEN = [
    ("train", 10, {}, "6 on rank 0; 4 on rank 1"),
    ("train", 9, {"split_batches": True}, "with 1 samples in the last one of an epoch on rank 0"),
    ("evaluate", 10, {}, "the last rank 0. Their results cannot be gathered"),
    ("evaluate", 11, {}, "the last rank 1. Their results cannot be gathered"),
]


@pytest.mark.parametrize(("method", "samples", "options", "said"), UNEVEN)
def test_shares_that_would_make_ranks_wait_are_refused(tmp_path, method, samples, options, said):
    def body(rank):
        set_seed(3)
        args = arguments(
            tmp_path / "out", per_device_eval_batch_size=2, accelerator_config={"even_batches": False, **options},
            max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer = Trainer(
            toy.Classifier(), args, train_dataset=toy.rows(samples), eval_dataset=toy.rows(samples),
            compute_metrics=lambda prediction: {"n": len(prediction.label_ids)},
        )  # fmt: skip
        with pytest.raises(ArgumentError) as error:
            getattr(trainer, method)()
        assert said in str(error.value) and "dataloader_drop_last=True" in str(error.value), error.value

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


WORKING = [
    ("train", 14, {"gradient_accumulation_steps": 2}, {}),  # four batches and three are two updates each
    ("train", 10, {"max_steps": 6}, {}),
    ("train", 9, {"max_steps": 8}, {"split_batches": True}),
    ("evaluate", 11, {}, {}),
]


@pytest.mark.parametrize(("method", "samples", "values", "options"), WORKING)
def test_shares_that_train_under_transformers_train_here(tmp_path, method, samples, values, options):
    def body(rank):
        set_seed(3)
        plain = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 1, **values}
        config = {"even_batches": False, **options}
        args = arguments(tmp_path / "out", per_device_eval_batch_size=2, accelerator_config=config, **plain)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(samples), eval_dataset=toy.rows(samples))
        getattr(trainer, method)()

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


def test_a_checkpoint_that_one_rank_sees_differently_ends_all_of_them(tmp_path):
    """Each would wait in another place: one verifies its share of a folder, the other one finds none."""
    (tmp_path / "checkpoint-2").mkdir()

    def body(rank):
        trainer = Trainer(toy.Classifier(), arguments(tmp_path / "out"), train_dataset=toy.rows(24))
        told = r"`resume_from_checkpoint` is a folder on rank 0; not there on rank 1"
        with pytest.raises(ArgumentError, match=told):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2" if rank == 0 else "checkpoint-2"))

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended


@pytest.mark.parametrize(("place", "failing"), [("candidates", 0), ("problems", 0), ("problems", 1)])
def test_a_rank_that_cannot_look_for_checkpoints_ends_all_of_them(tmp_path, place, failing):
    def body(rank):
        args = arguments(tmp_path / "out", save_strategy="steps", save_steps=3)
        Trainer(toy.Classifier(), args, train_dataset=toy.rows(24)).train()

        def fail(*args):
            raise OSError("the disk is gone")

        if rank == failing:
            setattr(resumer if place == "candidates" else manifest, place, fail)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(24))
        with pytest.raises(OSError if rank == failing else ProcessError, match="the disk is gone"):
            trainer.train(resume_from_checkpoint=True)

    ended = run_ranks(tmp_path / "logs", body)
    assert [rank.status for rank in ended] == [0, 0], ended
