"""Orders of samples against Accelerate's and transformers', and skipping compared with reading."""

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from hf_compat.data.loader import SkipFirstBatches, draw_order, measure_lengths, skip_first_batches
from hf_compat.data.order import SeededRandomSampler
from hf_compat.errors import DataError


def test_the_seeded_order_is_accelerates_in_every_epoch():
    ours, theirs = SeededRandomSampler(RandomSampler(range(20)), 7), SeedableRandomSampler(range(20), data_seed=7)
    theirs.generator = torch.Generator()
    for epoch in (0, 1, 5):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_a_shuffle_leaves_the_users_generator_as_torchs_sampler_does():
    states = []
    for kind in (SeededRandomSampler, SeedableRandomSampler):
        generator = torch.Generator()
        if kind is SeededRandomSampler:
            order = kind(RandomSampler(range(70_000), generator=generator), 7)
        else:
            order = kind(range(70_000), data_seed=7, generator=generator)
        states.append((list(order), generator.get_state().tolist()))
    assert states[0] == states[1]


def test_lengths_that_cannot_be_found_are_refused():
    with pytest.raises(DataError, match="input_ids"):
        measure_lengths([(1, 2)], "input_ids")


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(10)),
    "seeded": lambda: SeededRandomSampler(RandomSampler(range(10)), 1),
    "with replacement": lambda: SeededRandomSampler(RandomSampler(range(10), replacement=True), 1),
    "random": lambda: RandomSampler(range(10), generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("skip", [0, 1, 3, 9])
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_what_is_left_after_skipping_is_what_reading_leaves(make, skip):
    left = SkipFirstBatches(BatchSampler(make(), 3, False), skip)
    assert len(left) == max(4 - skip, 0)
    assert list(left) == list(BatchSampler(make(), 3, False))[skip:]


def test_the_order_can_be_drawn_early_and_no_batch_is_lost():
    torch.manual_seed(0)
    left = skip_first_batches(DataLoader(range(10), batch_sampler=BatchSampler(RandomSampler(range(10)), 3, False)), 1)
    batches = iter(left)
    before = torch.get_rng_state()
    draw_order(batches)
    drawn = torch.get_rng_state()
    assert not torch.equal(before, drawn)
    assert len(list(batches)) == 3 and torch.equal(torch.get_rng_state(), drawn)
