"""The data of the run: the sets, the collator, the order of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hf_compat.data.collators import PaddingCollator, RemoveColumnsCollator
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.data.samplers import LengthGroupedSampler, SeededRandomSampler
from hf_compat.data.types import DataSource
from hf_compat.interop.transformers_models import is_datasets_dataset, is_datasets_stream
from hf_compat.runtime.nested import Nested
from hf_compat.runtime.seeding import RandomStates, read_rng
from hf_compat.tools.ejection.expressions import Expressions
from hf_compat.tools.ejection.findings import CannotBeWritten, Findings
from hf_compat.tools.ejection.sources import Import
from hf_compat.trainer import Trainer

_SHORT_STREAM = (
    "Where a stream ends within an update, Hugging Face goes on with that update in the next epoch; here it is a short "
    "update of its own."
)


@dataclass(slots=True)
class DataPart:
    """What the data module consists of.

    Args:
        train_set: The expression that makes the training set.
        collator: That of the collator.
        eval_sets: Those of the evaluation sets, by name; the name of a single one is empty.
        shuffles: Whether each epoch is shuffled by a seed of its own; `seed` is that of the first one.
        groups: Samples that are of like length, where the order goes by length.
        reads_random: Whether reading a batch draws random numbers.
        streams: Whether a set is a stream, which Lightning has to tell the epoch itself.
        copies: Whether samples are copied before the collator gets them.
        lengths: The expression of the samples' lengths, where the order goes by length.
        length_key: The key or column that they are taken from.
        sampler: The expression of the script's own sampler.
        left: What is left to do, where the data are set up.
    """

    train_set: str
    collator: str
    eval_sets: dict[str, str]
    shuffles: bool = False
    seed: int = 0
    groups: int | None = None
    reads_random: bool = False
    streams: bool = False
    copies: bool = False
    lengths: str = ""
    length_key: str = ""
    sampler: str = ""
    left: list[str] = field(default_factory=list)


def describe_data(trainer: Trainer, write: Expressions, findings: Findings) -> DataPart:
    """Return how data are read again; what cannot be is left to do."""
    part = DataPart("", "None", {})
    loader = trainer.get_train_dataloader()
    part.collator = _collator(part, trainer, write, findings)
    part.train_set = _data_set("train", trainer, loader, part, write, findings)
    _order(part, trainer, loader, write, findings)
    given = trainer.eval_dataset
    for name, dataset in (given if isinstance(given, Mapping) else {"": given}).items():
        if dataset is not None:
            file = f"eval_{name}" if name else "eval"
            part.eval_sets[name] = _data_set(file, trainer, trainer.get_eval_dataloader(dataset), part, write, findings)
    return part


def _order(part: DataPart, trainer: Trainer, loader: object, write: Expressions, findings: Findings) -> None:
    """Find out in which order samples are trained on, by the sampler that the run would use."""
    if not isinstance(loader, DataLoader):
        return
    sampler, samples = getattr(loader, "sampler", None), cast(Sequence[object], loader.dataset)
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is SequentialSampler:
        return
    if type(sampler) is SeededRandomSampler and not sampler.replacement and sampler.num_samples == len(samples):
        part.shuffles, part.seed = True, sampler.initial_seed
    elif type(sampler) is LengthGroupedSampler:
        part.groups = sampler.batch_size
        column = trainer.args.length_column_name
        has_column = trainer._known_lengths(loader.dataset) is not None
        part.length_key = column if has_column else trainer._length_key
        measured = f'[len(row["{part.length_key}"]) for row in samples]'
        part.lengths = f'list(samples["{column}"])' if has_column else measured
    else:
        write.known.update({id(samples): "self.train_set", id(trainer.train_dataset): "self.train_set"})
        try:
            part.sampler = write.of(sampler)
        except CannotBeWritten as error:
            what = f"The order of training samples is that of a {type(sampler).__name__}, which cannot be written down"
            part.left += findings.leave(f"{what}: {error}", "`train_dataloader` in `data.py`")


def _collator(part: DataPart, trainer: Trainer, write: Expressions, findings: Findings) -> str:
    collator = trainer.data_collator
    is_ours = isinstance(collator, PaddingCollator)
    try:
        if isinstance(collator, PaddingCollator):
            padding = write.named("transformers", "DataCollatorWithPadding")
            return f"{padding}({write.of(collator.tokenizer)})"
        return write.of(collator)
    except CannotBeWritten as error:
        name = getattr(collator, "__name__", type(collator).__name__)
        what = f"The {'tokenizer of the ' if is_ours else ''}collator {name} ({write.code.where(collator)})"
        part.left += findings.leave(f"{what} cannot be written down: {error}", "`setup` in `data.py`")
        return "None"


def _is_plain(loader: object, trainer: Trainer, is_train: bool) -> bool:
    """Return whether a loader is the Trainer's, or one that the script has made of the same settings."""
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
    """Return the expression that makes a data set: saved as it is, sample by sample, or made by its class."""
    if not _is_plain(loader, trainer, is_train=name == "train"):
        maker = type(trainer).get_train_dataloader if name == "train" else type(trainer).get_eval_dataloader
        what = f"The {name} set has a loader of its own, a {type(loader).__name__} ({write.code.where(maker)})"
        part.left += findings.leave(what, "`train_dataloader` and `val_dataloader` in `data.py`")
        return "None"
    assert isinstance(loader, DataLoader)
    dataset: DataSource = loader.dataset
    collate = loader.collate_fn
    before = read_rng()
    try:
        if isinstance(dataset, IterableDataset):
            part.reads_random = part.streams = True
            if trainer.args.gradient_accumulation_steps > 1 and name == "train":
                findings.tell(_SHORT_STREAM)
            return _stream(dataset, collate, write)
        if is_datasets_dataset(dataset):
            expression = _table(name, dataset, write)
            _collated(dataset, loader, before, part, name)
            return expression
        return _samples(name, dataset, collate, loader, before, part, write)
    except CannotBeWritten as error:
        what = f"The {name} set, a {type(dataset).__name__} ({write.code.where(type(dataset))}), cannot be written down"
        part.left += findings.leave(f"{what}: {error}", "`setup` in `data.py`")
        return "None"


def _stream(dataset: IterableDataset[object], collate: object, write: Expressions) -> str:
    """Return the expression for a stream, without the columns that the model does not take."""
    expression, before = write.of(dataset), read_rng()
    sample = next(iter(dataset), None)
    if not _same(before, read_rng()):
        raise CannotBeWritten("reading it draws random numbers, and Hugging Face's loader draws them at other moments")
    if not isinstance(collate, RemoveColumnsCollator) or not isinstance(sample, Mapping):
        return expression
    unread = [name for name in sample if name not in collate.signature_columns]
    if not unread:
        return expression
    if not is_datasets_stream(dataset):
        raise CannotBeWritten(f"its samples have {', '.join(map(repr, unread))}, which the model does not take")
    return f"{expression}.remove_columns({write.of(unread)})"


def _table(name: str, dataset: DataSource, write: Expressions) -> str:
    """Return the expression for a table of `datasets`, which is saved in that package's own format."""
    if dataset.format["type"] == "custom":
        raise CannotBeWritten("`set_transform` has given it a function, which is not saved with it")
    file = write.files.add(f"data/{name}", dataset, dataset.save_to_disk)
    return f"{write.named('datasets', 'load_from_disk')}({write.here(file)})"


def _samples(
    name: str,
    dataset: Sequence[object],
    collate: object,
    loader: DataLoader[object],
    before: RandomStates,
    part: DataPart,
    write: Expressions,
) -> str:
    """Return the expression for any other set: its samples are saved, unless each reading makes others."""
    samples = [dataset[index] for index in range(len(dataset))]
    if not _same(before, read_rng()):
        part.reads_random = True
        return write.of(dataset)
    if isinstance(collate, RemoveColumnsCollator):
        samples = [_columns(sample, collate.signature_columns) for sample in samples]
    kept = [_plain_sample(sample) for sample in samples]
    _collated(dataset, loader, before, part, name)
    part.copies |= any(isinstance(sample, dict) for sample in kept)
    file = write.files.add(f"data/{name}.pt", dataset, lambda path: torch.save(kept, path))
    write.import_(Import("torch", None, "torch"))
    loaded = f"torch.load({write.here(file)}, weights_only=True)"
    return f"Samples({loaded})" if part.copies else loaded


def _columns(sample: object, names: Iterable[str]) -> object:
    return {key: sample[key] for key in sample if key in names} if isinstance(sample, Mapping) else sample


def _plain_sample(sample: object) -> Nested:
    """Return a sample of plain containers, tensors, numbers and texts.

    Raises:
        CannotBeWritten: Something else is in it.
    """
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


def _collated(
    dataset: Iterable[object], loader: DataLoader[object], before: RandomStates, part: DataPart, name: str
) -> None:
    """Find out whether collating draws random numbers, on a first batch of the training set."""
    if name == "train" and loader.collate_fn is not None:
        loader.collate_fn(list(islice((dataset[i] for i in range(loader.batch_size or 1)), loader.batch_size)))  # type: ignore[index]  # a map
        part.reads_random |= not _same(before, read_rng())


def _same(states: RandomStates, others: RandomStates) -> bool:
    """Return whether two readings of the random states are the same."""
    return all(_flat(states[name]) == _flat(others[name]) for name in ("python", "numpy", "cpu"))


def _flat(state: object) -> str:
    parts = state if isinstance(state, (list, tuple)) else [state]
    return str([part.tolist() if isinstance(part, torch.Tensor) else part for part in parts])


def same_random_states(states: RandomStates, others: RandomStates) -> bool:
    """Return whether two readings of the random states are the same."""
    return _same(states, others)
