"""HF callbacks hear of the events within an update of an `HFModule` as in the Trainer."""

from __future__ import annotations

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging

import hf_compat
from helpers.toy import Classifier, rows
from hf_compat import HFDataModule, HFModule, TrainingArguments

WITHIN = (
    "on_train_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")


def tracer(stops_at=None):
    """A callback that notes the events within updates, whether gradients exist, and the loss. It may ask to stop."""
    seen = []

    def record(event):
        def method(self, args, state, control, model=None, **kwargs):
            has_gradients = any(p.grad is not None and p.grad.any() for p in model.parameters())
            loss = kwargs.get("loss")
            seen.append((event, state.global_step, has_gradients, None if loss is None else float(loss)))
            control.should_training_stop |= len(seen) == stops_at

        return method

    return type("Tracer", (hf_compat.TrainerCallback,), {event: record(event) for event in WITHIN})(), seen


def trained(folder, callbacks, native, **values):
    """Train the same model by the Trainer or natively."""
    torch.manual_seed(0)
    args = TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True, report_to="none",
                             disable_tqdm=True, num_train_epochs=2, **values)  # fmt: skip
    model = Classifier(dropout=0.0)
    if not native:
        hf_compat.Trainer(model, args, train_dataset=rows(20), callbacks=callbacks).train()
        return model
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=callbacks, enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False)  # fmt: skip
    module = HFModule(model, args)
    trainer.fit(module, HFDataModule(None, rows(20)))
    return module


@pytest.mark.parametrize("stops_at", [None, 3, 8])
def test_events_within_an_update_are_those_of_the_trainer(tmp_path, stops_at):
    traces = []
    for native in (False, True):
        callback, seen = tracer(stops_at)
        trained(tmp_path, [callback], native, gradient_accumulation_steps=2)
        traces.append(seen)
    assert traces[0] == traces[1]
    assert ("on_substep_end" in {event for event, *_ in traces[0]}) and len(traces[0]) > 3 - bool(stops_at)


def test_plain_batches_tell_of_the_same_events(tmp_path):
    callback, seen = tracer()
    args = TrainingArguments(str(tmp_path), use_cpu=True, gradient_accumulation_steps=2)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[callback], enable_progress_bar=False,
                         enable_model_summary=False, enable_checkpointing=False)  # fmt: skip
    trainer.fit(HFModule(Classifier(), args), torch.utils.data.DataLoader(rows(20), 4))
    events = [event for event, *_ in seen if event != "on_train_begin"]
    whole = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert events == [*whole, *whole, *(event for event in whole if event != "on_substep_end")]


def test_a_module_with_such_callbacks_is_copied_and_pickled_without_them(tmp_path):
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *given):
            assert type(copy.deepcopy(pl_module).observer).__name__ == "UpdateObserver"
            pickle.dumps(pl_module)

    callback, _ = tracer()
    module = trained(tmp_path, [callback, Copies(), WeightAveraging()], True)
    assert type(module.observer).__name__ == "UpdateObserver"
