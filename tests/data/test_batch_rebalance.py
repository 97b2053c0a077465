"""`train_sampling_strategy="batch_rebalance"` gives transformers' batches, on every rank and after a resume."""

import sys

import pytest
from transformers.trainer_pt_utils import BatchRebalanceSampler as UpstreamSampler

from helpers import toy
from helpers.parity.compare import same
from hf_compat import Trainer, trainer_pt_utils
from hf_compat.data.order import RankSlice
from hf_compat.errors import ArgumentError, InertArgumentWarning, MissingPackage

REBALANCE = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2}


def trainer_of(make_args, folder, cls=Trainer, **values):
    args = make_args(output_dir=str(folder), **{**REBALANCE, "num_train_epochs": 2, "logging_steps": 1, **values})
    return cls(toy.Tagger(), args, train_dataset=toy.sequences(41), data_collator=toy.pad)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_within_an_epoch(make_args, tmp_path, workers):
    def run(folder, resume=None, **values):
        trainer = trainer_of(make_args, folder, dataloader_num_workers=workers, **values)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict(), [log.get("loss") for log in trainer.state.log_history]

    expected = run(tmp_path / "whole", save_strategy="steps", save_steps=1)
    for step in (2, 9):
        found = run(tmp_path / f"from{step}", str(tmp_path / "whole" / f"checkpoint-{step}"), save_strategy="no")
        assert same(found, expected), f"resumed at update {step}"


def test_a_sampler_of_transformers_own_is_taken_as_it_is(make_args, tmp_path):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            lengths = [len(sample["input_ids"]) for sample in self.train_dataset]
            return UpstreamSampler(lengths, 8, dp_size=1, grad_accum=2, drop_last=False)

    values = {"train_sampling_strategy": "random"}
    found = [trainer_of(make_args, tmp_path / c.__name__, c, **v) for c, v in ((Own, values), (Trainer, {}))]
    indices = [list(trainer.get_train_dataloader().batch_sampler) for trainer in found]
    assert indices[0] == indices[1]
    assert len({len(batch) for batch in indices[0]}) > 1, "the sizes should differ: that is what it is for"


@pytest.mark.parametrize("option", ["split_batches", "dispatch_batches"])
def test_dividing_the_batches_a_second_time_is_refused(make_args, tmp_path, option):
    trainer = trainer_of(make_args, tmp_path)
    trainer.accelerator.rank_slice = RankSlice(rank=1, world_size=2, **{option: True})
    with pytest.raises(ArgumentError, match=f"{option}.*batch_rebalance"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("strategy", ["batch_rebalance", "group_by_length"])
def test_data_without_a_length_come_in_their_own_order_with_a_warning(make_args, tmp_path, strategy):
    args = make_args(output_dir=str(tmp_path), max_steps=2, train_sampling_strategy=strategy)
    trainer = Trainer(toy.Classifier(), args, train_dataset=toy.Stream(toy.rows()))
    with pytest.warns(InertArgumentWarning, match=f"train_sampling_strategy='{strategy}'.*no length"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_the_sampler_is_transformers_own_and_without_it_that_is_said(make_args, tmp_path, monkeypatch):
    trainer = trainer_of(make_args, tmp_path)
    sampler = trainer._get_train_sampler()
    assert type(sampler) is UpstreamSampler is trainer_pt_utils.BatchRebalanceSampler
    assert all(type(length) is int for length in sampler.lengths)
    monkeypatch.setitem(sys.modules, "transformers.trainer_pt_utils", None)  # as where its import is blocked
    with pytest.raises(MissingPackage, match=r"batch_rebalance.*transformers"):
        trainer._get_train_sampler()
