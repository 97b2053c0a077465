"""Batches of several sizes and one cost: each rank and each micro-batch of an update gets the same work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.utils.data import Sampler

from hf_compat.errors import UnmetRequirement
from hf_compat.interop.transformers_models import is_upstream_rebalance_sampler

Indices = list[int]
# How much the square of a length weighs beside the length itself: attention beside everything else.
SQUARE_WEIGHT = 0.001


class BatchRebalanceSampler(Sampler[Indices]):
    """Divide an update's samples into micro-batches of similar cost: few long samples in one, many short in another.

    Every rank divides the whole update alike and yields its own micro-batches, so nothing is exchanged.

    Args:
        lengths: Tokens of each sample of the data set.
        effective_batch_size: Samples of an update, of all ranks together.
        dp_size: Ranks.
        grad_accum: Micro-batches of an update and rank.
        shuffle: Shuffle each epoch, by `seed + epoch`.
        seed: Seed of epoch 0.
        rank: This rank.
        drop_last: Leave the samples out that do not fill an update.

    Raises:
        UnmetRequirement: A size is below one, or an update has fewer samples than micro-batches.

    Mirrors:
        `transformers.trainer_pt_utils.BatchRebalanceSampler`, 5.23: the same batches.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        if min(dp_size, grad_accum) < 1 or effective_batch_size < dp_size * grad_accum:
            raise UnmetRequirement(
                f"An update of {effective_batch_size} samples cannot be divided into micro-batches of at least one "
                f"sample for {dp_size} ranks with {grad_accum} each.\n\nHint: make the batch size larger."
            )
        self.lengths: list[int] = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
        self.effective_batch_size, self.drop_last = effective_batch_size, drop_last
        self.dp_size, self.rank, self.grad_accum = dp_size, rank, grad_accum
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        updates, rest = divmod(len(self.lengths), self.effective_batch_size)
        return (updates + (rest > 0 and not self.drop_last)) * self.grad_accum

    def __iter__(self) -> Iterator[Indices]:
        order = self._order()
        for start in range(0, len(self) // self.grad_accum * self.effective_batch_size, self.effective_batch_size):
            update = order[start : start + self.effective_batch_size]
            # a short last update begins again with the epoch's first samples: each micro-batch needs one
            missing = max(self.dp_size * self.grad_accum - len(update), 0)
            update += (order * math.ceil(missing / len(order)))[:missing]
            longest_first = sorted(update, key=self.lengths.__getitem__, reverse=True)
            division = _Division([self.lengths[index] for index in longest_first], self.dp_size, self.grad_accum)
            division.balance(max(30 * len(division.counts), self.effective_batch_size))
            # this rank's micro-batches: the dearest of all ranks come first, side by side
            ranking, ends = division.dearest_first(), list(accumulate(division.counts))
            for place in range(self.rank, len(ranking), self.dp_size):
                end = ends[ranking[place]]
                yield longest_first[end - division.counts[ranking[place]] : end]

    def _order(self) -> Indices:
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: Indices = torch.randperm(len(self.lengths), generator=generator).tolist()
        return order


class _Division:
    """One update's samples, the longest first, cut into groups that follow each other.

    Args:
        lengths: The samples' lengths, the longest first.
        ranks: Groups that are trained on at the same time: those side by side in the order of their cost.
        turns: Groups of each rank.
    """

    def __init__(self, lengths: Sequence[int], ranks: int, turns: int) -> None:
        self.lengths = lengths
        self.ranks = ranks
        each, rest = divmod(len(lengths), ranks * turns)
        self.counts = [each + (group < rest) for group in range(ranks * turns)]
        self._fixed: set[int] = set()

    def balance(self, moves: int) -> None:
        """Move a sample at a time from the dearest group to the cheapest, and keep the most even division met."""
        best, smallest = list(self.counts), math.inf
        met: set[tuple[int, ...]] = set()
        for _ in range(moves):
            free = [group for group in range(len(self.counts)) if group not in self._fixed]
            if tuple(self.counts) in met or len(free) <= 1:
                break
            met.add(tuple(self.counts))
            costs = self.costs()
            dearest, cheapest = max(free, key=costs.__getitem__), min(free, key=costs.__getitem__)
            spread = costs[dearest] - costs[cheapest]
            if spread < smallest:
                best, smallest = list(self.counts), spread
            if spread == 0:
                break
            if self.counts[dearest] > 1:
                self._move(dearest, cheapest)
            else:
                # Fill up the groups that are trained beside one of a single sample, and change none of them any more
                ranking = _dearest_first(costs)
                first = ranking.index(dearest) // self.ranks * self.ranks
                beside = set(ranking[first : first + self.ranks])  # a set, whose order upstream goes by
                for group in beside:
                    if group not in self._fixed and group != dearest:
                        self._fill(group, costs[dearest], beside)
                self._fixed.update(beside)
        self.counts = best

    def costs(self) -> list[float]:
        """Return what each group costs: it is padded to its first, longest sample."""
        starts = accumulate(self.counts[:-1], initial=0)
        return [_cost(count, self.lengths[start]) for count, start in zip(self.counts, starts, strict=True)]

    def dearest_first(self) -> list[int]:
        """Return the groups in the order of their cost."""
        return _dearest_first(self.costs())

    def _move(self, giver: int, taker: int) -> None:
        self.counts[giver] -= 1
        self.counts[taker] += 1

    def _fill(self, group: int, limit: float, beside: set[int]) -> None:
        """Give a group samples of cheap ones as long as it costs no more than the limit."""
        while _cost(self.counts[group] + 1, self.lengths[sum(self.counts[:group])]) <= limit:
            taken = self._fixed | beside
            givers = [other for other, count in enumerate(self.counts) if other not in taken and count > 1]
            if not givers:
                return
            self._move(min(givers, key=self.costs().__getitem__), group)


def _cost(samples: int, longest: int) -> float:
    return samples * longest + SQUARE_WEIGHT * samples * longest * longest


def _dearest_first(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)


def knows_its_rank(sampler: object) -> bool:
    """Return whether a sampler yields whole batches, of its own rank only: ours, or transformers' own."""
    return isinstance(sampler, BatchRebalanceSampler) or is_upstream_rebalance_sampler(sampler)
