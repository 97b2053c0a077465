"""Batches of different sizes and similar cost, so that each micro-batch of an update is the same work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.utils.data import Sampler

from hf_compat.errors import UnmetRequirement
from hf_compat.interop.transformers_models import is_upstream_rebalance_sampler

Indices = list[int]
# Weight of a length's square relative to the length itself, as attention relative to everything else.
SQUARE_WEIGHT = 0.001


class BatchRebalanceSampler(Sampler[Indices]):
    """Divides an update's samples into micro-batches of similar cost, some with few long samples, some with many short.

    Every rank divides the whole update in the same way and yields its own micro-batches, without communication.

    Args:
        lengths: Tokens of each sample of the data set.
        effective_batch_size: Samples in an update, over all ranks.
        dp_size: Number of ranks.
        grad_accum: Micro-batches in an update, per rank.
        shuffle: Shuffle each epoch with the seed `seed + epoch`.
        seed: Seed of epoch 0.
        rank: This rank.
        drop_last: Leave out samples that do not fill an update.

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
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        updates, rest = divmod(len(self.lengths), self.effective_batch_size)
        return (updates + (rest > 0 and not self.drop_last)) * self.grad_accum

    def __iter__(self) -> Iterator[Indices]:
        order = self._order()
        for start in range(0, len(self) // self.grad_accum * self.effective_batch_size, self.effective_batch_size):
            update = order[start : start + self.effective_batch_size]
            # repeat the epoch's first samples in a short last update, as each micro-batch needs one
            missing = max(self.dp_size * self.grad_accum - len(update), 0)
            update += (order * math.ceil(missing / len(order)))[:missing]
            longest_first = sorted(update, key=self.lengths.__getitem__, reverse=True)
            division = _Division([self.lengths[index] for index in longest_first], self.dp_size, self.grad_accum)
            division.balance(max(30 * len(division.counts), self.effective_batch_size))
            # this rank's micro-batches. The most expensive ones of all ranks come first, at the same time
            ranking, ends = division.most_expensive_first(), list(accumulate(division.counts))
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
    """The samples of one update, longest first, cut into consecutive groups.

    Args:
        lengths: The samples' lengths, longest first.
        ranks: Number of groups that are trained on at the same time. Sorted by cost, these are neighbours.
        turns: Number of groups for each rank.
    """

    def __init__(self, lengths: Sequence[int], ranks: int, turns: int) -> None:
        self.lengths = lengths
        self.ranks = ranks
        each, rest = divmod(len(lengths), ranks * turns)
        self.counts = [each + (group < rest) for group in range(ranks * turns)]
        self._fixed: set[int] = set()

    def balance(self, moves: int) -> None:
        """Move samples one by one from the most to the least expensive group. Keep the most even division found."""
        best, smallest = list(self.counts), math.inf
        met: set[tuple[int, ...]] = set()
        for _ in range(moves):
            free = [group for group in range(len(self.counts)) if group not in self._fixed]
            if tuple(self.counts) in met or len(free) <= 1:
                break
            met.add(tuple(self.counts))
            costs = self.costs()
            costliest, cheapest = max(free, key=costs.__getitem__), min(free, key=costs.__getitem__)
            spread = costs[costliest] - costs[cheapest]
            if spread < smallest:
                best, smallest = list(self.counts), spread
            if spread == 0:
                break
            if self.counts[costliest] > 1:
                self._move(costliest, cheapest)
            else:
                # Fill the groups that run beside a single-sample group up to its cost, then fix them all
                ranking = _most_expensive_first(costs)
                first = ranking.index(costliest) // self.ranks * self.ranks
                beside = set(ranking[first : first + self.ranks])  # a set, as upstream iterates in a set's order
                for group in beside:
                    if group not in self._fixed and group != costliest:
                        self._fill(group, costs[costliest], beside)
                self._fixed.update(beside)
        self.counts = best

    def costs(self) -> list[float]:
        """Return the cost of each group, which is padded to its first and longest sample."""
        starts = accumulate(self.counts[:-1], initial=0)
        return [_cost(count, self.lengths[start]) for count, start in zip(self.counts, starts, strict=True)]

    def most_expensive_first(self) -> list[int]:
        """Return the groups, the most expensive one first."""
        return _most_expensive_first(self.costs())

    def _move(self, giver: int, taker: int) -> None:
        self.counts[giver] -= 1
        self.counts[taker] += 1

    def _fill(self, group: int, limit: float, beside: set[int]) -> None:
        """Move samples from cheap groups into one group until its cost would exceed the limit."""
        while _cost(self.counts[group] + 1, self.lengths[sum(self.counts[:group])]) <= limit:
            taken = self._fixed | beside
            givers = [other for other, count in enumerate(self.counts) if other not in taken and count > 1]
            if not givers:
                return
            self._move(min(givers, key=self.costs().__getitem__), group)


def _cost(samples: int, longest: int) -> float:
    return samples * longest + SQUARE_WEIGHT * samples * longest * longest


def _most_expensive_first(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)


def knows_its_rank(sampler: object) -> bool:
    """Whether a sampler yields only this rank's batches, as our rebalancing sampler and transformers' own do."""
    return isinstance(sampler, BatchRebalanceSampler) or is_upstream_rebalance_sampler(sampler)
