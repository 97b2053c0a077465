"""Faults in data: samples, lengths, sets, streams, collators, samplers, evaluation sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from hf_compat import Trainer, TrainerCallback, default_data_collator
from hf_compat.errors import DataError, HfCompatError, LossError, OverrideError
from sweeps.faults.user_faults import (
    DEAD_WORKER,
    EVAL_ROWS,
    MARK,
    ROWS,
    UPDATES,
    Expected,
    Switch,
    UserError,
    fault,
    ours,
    own,
    throw,
    well,
)

# ---- samples ----


class Data(Dataset):
    """Rows, of which those at `at` come out of `instead` while the switch is on; None makes it all of them."""

    def __init__(self, switch: Switch, instead: Callable[[int], Any], at: int | None = 7, rows: list = ROWS):
        self.switch, self.instead, self.at, self.rows = switch, instead, at, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.instead(index) if self.switch.on and self.at in (None, index) else self.rows[index]


SAMPLES: list[tuple[str, Callable[[int], Any], int | None, Expected]] = [
    ("None", lambda i: None, 7, ours(DataError, "None", "sample")),
    ("None, all of them", lambda i: None, None, ours(DataError, "None", "sample")),
    ("text", lambda i: "a text", None, ours(DataError, "str", "sample")),
    ("a number", lambda i: 3, None, ours(DataError, "int", "sample")),
    ("a list", lambda i: [1.0, 2.0], None, ours(DataError, "list", "sample")),
    ("a tuple", lambda i: (torch.zeros(8), 1), None, ours(DataError, "tuple", "sample")),
    ("a tensor", lambda i: torch.zeros(8), None, ours(DataError, "Tensor", "sample")),
    ("lacks a key", lambda i: {"x": ROWS[i]["x"]}, 7, ours(HfCompatError, "labels")),
    ("of another shape", lambda i: {**ROWS[i], "x": torch.zeros(5)}, 7, ours(DataError, "'x'", "(5,)", "(8,)")),
    ("text for a tensor", lambda i: {**ROWS[i], "x": "abc"}, 7, own(TypeError, "'x'", "called with labels")),
    ("None for a label", lambda i: {**ROWS[i], "labels": None}, 7, ours(HfCompatError, "labels")),
    ("an empty dict", lambda i: {}, None, ours(DataError, "empty")),
]

for _name, _instead, _at, _expected in SAMPLES:

    @fault("sample", _name, _expected)
    def _(switch: Switch, instead=_instead, at=_at) -> dict[str, Any]:
        return {"train_dataset": Data(switch, instead, at)}


RAISED: list[tuple[str, type[BaseException] | BaseException, Expected, Expected | None]] = [
    ("an error", UserError, own(), None),
    ("KeyError", KeyError, own(KeyError, MARK), None),
    ("IndexError", IndexError, own(IndexError, MARK), None),
    ("StopIteration", StopIteration, ours(DataError, "StopIteration", "training"), None),
    ("KeyboardInterrupt", KeyboardInterrupt, own(KeyboardInterrupt), DEAD_WORKER),
    ("SystemExit", SystemExit(3), own(SystemExit, "3"), DEAD_WORKER),
]

for _name, _error, _expected, _in_workers in RAISED:

    @fault("__getitem__", f"raises {_name}", _expected, in_workers=_in_workers)
    def _(switch: Switch, error=_error) -> dict[str, Any]:
        return {"train_dataset": Data(switch, lambda i: throw(error))}


@fault("__getitem__", "raises at once", own())
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": Data(switch, lambda i: throw(), at=None)}


class InEpoch(TrainerCallback):
    def __init__(self, epoch: int, do: Callable[[], None]):
        self.epoch, self.do = epoch, do

    def on_epoch_begin(self, args, state, control, **kwargs):
        if int(state.epoch or 0) == self.epoch:
            self.do()


@fault("__getitem__", "raises in the second epoch", own(), then="resume")
def _(switch: Switch) -> dict[str, Any]:
    data = Data(switch, lambda i: throw() if data.second else ROWS[i])
    data.second = False
    return {"train_dataset": data, "callbacks": [InEpoch(1, lambda: setattr(data, "second", True))]}


@fault("__getitem__", "ends its process", DEAD_WORKER, columns=("workers",))
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": Data(switch, lambda i: os._exit(1))}


# ---- lengths ----


class Length(Data):
    def __init__(self, switch: Switch, length: Callable[[], Any]):
        super().__init__(switch, lambda i: ROWS[i])
        self.length = length

    def __len__(self) -> int:
        return self.length() if self.switch.on else len(ROWS)


LENGTHS: list[tuple[str, Callable[[], Any], Expected]] = [
    ("is a float", lambda: 24.0, ours(DataError, "__len__", "float")),
    ("is a text", lambda: "24", ours(DataError, "__len__", "str")),
    ("is negative", lambda: -1, ours(DataError, "__len__", "-1")),
    ("raises", throw, own()),
    ("is too long", lambda: 80, own(IndexError)),
    ("is too short", lambda: 20, well(updates=10)),
    ("is zero", lambda: 0, ours(DataError, "no batch")),
]

for _name, _length, _expected in LENGTHS:

    @fault("__len__", _name, _expected)
    def _(switch: Switch, length=_length) -> dict[str, Any]:
        return {"train_dataset": Length(switch, length)}


# ---- data sets ----


def healthy(trainer: Trainer) -> None:
    trainer.train_dataset = ROWS


NO_DATA: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("None", lambda: None, ("train_dataset",)),
    ("a generator", lambda: (row for row in ROWS), ("train_dataset", "generator")),
    ("an iterator", lambda: map(dict, ROWS), ("train_dataset", "map")),
    ("a dict of sets", lambda: {"train": ROWS, "test": EVAL_ROWS}, ("train_dataset", "dict", "train")),
    ("a path", lambda: "data/train.json", ("train_dataset", "str")),
    ("a loader", lambda: DataLoader(ROWS, batch_size=2), ("train_dataset", "DataLoader")),
    ("a class", lambda: Data, ("train_dataset", "class", "Data")),
    ("a number", lambda: 24, ("train_dataset", "int")),
    ("a set", lambda: {1, 2, 3}, ("train_dataset", "set")),
    ("an empty list", list, ("no batch",)),
]

for _name, _make, _words in NO_DATA:

    @fault("train_dataset", f"is {_name}", ours(DataError, *_words), repair=healthy)
    def _(switch: Switch, make=_make) -> dict[str, Any]:
        return {"train_dataset": make() if switch.on else ROWS}


@fault("train_dataset", "is a generator, with max_steps", ours(DataError, "generator"), repair=healthy)
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": (row for row in ROWS) if switch.on else ROWS, "args": {"max_steps": UPDATES}}


class Stream(IterableDataset):
    """Iterable data; `items` are what it gives while the switch is on."""

    def __init__(self, switch: Switch, items: Callable[[], Any]):
        self.switch, self.items = switch, items

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        if self.switch.on:
            return self.items()
        return iter(ROWS[number::count] * 3)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[Any]:
        return self.items() if self.switch.on else iter(ROWS)


def ends_in(do: Callable[[], Any], after: int = 9) -> Callable[[], Iterator[Any]]:
    def items() -> Iterator[Any]:
        yield from ROWS[:after]
        yield do()

    return items


STREAMS: list[tuple[str, Callable[[], Any], Expected]] = [
    ("raises", ends_in(throw), own()),
    ("raises at once", ends_in(throw, 0), own()),
    ("gives None", ends_in(lambda: None), ours(DataError, "None", "sample")),
    ("gives text", ends_in(lambda: "text", 0), ours(DataError, "str", "sample")),
    ("is no iterator", lambda: [1, 2], own(TypeError, "iterator")),
    ("raises KeyboardInterrupt", ends_in(lambda: throw(KeyboardInterrupt)), own(KeyboardInterrupt)),
    ("is empty", lambda: iter(()), well("no sample", updates=0)),
]

for _name, _items, _expected in STREAMS:

    @fault(
        "iterable",
        _name,
        _expected,
        in_workers=DEAD_WORKER if "Keyboard" in _name else None,
    )
    def _(switch: Switch, items=_items) -> dict[str, Any]:
        return {"train_dataset": Stream(switch, items), "args": {"max_steps": UPDATES}}


@fault("iterable", "ends before its length", well("24", "9", updates=None), columns=("plain", "async_save"))
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": SizedStream(switch, lambda: iter(ROWS[:9]))}


@fault("iterable", "goes on behind its length", well(), columns=("plain", "async_save"))
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": SizedStream(switch, lambda: iter(ROWS * 2))}


def of_changing_length(change: Callable[[list], None]) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        data = Data(switch, lambda i: None, at=-1, rows=list(ROWS))

        def do() -> None:
            if switch.on:
                change(data.rows)

        def restore(trainer: Trainer) -> None:
            data.rows = ROWS

        return {"train_dataset": data, "callbacks": [InEpoch(1, do)], "repair": restore}

    return parts


fault("train_dataset", "grows between epochs", well())(of_changing_length(lambda rows: rows.extend(rows)))
fault("train_dataset", "shrinks between epochs", well("24", "8", updates=8))(
    of_changing_length(lambda rows: rows.__delitem__(slice(8, None)))
)
fault("train_dataset", "is empty after an epoch", well("no sample", updates=6))(
    of_changing_length(lambda rows: rows.clear())
)


class Epochs(Data):
    def set_epoch(self, epoch: int) -> None:
        if self.switch.on and epoch == 1:
            throw()


@fault("train_dataset", "set_epoch raises", own(), then="resume")
def _(switch: Switch) -> dict[str, Any]:
    return {"train_dataset": Epochs(switch, lambda i: ROWS[i])}


# ---- collators ----


def collator(do: Callable[[list], Any], at: int | None = 3) -> Callable[[Switch], dict[str, Any]]:
    """Return parts whose collator fails at a batch: that of the fourth sample drawn, or every one."""

    def parts(switch: Switch) -> dict[str, Any]:
        def collate(rows: list) -> Any:
            seen = any(row is ROWS[7] or torch.equal(row["x"], ROWS[7]["x"]) for row in rows if "x" in row)
            return do(rows) if switch.on and (at is None or seen) else default_data_collator(rows)

        return {"data_collator": collate}

    return parts


COLLATED: list[tuple[str, Callable[[list], Any], int | None, Expected]] = [
    ("returns None", lambda rows: None, 3, ours(DataError, "None", "collator")),
    ("returns None at once", lambda rows: None, None, ours(DataError, "None", "collator")),
    ("returns text", lambda rows: "text", None, ours(DataError, "str", "collator")),
    ("returns a number", lambda rows: 3, None, ours(DataError, "int", "collator")),
    ("returns a tensor", lambda rows: torch.zeros(2, 8), None, ours(DataError, "Tensor", "collator")),
    ("returns a tuple", lambda rows: (torch.zeros(2, 8), torch.zeros(2)), None, ours(DataError, "tuple", "collator")),
    ("returns a list", lambda rows: [torch.zeros(2, 8)], None, ours(DataError, "list", "collator")),
    ("returns an empty dict", lambda rows: {}, None, ours(DataError, "empty")),
    ("gives no key for labels", lambda rows: {"x": torch.zeros(2, 8)}, 3, ours(LossError, "labels")),
    ("names no parameter", lambda rows: {"y": torch.zeros(2, 8)}, 3, own(TypeError, "unexpected keyword", "'y'")),
    ("has numbers for keys", lambda rows: {0: torch.zeros(2, 8)}, None, ours(DataError, "0", "collator")),
    ("raises", lambda rows: throw(), 3, own()),
    ("raises at once", lambda rows: throw(), None, own()),
    ("raises StopIteration", lambda rows: throw(StopIteration), 3, ours(DataError, "StopIteration")),
]

for _name, _do, _at, _expected in COLLATED:
    fault("collator", _name, _expected)(collator(_do, _at))

fault("collator", "raises KeyboardInterrupt", own(KeyboardInterrupt), in_workers=DEAD_WORKER)(
    collator(lambda rows: throw(KeyboardInterrupt))
)


@fault("collator", "cannot be called", Expected(kinds=(TypeError,), words=("data_collator",)))
def _(switch: Switch) -> dict[str, Any]:
    return {"data_collator": {"padding": True} if switch.on else None}


# ---- samplers and loaders ----


def sampling(make: Callable[[Any], Any]) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        class Sampling(Trainer):
            def _get_train_sampler(self, train_dataset=None):
                return make(train_dataset) if switch.on else super()._get_train_sampler(train_dataset)

        return {"trainer": Sampling}

    return parts


class Order(RandomSampler):
    def __init__(self, data: Any, order: Callable[[], Iterator[Any]]):
        super().__init__(data)
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return self.order()


def order(*last: Any, error: type[BaseException] | None = None) -> Callable[[Any], Any]:
    def indices() -> Iterator[Any]:
        yield from range(9)
        yield from last
        if error is not None:
            throw(error)

    return lambda data: Order(data, indices)


fault("sampler", "raises when made", own())(sampling(lambda data: throw()))
fault("sampler", "raises while read", own())(sampling(order(error=UserError)))
fault("sampler", "gives an index too large", own(IndexError))(sampling(order(99, 0, 1)))
fault("sampler", "gives text", own(TypeError))(sampling(order("a", 0, 1)))
fault("sampler", "ends early", well("12", updates=None))(sampling(order()))
fault("sampler", "is a number", ours(OverrideError, "_get_train_sampler", "int"))(sampling(lambda data: 3))


def loading(make: Callable[[], Any]) -> Callable[[Switch], dict[str, Any]]:
    def parts(switch: Switch) -> dict[str, Any]:
        class Loading(Trainer):
            def get_train_dataloader(self):
                return make() if switch.on else super().get_train_dataloader()

        return {"trainer": Loading}

    return parts


fault("get_train_dataloader", "raises", own())(loading(throw))
fault("get_train_dataloader", "returns None", ours(OverrideError, "get_train_dataloader", "None"))(
    loading(lambda: None)
)
fault("get_train_dataloader", "returns a number", ours(OverrideError, "get_train_dataloader", "int"))(
    loading(lambda: 3)
)
