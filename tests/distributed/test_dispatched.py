"""Batches that rank 0 reads for all: each rank's part, against Accelerate's loader, on two ranks."""

from __future__ import annotations

import itertools
import json

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader

from helpers.forking import run_ranks
from hf_compat.data.order import RankSlice, dispatched

WAYS = list(itertools.product(range(1, 14), (False, True), (False, True)))  # samples, drops the last, splits batches


def test_each_rank_gets_what_accelerate_gives_it(tmp_path):
    def body(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        accelerate.PartialState._reset_state()  # the test's process is alone
        accelerate.PartialState(cpu=True)
        found = []
        for count, drop_last, splits in WAYS:
            loader = DataLoader(torch.arange(count), batch_size=4, drop_last=drop_last)
            theirs = DataLoaderDispatcher(loader.dataset, batch_size=4, drop_last=drop_last, split_batches=splits,
                                          _drop_last=drop_last)  # fmt: skip
            has_none = drop_last and count < (4 if splits else 8)  # no whole round: theirs broadcasts None, and fails
            expected = [] if has_none else [batch.tolist() for batch in theirs]
            slice_ = RankSlice(rank=rank, world_size=2, split_batches=splits)
            parts = [batch for batch, _, _ in dispatched(loader if rank == 0 else None, slice_, drop_last)]
            for part in parts:
                assert part.untyped_storage().nbytes() == part.nbytes, "it came without the parts of others"
            ours = [part.tolist() for part in parts]
            found.append((expected, ours))
            # both hold parts of one model: each gets every whole batch
            shared = dispatched(
                loader if rank == 0 else None, RankSlice(rank=rank, world_size=2).shared_by(2), drop_last
            )
            assert [part.tolist() for part, _, _ in shared] == [batch.tolist() for batch in loader], (count, drop_last)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    for ended in run_ranks(tmp_path / "logs", body):
        assert ended.status == 0, ended.said
    for rank in (0, 1):
        pairs = json.loads((tmp_path / f"{rank}.json").read_text())
        for way, (expected, ours) in zip(WAYS, pairs, strict=True):
            assert ours == expected, (rank, way)
        assert sum(bool(expected) for expected, _ in pairs) > 40
