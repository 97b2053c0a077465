"""`HFDataModule`: data sets as a LightningDataModule that yields windows. Lightning words only."""

from __future__ import annotations

import lightning.pytorch as pl

from hf_compat.data.types import Collator
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import place_of
from hf_compat.engine.windows import Windows
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.native.steps import NativeSteps
from hf_compat.trainer_methods.base import Dataset, ProcessingClass


class HFDataModule(pl.LightningDataModule):
    """Training data as windows of micro-batches, evaluation data as batches, both as HF loads them.

    Args:
        args: The training arguments; the defaults where none are given.
        train_dataset: Samples to train on.
        eval_dataset: Samples to evaluate on.
        test_dataset: Samples to test on.
        data_collator: From a list of samples to a batch; by default tensors are stacked, or padded by the processor.
        processing_class: Tokenizer or processor that pads.
    """

    def __init__(
        self,
        args: TrainingArguments | None = None,
        train_dataset: Dataset = None,
        eval_dataset: Dataset = None,
        test_dataset: Dataset = None,
        data_collator: Collator | None = None,
        processing_class: ProcessingClass = None,
    ) -> None:
        super().__init__()
        self.steps = NativeSteps(
            None, args, train_dataset, eval_dataset, data_collator=data_collator, processing_class=processing_class
        )
        self.test_dataset = test_dataset
        # Lightning takes a hook that is there for data that is there
        if eval_dataset is None:
            self.val_dataloader = None  # type: ignore[assignment,method-assign]
        if test_dataset is None:
            self.test_dataloader = None  # type: ignore[assignment,method-assign]

    def setup(self, stage: str) -> None:
        """Take the model that is trained: its signature says which columns are kept and how items are counted."""
        if self.trainer is not None:
            self.steps.take_place(*place_of(self.trainer))
        module = self.trainer.lightning_module if self.trainer is not None else None
        model = getattr(module, "model", None)
        if model is not None:
            self.steps.take_model(model)

    def train_dataloader(self) -> Windows:
        """Return the windows of training: one is one update."""
        steps = self.steps
        loader = steps.get_train_dataloader()
        return steps._make_windows(loader, steps.set_initial_training_values(steps.args, loader))

    def val_dataloader(self) -> EvaluationBatches:
        """Return the batches of validation."""
        return EvaluationBatches(self.steps.get_eval_dataloader())

    def test_dataloader(self) -> EvaluationBatches:
        """Return the batches of testing."""
        return EvaluationBatches(self.steps.get_test_dataloader(self.test_dataset))
