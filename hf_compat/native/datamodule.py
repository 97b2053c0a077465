"""`HFDataModule`: data sets as a LightningDataModule that yields windows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader, SequentialSampler

from hf_compat.data.types import Batch, Collator, Loader
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import load_state, restricted_classmethod, sample_indices_wrapper
from hf_compat.engine.windows import Windows
from hf_compat.errors import ArgumentError, CheckpointError, DataError
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.native.loading import DataSpec, MapLocation, arguments_among, made, read_described
from hf_compat.native.module import HFModule
from hf_compat.native.overrides import refuse_unheard_methods
from hf_compat.native.steps import NO_END, NativeSteps, share_arguments
from hf_compat.runtime.inspection import delegated, has_length
from hf_compat.runtime.text import check_callables
from hf_compat.trainer_methods.base import Dataset


class PredictionBatches(EvaluationBatches):
    """A loader's batches. If they are in the data's order, Lightning finds the indices of their samples.

    With several processes the indices are those of this rank's batches. Samples that fill up the last one come twice.
    """

    @functools.cached_property
    def batch_sampler(self) -> object:
        """The object in which Lightning finds the indices. None if they are drawn at random."""
        batches = self.loader.batch_sampler if isinstance(self.loader, DataLoader) else None
        if batches is None or not isinstance(getattr(batches, "sampler", None), SequentialSampler):
            return None
        return sample_indices_wrapper([list(indices) for indices in batches])


class PlainEvaluationBatches(PredictionBatches):
    """The loader's batches for another kind of module. Lightning would divide a `DataLoader` between ranks again."""

    def __iter__(self) -> Iterator[Batch]:
        return (batch.inputs for batch in super().__iter__())


class MicroBatches(Windows):
    """The same data and state for a module that knows no windows. Each batch is the loader's."""

    gives_windows = False

    def __init__(self, loader: Loader, **settings: object) -> None:
        super().__init__(loader, **settings)  # type: ignore[arg-type]  # passed on
        self.steps = _OneByOne()  # type: ignore[assignment]  # all that windows of one batch need

    def __iter__(self) -> Iterator[Batch]:
        return (window.micro_batches[0] for window in super().__iter__())


class _OneByOne:
    """Reads one micro-batch at a time, without counting its items."""

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], *_: object) -> tuple[list[Batch], None]:
        return list(islice(epoch_iterator, 1)), None


EvaluationLoaders: TypeAlias = Loader | dict[str, Loader] | list[Loader]


class HFDataModule(pl.LightningDataModule):
    """Training data as windows of micro-batches, evaluation data as batches, both as HF loads them.

    A subclass may set `train_dataset`, `eval_dataset`, `test_dataset` and `predict_dataset` in its `setup`.

    Args:
        args: The training arguments. None takes those of the HFModule.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on, or a mapping of such sets, whose metrics are named `eval_NAME_…`.
        test_dataset: Samples to test on.
        data_collator: Makes a batch of a list of samples. By default tensors are stacked, or the processor pads.
        processing_class: Tokenizer or processor that pads.
        predict_dataset: Samples to predict. None takes `test_dataset`.
    """

    def __init__(
        self,
        args: TrainingArguments | None = None,
        train_dataset: DataSpec = None,
        eval_dataset: DataSpec = None,
        test_dataset: DataSpec = None,
        data_collator: Collator | None = None,
        processing_class: DataSpec = None,
        predict_dataset: DataSpec = None,
    ) -> None:
        super().__init__()
        data_collator = made(data_collator, "data_collator")
        check_callables(data_collator=data_collator)
        self.steps = NativeSteps(
            None,
            args,
            made(train_dataset, "train_dataset"),
            made(eval_dataset, "eval_dataset"),
            data_collator=data_collator,
            processing_class=made(processing_class, "processing_class"),
        )
        self.test_dataset = made(test_dataset, "test_dataset")
        self.predict_dataset = made(predict_dataset, "predict_dataset")

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        refuse_unheard_methods(cls, honoured=False)

    @restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805 - of a class method
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a data module of the hyperparameters that a subclass has saved in a `.ckpt`, and of `kwargs`.

        Args:
            checkpoint_path: A `.ckpt`, open or not.
            map_location: As in `torch.load`.
            hparams_file: A YAML or CSV file with hyperparameters, in place of the checkpoint's.
            weights_only: False unpickles the `.ckpt`, which runs the code in it.
            kwargs: Arguments of the constructor. They precede the hyperparameters.

        Raises:
            CheckpointError: They give no data. A checkpoint holds none.
        """
        path, checkpoint = read_described(cls, checkpoint_path, map_location, hparams_file, weights_only)
        held = checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY]
        made = load_state(cls, checkpoint, None, {**arguments_among(path, held), **kwargs})
        assert isinstance(made, cls)
        sets = (made.train_dataset, made.eval_dataset, made.test_dataset, made.predict_dataset)
        if all(one is None for one in sets) and cls.setup is HFDataModule.setup:
            raise CheckpointError(
                f"The checkpoint holds no data, so this {cls.__name__} would be empty.\n\n"
                f"Hint: make it as for the fit, {cls.__name__}(args, train_dataset, …), and give `ckpt_path=` to the "
                "trainer. Or call `save_hyperparameters()` in the `__init__` of a subclass that makes its data."
            )
        return made

    def __getstate__(self) -> dict[str, object]:
        """Leave out the trainer, as a LightningModule does. It holds open files and iterators."""
        return {**self.__dict__, "trainer": None}

    def setup(self, stage: str) -> None:
        """Note that all sets are made. A subclass that makes them here need not call this."""
        self.steps.data_is_set_up = True

    train_dataset = delegated("steps.train_dataset", "Samples to train on.")
    eval_dataset = delegated("steps.eval_dataset", "Samples to evaluate on, or a mapping of such sets.")

    @contextmanager
    def _entered(self) -> Iterator[NativeSteps]:
        """Take rank and model from the trainer. The model's signature decides which columns stay, by default all."""
        steps, trainer = self.steps, self.trainer
        module = None if trainer is None else trainer.lightning_module
        if isinstance(module, HFModule) and isinstance(module.steps, NativeSteps):
            share_arguments(module.steps, steps)
        if trainer is not None:
            steps.take_place(trainer)
        model = getattr(module, "model", None)
        if model is not None and model is not getattr(steps, "model", None):
            steps.compute_loss_func = getattr(getattr(module, "steps", None), "compute_loss_func", None)
            steps.take_model(model, module.forward_owner if isinstance(module, HFModule) else None)
        with nullcontext() if hasattr(steps, "model") else _changed(steps, "remove_unused_columns", False):
            yield steps

    def train_dataloader(self) -> Windows | Loader:
        """Return windows to the running fit of an HFModule, and plain batches to any other caller."""
        with self._entered() as steps:
            # with `overfit_batches` each epoch has the same batches
            is_sequential = getattr(self.trainer, "overfit_batches", 0)
            with _changed(steps, "train_sampling_strategy", "sequential") if is_sequential else nullcontext():
                loader = steps.get_train_dataloader()
            if self.trainer is None or not self._is_running:
                return loader
            module = self.trainer.lightning_module
            is_ours = isinstance(module, HFModule)
            if is_ours and not module.automatic_optimization:
                windows = self._windows(steps, loader, Windows)
                windows.is_held = not has_length(loader)
                return windows
            batches, told = steps.args.gradient_accumulation_steps, self.trainer.accumulate_grad_batches
            if not is_ours and batches not in (1, told):  # Lightning makes another module's updates
                way_out = f"give `accumulate_grad_batches={batches}` to lightning.Trainer"
                if not module.automatic_optimization:
                    way_out = "leave the argument out, as the module's manual optimization decides"
                raise ArgumentError(
                    f"`gradient_accumulation_steps={batches}` of HFDataModule's arguments has no effect on "
                    f"{type(module).__name__}, which is not an HFModule: it gets plain batches, and lightning.Trainer "
                    f"has `accumulate_grad_batches={told}`.\n\nHint: {way_out}."
                )
            with _changed(steps, "gradient_accumulation_steps", 1):
                return self._windows(steps, loader, MicroBatches)

    def _windows(self, steps: NativeSteps, loader: Loader, kind: type[Windows]) -> Windows:
        args, is_finite = steps.args, has_length(loader)
        if self.trainer is not None and not is_finite:  # the trainer limits the run
            args = copy.copy(args)
            args.__dict__["max_steps"] = self.trainer.max_steps if self.trainer.max_steps > 0 else NO_END
        counts = steps.set_initial_training_values(args, loader)
        return kind(loader, steps=steps, counts=counts, has_length=is_finite)

    @property
    def val_dataloader(self) -> Callable[[], EvaluationLoaders]:
        """A method that returns the batches of validation, with several sets by their names.

        It is None, which Lightning takes for a missing hook, if the sets are made and there is none to evaluate on.
        `trainer.enable_validation` is False then, which callbacks read.
        """
        if self.eval_dataset is None and self.steps.data_is_set_up and not self._is_asked_to("validate"):
            return None  # type: ignore[return-value]  # Lightning takes None for a missing hook
        return functools.partial(self._loaders, "validate", "eval_dataset", self.eval_dataset)

    def test_dataloader(self) -> EvaluationLoaders:
        """Return the batches of testing."""
        return self._loaders("test", "test_dataset", self.test_dataset)

    def predict_dataloader(self) -> EvaluationLoaders:
        """Return the batches to predict."""
        dataset = self.test_dataset if self.predict_dataset is None else self.predict_dataset
        return self._loaders("predict", "predict_dataset", dataset)

    def _loaders(self, command: str, name: str, dataset: Dataset) -> EvaluationLoaders:
        """Make a command's loaders for their caller: a run of an HFModule, of another module, or no run.

        Without data there are none, which a fit accepts.

        Raises:
            DataError: The command needs the data.
        """
        if dataset is None and not self._is_asked_to(command):
            return []
        if dataset is None:
            raise DataError(f"`{command}` needs data.\n\nHint: give `{name}=…` to HFDataModule, or set it in `setup`.")
        has_several = command == "validate" and isinstance(dataset, Mapping)
        with self._entered() as steps:
            load = steps.get_eval_dataloader if command == "validate" else steps.get_test_dataloader
            # the loader of a single set keeps its workers
            own = None if command == "validate" else dataset
            sets = dataset.items() if has_several else [("", own)]
            loaders: dict[str, Loader] = {str(name): load(part) for name, part in sets}
        if self.trainer is not None and self._is_running:
            is_ours = isinstance(self.trainer.lightning_module, HFModule)
            kind = PredictionBatches if is_ours else PlainEvaluationBatches
            loaders = {name: kind(loader) for name, loader in loaders.items()}
        return loaders if has_several else loaders[""]

    @property
    def _is_running(self) -> bool:
        return self.trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING

    def _is_asked_to(self, command: str) -> bool:
        return self.trainer is not None and self.trainer.state.fn == command


@contextmanager
def _changed(steps: NativeSteps, name: str, value: object) -> Iterator[None]:
    """Set an argument within the context."""
    kept, steps.args = steps.args, copy.copy(steps.args)
    steps.args.__dict__[name] = value
    try:
        yield
    finally:
        steps.args = kept
