"""`HFDataModule`: data sets as a LightningDataModule that yields windows. Lightning words only."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import Dataset

from hf_compat.data.types import Collator
from hf_compat.engine.evaluation import EvaluationBatches
from hf_compat.engine.internals import place_of
from hf_compat.engine.windows import Windows
from hf_compat.hf.arguments import TrainingArguments
from hf_compat.native.steps import NativeSteps
from hf_compat.plan.run_counts import make_run_counts
from hf_compat.runtime.inspection import has_length


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
        train_dataset: Dataset[Any] | Any = None,
        eval_dataset: Dataset[Any] | Any = None,
        test_dataset: Dataset[Any] | Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
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
        micro_batches = len(loader) if has_length(loader) else None
        counts = make_run_counts(
            steps.args,
            micro_batches=micro_batches,
            num_examples=steps.num_examples(loader) if micro_batches else None,
            micro_batch_size=steps.args.train_batch_size,
        )
        return Windows(
            loader,
            read_window=steps.get_batch_samples,
            window_size=steps.args.gradient_accumulation_steps,
            counts=counts,
            device=steps.args.device,
        )

    def val_dataloader(self) -> Any:
        """Return the batches of validation."""
        return EvaluationBatches(self.steps.get_eval_dataloader())

    def test_dataloader(self) -> Any:
        """Return the batches of testing."""
        return EvaluationBatches(self.steps.get_test_dataloader(self.test_dataset))
