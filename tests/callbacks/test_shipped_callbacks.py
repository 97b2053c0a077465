"""Every callback that Lightning ships, at both entry points, has its effect or is refused before training."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as plc

from helpers.shipped_runs import DOORS, Door, Headed, weights_of
from hf_compat.errors import CallbackError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
    pytest.mark.filterwarnings("ignore:.*define a `flops_per_batch`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),  # of OnExceptionCheckpoint
    pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set'),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:SWA is initializing after swa_start"),
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),
]

EFFECTS = {}


def effect(function):
    EFFECTS[function.__name__] = function
    return function


# What is refused: by callback and door, what makes it and the way out that the message holds.
REFUSED = {
    ("BasePredictionWriter", "trainer"): (lambda: Writer("batch"), "trainer.predict"),
    ("BatchSizeFinder", "native"): (plc.BatchSizeFinder, "per_device_train_batch_size"),
    ("BatchSizeFinder", "trainer"): (plc.BatchSizeFinder, "auto_find_batch_size=True"),
    ("GradientAccumulationScheduler", "native"): (
        lambda: plc.GradientAccumulationScheduler({0: 2}),
        "gradient_accumulation_steps",
    ),
    ("GradientAccumulationScheduler", "trainer"): (
        lambda: plc.GradientAccumulationScheduler({0: 2}),
        "gradient_accumulation_steps",
    ),
    ("LearningRateFinder", "trainer"): (plc.LearningRateFinder, "learning_rate"),
}
NAMES = sorted(plc.__all__)


@pytest.fixture
def door(request, tmp_path):
    return Door(request.param, tmp_path)


both_doors = pytest.mark.parametrize("door", DOORS, indirect=True)


@both_doors
@pytest.mark.parametrize("name", NAMES)
def test_it_does_what_it_is_for_or_is_refused(door, name, capsys, caplog):
    refused = REFUSED.get((name, door.name))
    if refused is None:
        EFFECTS[name](door, **({"shown": (capsys, caplog)} if name in _SHOWING else {}))  # asserts it
        assert outcome(name, door.name) == "works"
    else:
        make, hint = refused
        with pytest.raises(CallbackError, match=hint):
            door.fit(make())


def outcome(name: str, door: str) -> str:
    return "refused" if (name, door) in REFUSED else "works"


class Rates(pl.Callback):
    """Records the learning rate of each parameter group after each update."""

    def __init__(self):
        self.kept = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.kept.append([round(group["lr"], 6) for group in trainer.optimizers[0].param_groups])


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


# Finetuning ----------------------------------------------------------------------------------------------------------
@effect
def BackboneFinetuning(door):
    before, rates = Headed(), Rates()
    torch.manual_seed(0)
    before = Headed()
    run = door.fit(plc.BackboneFinetuning(unfreeze_backbone_at_epoch=1), rates, epochs=3)
    assert [len(row) for row in rates.kept] == [2] * 4 + [3] * 8  # two groups of the head, then the backbone
    assert rates.kept[4][2] == pytest.approx(rates.kept[3][0] / 10, abs=1e-6)
    assert rates.kept[8][2] == pytest.approx(2 * rates.kept[7][2], abs=1e-6)  # doubled every epoch
    assert not torch.equal(before.backbone[0].weight, run.model.backbone[0].weight)


class Thaws(plc.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.backbone, optimizer, lr=0.1)


@effect
def BaseFinetuning(door):
    seen = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append(pl_module.model.backbone[0].weight.detach().clone())

    door.fit(Thaws(), Look(), epochs=3)
    torch.manual_seed(0)
    assert torch.equal(seen[0], Headed().backbone[0].weight) and not torch.equal(seen[1], seen[0])


@effect
def LearningRateFinder(door):
    rates, find = Rates(), plc.LearningRateFinder(num_training_steps=15, early_stop_threshold=None)
    updates = door.fit(find, rates, epochs=4).updates
    found = find.optimal_lr.suggestion()
    assert updates == len(rates.kept) == 16 and rates.kept[0][0] == pytest.approx(found * 15 / 16, abs=1e-6)


# Weights -------------------------------------------------------------------------------------------------------------
@effect
def StochasticWeightAveraging(door):
    rates = Rates()
    run = door.fit(plc.StochasticWeightAveraging(0.5, swa_epoch_start=3, annealing_epochs=1), rates, epochs=4)
    assert rates.kept[7][0] < 0.01 and rates.kept[-1][0] == pytest.approx(0.5)
    assert not torch.equal(weights_of(run.model), weights_of(door.fit(epochs=4).model))


def _averages(door, callback, expect):
    kept = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            kept.append(weights_of(pl_module.model).clone())

    run = door.fit(callback, Keep())
    assert torch.allclose(weights_of(run.model), expect(kept), atol=1e-6)
    assert not torch.equal(weights_of(run.model), kept[-1])


@effect
def WeightAveraging(door):
    _averages(door, plc.WeightAveraging(), lambda kept: torch.stack(kept).mean(0))


@effect
def EMAWeightAveraging(door):
    def expect(kept):
        average = kept[0]
        for weights in kept[1:]:
            average = 0.5 * average + 0.5 * weights
        return average

    _averages(door, plc.EMAWeightAveraging(decay=0.5), expect)


@effect
def ModelPruning(door):
    model = Headed()
    prune = plc.ModelPruning("l1_unstructured", parameters_to_prune=[(model.head, "weight")], amount=0.5)
    door.fit(prune, keeps=True, model=model)
    assert float((model.head.weight == 0).float().mean()) == 0.75  # a half, then half of the rest
    path = door.checkpoint(epoch=2)
    if door.name == "native":
        saved = torch.load(path, weights_only=True)["state_dict"]["model.head.weight"]
    else:
        from safetensors.torch import load_file

        saved = load_file(f"{path}/model.safetensors")["head.weight"]
    assert float((saved == 0).float().mean()) >= 0.5


# Stopping ------------------------------------------------------------------------------------------------------------
@effect
def EarlyStopping(door):
    stop = plc.EarlyStopping("eval_loss", patience=1, min_delta=100.0)
    assert door.fit(stop, epochs=5).updates == 8 and stop.stopped_epoch == 1


@effect
def Timer(door):
    class Slow(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            torch.zeros(1).item()
            threading_wait()

    timer = plc.Timer(timedelta(seconds=0.2), interval="step")
    assert 1 < door.fit(timer, Slow(), epochs=50).updates < 200 and timer.time_elapsed("train") >= 0.2


def threading_wait():
    import time

    time.sleep(0.03)


@effect
def SpikeDetection(door):
    class Spikes(Headed):
        calls = 0

        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            if self.training and labels is not None:
                self.calls += 1
                outputs["loss"] = outputs["loss"] * (1000 if self.calls == 7 else 1)
            return outputs

    with pytest.raises(TrainingSpikeException, match="batch 2"):
        door.fit(plc.SpikeDetection(warmup=2, atol=10.0), model=Spikes())
    assert (door.folder / "skip_batches.json").exists()


# Checkpoints ---------------------------------------------------------------------------------------------------------
@effect
def ModelCheckpoint(door):
    keep = plc.ModelCheckpoint(door.folder / "best", monitor="eval_loss", save_top_k=1, save_last=True)
    run = door.fit(keep, epochs=3)
    losses = run.column("eval_loss") or run.column("eval/loss")
    best = losses.index(min(losses))
    assert keep.best_model_path.endswith(f"epoch={best}-step={4 * best + 4}.ckpt")
    assert files(door.folder / "best") == sorted({f"epoch={best}-step={4 * best + 4}.ckpt", "last.ckpt"})
    assert float(keep.best_model_score) == pytest.approx(min(losses), rel=1e-5)


@effect
def OnExceptionCheckpoint(door):
    class Fails(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 5:
                raise OSError("a disk failed")

    whole = weights_of(door.fit().model)
    with pytest.raises(OSError, match="a disk failed"):
        door.fit(plc.OnExceptionCheckpoint(door.folder / "at"), Fails())
    run = door.fit(resume=str(door.folder / "at" / "on_exception.ckpt"))
    assert run.updates == 8 and torch.equal(weights_of(run.model), whole)


@effect
def Checkpoint(door):
    class Own(plc.Checkpoint):
        written = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.written += 1
            trainer.save_checkpoint(door.folder / f"own{self.written}.ckpt")

    door.fit(Own())
    assert files(door.folder) == ["own1.ckpt", "own2.ckpt"]


@both_doors
def test_after_an_error_the_next_fit_goes_on_from_its_checkpoint(door):
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                raise OSError("a disk failed")

    whole = weights_of(door.fit().model)
    rates = Rates()
    with pytest.raises(OSError, match="a disk failed"):
        door.fit(plc.OnExceptionCheckpoint(door.folder / "at"), Fails())
    run = door.fit(plc.OnExceptionCheckpoint(door.folder / "at"), rates)
    assert run.updates == 8 and len(rates.kept) == 3 and torch.equal(weights_of(run.model), whole)
    assert not list((door.folder / "at").iterdir())  # it is removed once a fit has ended
    assert door.fit(plc.OnExceptionCheckpoint(door.folder / "at")).updates == 8


@pytest.mark.parametrize("door", ["trainer"], indirect=True)
def test_two_states_under_one_name_are_refused(door):
    with pytest.raises(CallbackError, match="`state_key` 'Thaws'"):
        door.fit(Thaws(), Thaws())


# Logs ----------------------------------------------------------------------------------------------------------------
def logged(run, name):
    """Return a name's values from a Trainer's history or a native logger."""
    return run.column(name)


@effect
def DeviceStatsMonitor(door):
    run = door.fit(plc.DeviceStatsMonitor(cpu_stats=True))
    assert any("cpu_percent" in name for row in run.logs for name in row)


@effect
def LearningRateMonitor(door):
    monitor = plc.LearningRateMonitor("step")
    run = door.fit(monitor)
    assert run.column("lr-AdamW/pg1") == pytest.approx([0.01 * (8 - update) / 8 for update in range(8)])


@effect
def ThroughputMonitor(door):
    monitor = plc.ThroughputMonitor(batch_size_fn=lambda batch: sum(len(part["x"]) for part in batch), window_size=2)
    run = door.fit(monitor, accumulation=2)
    assert max(run.column("train/samples")) == 64.0  # two epochs of 32


# What a person sees --------------------------------------------------------------------------------------------------
_SHOWING = ("ModelSummary", "RichModelSummary", "RichProgressBar", "TQDMProgressBar")


@effect
def ModelSummary(door, shown):
    _, caplog = shown
    with caplog.at_level("INFO"):
        door.fit(plc.ModelSummary(max_depth=3))
    assert any("model.backbone" in record.message for record in caplog.records)


@effect
def RichModelSummary(door, shown):
    door.fit(plc.RichModelSummary(max_depth=3))
    assert "model.backbone" in shown[0].readouterr().out


@effect
def RichProgressBar(door, shown):
    door.fit(plc.RichProgressBar(leave=True), bar=True)
    out, error = shown[0].readouterr()
    assert "Epoch 1/1" in out and "4/4" in out and "loss:" in out and "%|" not in error


@effect
def TQDMProgressBar(door, shown):
    door.fit(plc.TQDMProgressBar(), bar=True)
    out, error = shown[0].readouterr()
    text = out + error
    assert "Epoch 1: 100%" in text and "4/4" in text and "loss=" in text
    assert "8/8" not in text  # HF's bar counts all updates


@effect
def ProgressBar(door):
    class Own(plc.ProgressBar):
        totals = ()

        def disable(self):
            self.totals = ()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.totals = (self.total_train_batches, self.get_metrics(trainer, pl_module).keys())

    bar = Own()
    door.fit(bar, bar=True)
    assert bar.totals[0] == 4 and "loss" in bar.totals[1]


# Hooks ---------------------------------------------------------------------------------------------------------------
@effect
def Callback(door):
    class Own(plc.Callback):
        updates = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.updates += 1

    own = Own()
    door.fit(own)
    assert own.updates == 8


@effect
def LambdaCallback(door):
    counted = []
    door.fit(plc.LambdaCallback(on_train_batch_end=lambda *parts: counted.append(1)))
    assert len(counted) == 8


class Writer(plc.BasePredictionWriter):
    written = 0

    def write_on_batch_end(self, trainer, pl_module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.written += len(prediction)


@effect
def BasePredictionWriter(door):
    from helpers.toy import rows
    from hf_compat import HFDataModule, HFModule

    writer = Writer("batch")
    trainer = pl.Trainer(callbacks=[writer], logger=False, accelerator="cpu", enable_progress_bar=False)
    trainer.predict(HFModule(Headed()), HFDataModule(None, predict_dataset=rows(13)))
    assert writer.written == 13


# Names and folders of ModelCheckpoint --------------------------------------------------------------------------------
NAMED = {
    "default": ({}, ["epoch=1-step=8.ckpt"]),
    "two and last": (
        {"monitor": "eval_loss", "save_top_k": 2, "save_last": True},
        ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"],
    ),
    "updates": ({"every_n_train_steps": 3, "save_top_k": -1}, ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]),
    "epochs": ({"every_n_epochs": 2}, ["epoch=1-step=8.ckpt"]),
    "epoch's end": ({"monitor": "loss", "save_on_train_epoch_end": True, "save_top_k": -1},
                    ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]),
    "link": ({"save_last": "link"}, ["epoch=1-step=8.ckpt", "last.ckpt"]),
    "time": ({"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
             [f"epoch={(step - 1) // 4}-step={step}.ckpt" for step in range(1, 9)]),
    "named": ({"filename": "{epoch}-{eval_loss:.0f}"}, ["epoch=1-eval_loss=1.ckpt"]),
}  # fmt: skip


@both_doors
@pytest.mark.parametrize("case", NAMED)
def test_model_checkpoint_names_files_and_its_folder_as_lightning(door, case):
    options, expected = NAMED[case]
    door.fit(plc.ModelCheckpoint(**options))
    assert files(door.folder) == [f"csv/version_1/checkpoints/{name}" for name in expected]


@pytest.mark.parametrize("door", ["trainer"], indirect=True)
def test_without_a_lightning_logger_checkpoints_go_to_the_output_folder(door, monkeypatch):
    monkeypatch.setattr("helpers.shipped_runs.CSVLogger", lambda *parts, **options: _NoLogger(door.folder))
    door.fit(plc.ModelCheckpoint())
    assert files(door.folder) == ["checkpoints/epoch=1-step=8.ckpt"]


def _NoLogger(folder):
    callback = pl.Callback()
    callback.log_dir = str(folder)
    return callback


# Resumes and second fits ---------------------------------------------------------------------------------------------
STATEFUL = {
    "BackboneFinetuning": lambda folder: plc.BackboneFinetuning(unfreeze_backbone_at_epoch=1),
    "BaseFinetuning": lambda folder: Thaws(),
    "StochasticWeightAveraging": lambda folder: plc.StochasticWeightAveraging(
        0.5, swa_epoch_start=2, annealing_epochs=1
    ),
    "WeightAveraging": lambda folder: plc.WeightAveraging(),
    "EMAWeightAveraging": lambda folder: plc.EMAWeightAveraging(decay=0.5),
    "EarlyStopping": lambda folder: plc.EarlyStopping("eval_loss", patience=9, min_delta=100.0),
    "Timer": lambda folder: plc.Timer(timedelta(hours=1)),
    "ModelCheckpoint": lambda folder: plc.ModelCheckpoint(folder, monitor="eval_loss", save_top_k=2),
}


def _shown_state(callback):
    """Return a callback's state without times and paths."""
    kept = ("wait_count", "best_score", "stopped_epoch", "best_model_score", "n_averaged", "latest_update_epoch")
    return {name: value for name, value in callback.state_dict().items() if name in kept}


@both_doors
@pytest.mark.parametrize(("accumulation", "epochs"), [(1, (1, 2, 3)), (2, (2,))])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.filterwarnings("ignore:.*dirpath has changed")
def test_a_run_that_is_resumed_goes_on_with_the_callbacks_state(door, name, accumulation, epochs):
    whole = STATEFUL[name](door.folder / "best")
    expected = door.fit(whole, epochs=4, accumulation=accumulation, keeps=True)
    for epoch in epochs:
        again = STATEFUL[name](door.folder / "best")
        run = door.fit(again, epochs=4, accumulation=accumulation, resume=door.checkpoint(epoch))
        assert torch.equal(weights_of(run.model), weights_of(expected.model)) and run.updates == expected.updates
        assert _shown_state(again) == _shown_state(whole)
        if name == "Timer":
            assert again.time_elapsed("train") > 0


@both_doors
@pytest.mark.parametrize("name", STATEFUL)
def test_a_second_fit_with_the_same_callback_runs(door, name):
    run = door.fit(STATEFUL[name](door.folder / "best"))
    before = weights_of(run.model).clone()
    if door.name == "native":
        run.lightning.fit_loop.max_epochs = 4
    run.fit_again()
    assert torch.isfinite(weights_of(run.model)).all() and not torch.equal(weights_of(run.model), before)


# The list ------------------------------------------------------------------------------------------------------------
def test_every_callback_of_lightning_is_here():
    assert set(EFFECTS) | {name for name, _ in REFUSED} == set(plc.__all__)


def test_the_table_in_the_docs_says_what_the_tests_find():
    page = Path(__file__).resolve().parents[2] / "docs" / "events_and_hooks.md"
    rows = [line.split("|")[1:4] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    told = {cells[0].strip(" `"): [cell.strip().split(":")[0] for cell in cells[1:]] for cells in rows}
    assert {name: told.get(name) for name in plc.__all__} == {
        name: [outcome(name, door) for door in DOORS] for name in plc.__all__
    }
