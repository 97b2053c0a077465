"""The data of the run: the sets, the collator, the order of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hf_compat.data.collators import PaddingCollator, RemoveColumnsCollator
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.order import SeededRandomSampler
from hf_compat.data.types import DataSource
from hf_compat.interop.transformers_models import is_datasets_dataset, is_datasets_stream
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.seeding import RandomStates, is_same, read_rng
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.sources import Import
from hf_compat.trainer import Trainer

_SHORT_STREAM = (
    "A stream may end within an update. Hugging Face then continues that update in the next epoch; here it is a short "
    "update of its own."
)


@dataclass
class DataPart:
    """The data module."""

    train_set: str = ""
    collator: str = "None"
    eval_sets: dict[str, str] = field(default_factory=dict)  # expressions by name. The name of a single one is empty
    shuffles: bool = False
    data_seed: int = 0  # the seed of the first epoch
    groups: int | None = None  # the number of samples of like length that are grouped
    reads_ahead: bool = False  # whether reading a batch draws random numbers
    streams: bool = False  # whether a set is a stream, to which Lightning has to pass the epoch
    copies: bool = False
    lengths: str = ""
    length_key: str = ""
    sampler: str = ""
    data_left: list[str] = field(default_factory=list)


def describe_data(trainer: Trainer, write: Expressions, findings: Findings) -> DataPart:
    """Find out how the data are read again, or leave them to the user."""
    part = DataPart()
    loader, collator = trainer.get_train_dataloader(), trainer.data_collator
    is_ours = isinstance(collator, PaddingCollator)
    try:
        if isinstance(collator, PaddingCollator):
            padding = write.named("transformers", "DataCollatorWithPadding")
            part.collator = f"{padding}({write.of(collator.tokenizer)})"
        else:
            part.collator = write.of(collator)
    except CannotBeWritten as error:
        name = getattr(collator, "__name__", type(collator).__name__)
        what = f"The {'tokenizer of the ' if is_ours else ''}collator {name} ({write.code.where(collator)})"
        part.data_left += findings.leave(f"{what} cannot be written down: {error}", "`setup` in `data.py`")
    part.train_set = _data_set("train", trainer, loader, part, write, findings)
    _order(part, trainer, loader, write, findings)
    given = trainer.eval_dataset
    for name, dataset in (given if isinstance(given, Mapping) else {"": given}).items():
        if dataset is not None:
            file = f"eval_{name}" if name else "eval"
            part.eval_sets[name] = _data_set(file, trainer, trainer.get_eval_dataloader(dataset), part, write, findings)
    return part


def _order(part: DataPart, trainer: Trainer, loader: object, write: Expressions, findings: Findings) -> None:
    if not isinstance(loader, DataLoader):
        return
    sampler, samples = getattr(loader, "sampler", None), cast(Sequence[object], loader.dataset)
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is SequentialSampler:
        return
    if type(sampler) is SeededRandomSampler and not sampler.replacement and sampler.num_samples == len(samples):
        part.shuffles, part.data_seed = True, sampler.initial_seed
    elif type(sampler).__name__ == "LengthGroupedSampler":  # transformers'
        part.groups = sampler.batch_size  # type: ignore[union-attr]  # as above
        column = trainer.args.length_column_name
        has_column = trainer._has_lengths(loader.dataset)
        part.length_key = column if has_column else trainer._length_key
        measured = f'[len(row["{part.length_key}"]) for row in samples]'
        part.lengths = f'list(samples["{column}"])' if has_column else measured
    else:
        write.known.update({id(samples): "self.train_set", id(trainer.train_dataset): "self.train_set"})
        try:
            part.sampler = write.of(sampler)
        except CannotBeWritten as error:
            what = f"The order of training samples is that of a {type(sampler).__name__}, which cannot be written down"
            part.data_left += findings.leave(f"{what}: {error}", "`train_dataloader` in `data.py`")


def _is_plain(loader: object, trainer: Trainer, is_train: bool) -> bool:
    """Whether a loader is the Trainer's, or one of the script's with the same settings."""
    if isinstance(loader, PreparedDataLoader) or type(loader) is not DataLoader:
        return isinstance(loader, PreparedDataLoader)
    args = trainer.args
    size = args.train_batch_size if is_train else args.eval_batch_size
    settings = (loader.batch_size, loader.num_workers, loader.drop_last, loader.collate_fn, type(loader.batch_sampler))
    wanted = (size, args.dataloader_num_workers, args.dataloader_drop_last, trainer.data_collator, BatchSampler)
    return settings == wanted and loader.generator is None and loader.worker_init_fn is None


def _data_set(
    name: str, trainer: Trainer, loader: object, part: DataPart, write: Expressions, findings: Findings
) -> str:
    if not _is_plain(loader, trainer, is_train=name == "train"):
        maker = type(trainer).get_train_dataloader if name == "train" else type(trainer).get_eval_dataloader
        what = f"The {name} set has a loader of its own, a {type(loader).__name__} ({write.code.where(maker)})"
        part.data_left += findings.leave(what, "`train_dataloader` and `val_dataloader` in `data.py`")
        return "None"
    assert isinstance(loader, DataLoader)
    dataset: DataSource = loader.dataset
    before = read_rng()
    try:
        if isinstance(dataset, IterableDataset):
            part.reads_ahead = part.streams = True
            if trainer.args.gradient_accumulation_steps > 1 and name == "train":
                findings.tell(_SHORT_STREAM)
            return _stream(dataset, loader.collate_fn, write)
        if is_datasets_dataset(dataset):
            if dataset.format["type"] == "custom":
                raise CannotBeWritten("`set_transform` has given it a function, which is not saved with it")
            file = write.files.add(f"data/{name}", dataset, dataset.save_to_disk)
            expression = f"{write.named('datasets', 'load_from_disk')}({write.here(file)})"
        else:
            samples = [dataset[index] for index in range(len(dataset))]
            if not same_random_states(before, read_rng()):  # each reading makes other samples
                part.reads_ahead = True
                return write.of(dataset)
            expression = _samples(name, dataset, samples, loader.collate_fn, part, write)
        if name == "train" and loader.collate_fn is not None:
            # Whether collating draws random numbers
            rows = (dataset[index] for index in range(loader.batch_size or 1))
            loader.collate_fn(list(islice(rows, loader.batch_size)))
            part.reads_ahead |= not same_random_states(before, read_rng())
        return expression
    except CannotBeWritten as error:
        what = f"The {name} set, a {type(dataset).__name__} ({write.code.where(type(dataset))}), cannot be written down"
        part.data_left += findings.leave(f"{what}: {error}", "`setup` in `data.py`")
        return "None"


def _stream(dataset: IterableDataset[object], collate: object, write: Expressions) -> str:
    """The expression of a stream, without the columns that the model does not take."""
    expression, before = write.of(dataset), read_rng()
    sample = next(iter(dataset), None)
    if not same_random_states(before, read_rng()):
        raise CannotBeWritten("reading it draws random numbers, and Hugging Face's loader draws them at other moments")
    if not isinstance(collate, RemoveColumnsCollator) or not isinstance(sample, Mapping):
        return expression
    unread = [name for name in sample if name not in collate.signature_columns]
    if not unread:
        return expression
    if not is_datasets_stream(dataset):
        raise CannotBeWritten(f"its samples have {', '.join(map(repr, unread))}, which the model does not take")
    return f"{expression}.remove_columns({write.of(unread)})"


def _samples(
    name: str, dataset: object, samples: list[object], collate: object, part: DataPart, write: Expressions
) -> str:
    if isinstance(collate, RemoveColumnsCollator):
        columns = collate.signature_columns
        rows = ((sample, isinstance(sample, Mapping)) for sample in samples)
        samples = [{key: row[key] for key in row if key in columns} if is_row else row for row, is_row in rows]  # type: ignore[index,attr-defined]  # a mapping
    kept = [_plain_sample(sample) for sample in samples]
    part.copies |= any(isinstance(sample, dict) for sample in kept)
    file = write.files.add(f"data/{name}.pt", dataset, lambda path: torch.save(kept, path))
    write.import_(Import("torch", None, "torch"))
    loaded = f"torch.load({write.here(file)}, weights_only=True)"
    return f"Samples({loaded})" if part.copies else loaded


def _plain_sample(sample: object) -> Nested:
    """Turn a sample into plain containers, tensors, numbers and texts."""
    if sample is None or isinstance(sample, (bool, int, float, str, torch.Tensor)):
        return sample
    if isinstance(sample, (np.ndarray, np.generic)):
        return torch.as_tensor(sample) if isinstance(sample, np.ndarray) else sample.item()
    if isinstance(sample, Mapping):
        return {str(key): _plain_sample(part) for key, part in sample.items()}
    if isinstance(sample, (list, tuple)):
        parts = map(_plain_sample, sample)
        return tuple(parts) if isinstance(sample, tuple) else list(parts)
    raise CannotBeWritten(f"a sample holds a {type(sample).__name__}, which has no form of its own")


def same_random_states(states: RandomStates, others: RandomStates) -> bool:
    """Whether two readings of the random states are equal."""
    return all(is_same(states[name], others[name]) for name in ("python", "numpy", "cpu"))
