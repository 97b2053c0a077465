"""`HFModule` in a Lightning trainer goes on from every checkpoint of Lightning, an epoch's last update included."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hf_compat
from helpers import toy
from helpers.parity.compare import same
from helpers.resume_runs import OPTIONS, LightningStop

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # the state after the update is what is meant
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


def fit(folder, accumulation: int, by_epoch: bool, resume=None, stop_at: int | None = None):
    args = hf_compat.TrainingArguments(str(folder), **{**OPTIONS, "gradient_accumulation_steps": accumulation})
    hf_compat.set_seed(3)
    model = toy.Classifier()
    pl.seed_everything(args.seed, verbose=False)
    when = {"save_on_train_epoch_end": True} if by_epoch else {"every_n_train_steps": 1}
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **when)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[saver, *([LightningStop(stop_at)] if stop_at else [])],
    )  # fmt: skip
    with warnings.catch_warnings():  # the arguments are those of the other runs
        warnings.filterwarnings("ignore", message="These arguments have no effect")
        trainer.fit(hf_compat.HFModule(model, args), hf_compat.HFDataModule(args, toy.rows(13)), ckpt_path=resume)
    return trainer.global_step, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("by_epoch", "accumulation", "at"),
    [
        *((False, 1, at) for at in (1, 6, 7, 8, 14)),
        *((False, 3, at) for at in (1, 2, 3, 4, 6)),
        *((True, 1, at) for at in (7, 14)),
        *((True, 3, at) for at in (3, 6)),
    ],
)
@pytest.mark.parametrize("stops", [False, True])
def test_goes_on_from_every_checkpoint(tmp_path, by_epoch, accumulation, at, stops):
    updates, expected = fit(tmp_path / "whole", accumulation, by_epoch)
    written = tmp_path / "whole"
    if stops:
        written = tmp_path / "stopped"
        assert fit(written, accumulation, by_epoch, stop_at=at)[0] == at
    found, weights = fit(tmp_path / "again", accumulation, by_epoch, str(written / f"step={at}.ckpt"))
    assert found == updates
    assert same(expected, weights)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(("accumulation", "at"), [(1, 3), (1, 4), (2, 3)])
def test_a_folder_of_hf_goes_on_with_a_plain_loader(make_args, tmp_path, lightning, accumulation, at):
    given = {"gradient_accumulation_steps": accumulation, "learning_rate": 0.01}
    args = make_args(**given, num_train_epochs=3, save_strategy="steps", save_steps=at)
    hf_compat.Trainer(toy.Classifier(), args, train_dataset=toy.rows(16)).train()
    loader = torch.utils.data.DataLoader(toy.rows(16), 4, collate_fn=hf_compat.default_data_collator)
    rates, module = [], hf_compat.HFModule(toy.Classifier(), hf_compat.TrainingArguments(str(tmp_path), **given))

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = lightning(max_epochs=3, callbacks=[Rates()])
    trainer.fit(module, loader, ckpt_path=f"{args.output_dir}/checkpoint-{at}")
    updates = 12 // accumulation
    assert (trainer.global_step, trainer.current_epoch) == (updates, 3)
    assert len(rates) == (updates - at) * accumulation
    assert rates[-1] == 0  # the schedule ends with the run


class Validations(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["eval_loss"]))


@pytest.mark.parametrize("interval", [1.0, 0.5, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("at", [4, 8, 6])
def test_a_validation_that_was_to_follow_a_checkpoint_is_made_when_it_is_resumed(tmp_path, interval, accumulation, at):
    """Its loader draws a random number, so dropout and order of what comes next depend on it."""

    def run(folder, seed, saves=(), **resume):
        args = hf_compat.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, use_cpu=True, learning_rate=0.01,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        module, seen = hf_compat.HFModule(toy.Classifier(), args), Validations()
        torch.manual_seed(seed)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            val_check_interval=interval, callbacks=[seen, *saves], enable_checkpointing=bool(saves),
        )  # fmt: skip
        trainer.fit(module, hf_compat.HFDataModule(None, toy.rows(32 * accumulation), toy.rows(20)), **resume)
        return toy.weights(module), seen.losses

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    whole, losses = run(tmp_path, 0, [saver])
    again, later = run(tmp_path, 9, ckpt_path=tmp_path / f"step={at}.ckpt")
    assert torch.equal(whole, again) and losses[-len(later) :] == later
    before = (at - 1) // {1.0: 8, 0.5: 4, 3: 3}[interval]  # validations before the checkpoint
    if interval != 3:  # with an interval in batches Lightning begins each epoch anew
        assert len(later) == len(losses) - before


class Automatic(hf_compat.HFModule):
    automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(
    ("before", "after"),
    [(hf_compat.HFModule, Automatic), (Automatic, hf_compat.HFModule), (hf_compat.Trainer, Automatic)],
)
def test_steps_count_on_whoever_makes_the_updates(make_args, tmp_path, lightning, before, after):
    args = make_args(max_steps=6, save_strategy="steps", save_steps=4, learning_rate=0.01)

    def fit(kind, resume=None, **options):
        trainer = lightning(max_epochs=-1, **options)
        module = kind(toy.Classifier(), hf_compat.TrainingArguments(str(tmp_path), learning_rate=0.01, use_cpu=True))
        trainer.fit(module, hf_compat.HFDataModule(None, toy.rows(32)), ckpt_path=resume)
        return trainer

    if before is hf_compat.Trainer:
        before(toy.Classifier(), args, train_dataset=toy.rows(32)).train()
    else:
        fit(before, max_steps=4).save_checkpoint(f"{args.output_dir}/checkpoint-4")
    trainer = fit(after, resume=f"{args.output_dir}/checkpoint-4", max_steps=6)
    assert trainer.global_step == 6
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {6}
