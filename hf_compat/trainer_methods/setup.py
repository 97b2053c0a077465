"""Set-up shared by the Trainer and native mode: data, collator, state, counters."""

from __future__ import annotations

from hf_compat.data.collators import PaddingCollator, default_data_collator
from hf_compat.data.types import Collator
from hf_compat.hf.state import TrainerControl, TrainerState
from hf_compat.interop.transformers_models import pads_itself
from hf_compat.trainer_methods.base import Dataset, ProcessingClass, TrainerBase


class SetupMethods(TrainerBase):
    """The parts of a constructor that do not need the model."""

    def _set_up_data(
        self,
        train_dataset: Dataset,
        eval_dataset: Dataset,
        data_collator: Collator | None,
        processing_class: ProcessingClass,
    ) -> None:
        """Set the data sets and the collator. By default the collator stacks tensors, or the processor pads them."""
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        pads = processing_class is not None and pads_itself(processing_class)
        self.data_collator = data_collator or (PaddingCollator(processing_class) if pads else default_data_collator)

    def _set_up_counters(self) -> None:
        """Set the state and counters of a new run."""
        self.state = TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.args.process_index == 0,
        )
        self.control = TrainerControl()
        self.is_in_train = False
        self.current_flos = 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = self.args.train_batch_size
        self._signature_columns = None
        self._created_lr_scheduler = False
