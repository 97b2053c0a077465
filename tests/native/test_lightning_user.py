"""What a Lightning user does with `HFModule` and `HFDataModule` beside a plain fit: each has its effect."""

from __future__ import annotations

import csv
import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from helpers import toy
from helpers.toy import Classifier, rows, weights
from hf_compat import EarlyStoppingCallback, HFDataModule, HFModule, TrainerCallback
from hf_compat.errors import (
    ArgumentError,
    CallbackError,
    DataError,
    HfCompatWarning,
    InertArgumentWarning,
    OverrideError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Seen(pl.Callback):
    """Keeps what hooks saw."""

    def __init__(self, look):
        self.look, self.kept = look, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.kept.append(self.look(trainer, batch))


# Fits ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_second_fit_trains_with_a_schedule_of_its_own(make, lightning, same_trainer):
    module, data = HFModule(Classifier(), make()), HFDataModule(make(), rows(16))
    first = lightning()
    first.fit(module, data)
    after_first, rates = weights(module), Seen(lambda trainer, batch: float(trainer.callback_metrics["learning_rate"]))
    second = first if same_trainer else lightning(max_epochs=5, callbacks=[rates])
    second.fit_loop.max_epochs = 5
    second.fit(module, data)
    assert not torch.equal(weights(module), after_first)
    assert second.global_step == 20
    assert same_trainer or rates.kept[0] == pytest.approx(0.01)


def test_a_model_that_was_evaluated_trains_in_training_mode(make, lightning):
    modes = []

    class Own(HFModule):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.automatic_optimization = True

        def training_step(self, batch, batch_idx):
            modes.append(self.model.training)
            return self.model(**batch)["loss"]

    lightning(max_epochs=2).fit(Own(Classifier(), make()), HFDataModule(make(), rows(16), rows(8)))
    assert modes == [True] * 8


def test_a_pretrained_model_in_eval_mode_gives_no_warning(make, lightning, caplog):
    model = Classifier().eval()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*LeafSpec")  # of Lightning under this torch
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        lightning().fit(HFModule(model, make()), HFDataModule(make(), rows(16)))
    assert "eval mode" not in caplog.text and model.training


def test_warnings_that_the_user_hides_stay_hidden_after_a_fit(make, lightning):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\).*", FutureWarning)
        warnings.filterwarnings("ignore", ".*no pre-optimization state was saved.*")
        before = warnings.filters[:]
        lightning().fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(16)))
        assert [entry for entry in before if entry not in warnings.filters] == []


def test_batches_that_are_overfitted_are_the_same_in_every_epoch(make, lightning):
    sums = Seen(lambda trainer, batch: round(float(batch["x"].sum()), 4))
    trainer = lightning(overfit_batches=2, max_epochs=3, callbacks=[sums])
    trainer.fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(40)))
    assert len(set(sums.kept)) == 2 and sums.kept == sums.kept[:2] * 3


def test_a_limit_of_time_alone_trains_at_a_constant_rate_and_says_so(make, lightning):
    trainer = lightning(max_epochs=None, max_time={"seconds": 1})
    module = HFModule(Classifier(), make())
    with pytest.warns(HfCompatWarning, match="no end to decay to"):
        trainer.fit(module, HFDataModule(make(), rows(16)))
    assert trainer.global_step > 4 and float(trainer.callback_metrics["learning_rate"]) == pytest.approx(0.01)


def test_a_warm_up_that_is_a_share_of_an_unknown_number_is_refused(make, lightning):
    trainer = lightning(max_epochs=None, max_time={"seconds": 1})
    with pytest.raises(ArgumentError, match=r"`warmup_steps=0.1` is a share"):
        trainer.fit(HFModule(Classifier(), make(warmup_steps=0.1)), HFDataModule(make(), rows(16)))


@pytest.mark.parametrize("options", [{"max_steps": 5, "max_epochs": -1}, {"max_epochs": 2}])
def test_data_without_a_length_ends_as_the_trainer_says(make, lightning, options):
    trainer = lightning(**options)
    args = make(lr_scheduler_type="constant")
    trainer.fit(HFModule(Classifier(), args), HFDataModule(args, toy.Stream(rows(16))))
    assert trainer.global_step == (5 if "max_steps" in options else 8)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "16-true"])
def test_true_precisions_train_evaluate_and_predict(make, lightning, precision):
    module, data = HFModule(Classifier(), make()), HFDataModule(make(), rows(16), rows(8), rows(8))
    trainer = lightning(precision=precision)
    before = weights(module)
    trainer.fit(module, data)
    kind = {"bf16-true": torch.bfloat16, "64-true": torch.float64, "16-true": torch.float16}[precision]
    assert weights(module).dtype is kind and not torch.equal(weights(module), before.to(kind))
    assert trainer.predict(module, data)[0].dtype is kind


def test_mixed_precision_stays_for_all_calls_of_a_trainer(make, lightning):
    module, data = HFModule(Classifier(), make()), HFDataModule(make(), rows(16), rows(8))
    trainer = lightning(precision="bf16-mixed")
    trainer.fit(module, data)
    again = trainer.validate(module, data, verbose=False)
    assert again == lightning(precision="bf16-mixed").validate(module, data, verbose=False)
    assert again != lightning().validate(module, data, verbose=False)
    before = weights(module)
    one, two = HFModule(Classifier(), make()), HFModule(Classifier(), make())
    for other, with_trainer in ((one, trainer), (two, lightning(precision="bf16-mixed"))):
        torch.nn.utils.vector_to_parameters(before, other.model.parameters())
        torch.manual_seed(3)
        with_trainer.fit_loop.max_epochs = with_trainer.current_epoch + 1
        with_trainer.fit(other, HFDataModule(make(), rows(16)))
    assert torch.equal(weights(one), weights(two))


# Arguments -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given_to", ["module", "data", "both", "no arguments of data"])
def test_accumulation_holds_wherever_it_is_given(make, lightning, given_to):
    sizes = Seen(lambda trainer, batch: len(batch))
    two, one = make(gradient_accumulation_steps=2), make()
    of_module, of_data = {"module": (two, one), "data": (one, two), "both": (two, two)}.get(given_to, (two, None))
    trainer = lightning(callbacks=[sizes])
    trainer.fit(HFModule(Classifier(), of_module), HFDataModule(of_data, rows(16)))
    assert set(sizes.kept) == {2} and trainer.global_step == len(sizes.kept)


@pytest.mark.parametrize("name", ["learning_rate", "bf16", "num_train_epochs"])
def test_an_argument_of_training_is_refused_in_the_data_modules(make, lightning, name):
    of_data = make(**{name: {"learning_rate": 0.5, "bf16": True, "num_train_epochs": 7}[name]})
    with pytest.raises(ArgumentError, match=f"`{name}="):
        lightning().fit(HFModule(Classifier(), make()), HFDataModule(of_data, rows(16)))


def test_the_seed_of_the_arguments_decides(make, lightning, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    def train(seed, draws):
        torch.manual_seed(0)
        model = Classifier()
        torch.manual_seed(draws)  # what a script happens to have drawn before
        module = HFModule(model, make(seed=seed))
        lightning().fit(module, HFDataModule(None, rows(16)))
        return weights(module)

    assert torch.equal(train(5, draws=1), train(5, draws=2))
    assert not torch.equal(train(5, draws=1), train(6, draws=1))


def test_a_schedule_that_follows_a_metric_is_stepped_after_validation(make, lightning):
    args = make(lr_scheduler_type="reduce_lr_on_plateau", learning_rate=10.0, eval_strategy="epoch",
                lr_scheduler_kwargs={"patience": 0})  # fmt: skip
    module = HFModule(Classifier(), args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="These arguments have no effect")
        lightning(max_epochs=6).fit(module, HFDataModule(args, rows(16), rows(8)))
    assert module.steps.optimizer.param_groups[0]["lr"] < 10.0


@pytest.mark.parametrize(
    ("option", "argument"),
    [("accumulate_grad_batches", "gradient_accumulation_steps"), ("gradient_clip_val", "max_grad_norm")],
)
def test_what_lightning_would_do_to_gradients_names_the_argument_that_does(make, lightning, option, argument):
    with pytest.raises(ArgumentError, match=rf"`{option}=2`(.|\n)*TrainingArguments\({argument}=2\)"):
        lightning(**{option: 2}).fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(16)))


# Logs ----------------------------------------------------------------------------------------------------------------
def test_losses_rates_and_norms_reach_loggers_and_monitors(make, lightning, tmp_path):
    logger = CSVLogger(tmp_path / "csv")
    saver = ModelCheckpoint(tmp_path / "best", monitor="loss_epoch", filename="{epoch}")
    trainer = lightning(
        logger=logger, enable_checkpointing=True, callbacks=[EarlyStopping("loss", mode="min"), saver], max_epochs=3
    )
    args = make(gradient_accumulation_steps=2)
    trainer.fit(HFModule(Classifier(), args), HFDataModule(args, rows(16)))
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    updates = [entry for entry in entries if entry["loss"]]
    assert [int(entry["step"]) for entry in updates] == list(range(6))
    assert all(float(entry["grad_norm"]) > 0 for entry in updates)
    assert float(updates[0]["learning_rate"]) == pytest.approx(0.01)
    epochs = [float(entry["loss_epoch"]) for entry in entries if entry["loss_epoch"]]
    of_first = [float(entry["loss"]) for entry in updates[:2]]
    assert epochs[0] == pytest.approx(sum(of_first) / 2, rel=1e-5) and len(epochs) == 3
    assert saver.best_model_path and "loss" in trainer.progress_bar_metrics


def test_callbacks_and_subclasses_log_in_any_hook(make, lightning):
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.log("now", 1.0)
            pl_module.log("mean", float(batch_idx), on_step=False, on_epoch=True)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            pl_module.log("validated", 2.0)

    trainer = lightning(callbacks=[Logs()], num_sanity_val_steps=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*infer the batch_size")
        trainer.fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(13), rows(8)))
    # three batches of four samples and one of one
    assert float(trainer.callback_metrics["mean"]) == pytest.approx((0 * 4 + 1 * 4 + 2 * 4 + 3 * 1) / 13)
    assert float(trainer.callback_metrics["validated"]) == 2.0 and float(trainer.callback_metrics["now"]) == 1.0


def test_batches_are_mappings_to_callbacks(make, lightning):
    shapes = Seen(lambda trainer, batch: (batch["x"].shape[0], "labels" in batch, list(batch.keys()), len(list(batch))))
    args = make(gradient_accumulation_steps=3)
    lightning(callbacks=[shapes]).fit(HFModule(Classifier(), args), HFDataModule(args, rows(17)))
    assert shapes.kept == [(4, True, ["x", "labels"], 3), (1, True, ["x", "labels"], 2)]


# Data ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_plain_loaders_train_as_windows_of_the_same_batches(make, lightning, accumulation):
    args = make(gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential", max_grad_norm=0.1)
    torch.manual_seed(0)
    plain, windows = HFModule(Classifier(dropout=0.0), args), HFModule(Classifier(dropout=0.0), args)
    windows.load_state_dict(plain.state_dict())
    first, second = lightning(max_epochs=2), lightning(max_epochs=2)
    first.fit(plain, DataLoader(rows(19), batch_size=4), DataLoader(rows(8), batch_size=4))
    second.fit(windows, HFDataModule(args, rows(19)))
    assert torch.equal(weights(plain), weights(windows)) and first.global_step == second.global_step
    assert "eval_loss" in first.callback_metrics


def test_several_validation_sets_are_one_validation_with_all_metrics(make, lightning):
    ends = []

    class Ends(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            ends.append({name for name in trainer.callback_metrics if name.startswith("eval")})

    stopper = EarlyStopping("eval_b_loss", patience=2, mode="max")
    trainer = lightning(callbacks=[Ends(), stopper], num_sanity_val_steps=0, max_epochs=9)
    sets = {"a": rows(8), "b": rows(4)}
    trainer.fit(HFModule(Classifier(), make(learning_rate=0.1)), HFDataModule(make(learning_rate=0.1), rows(16), sets))
    assert ends == [{"eval_a_loss", "eval_b_loss"}] * len(ends) and stopper.wait_count == 2 and len(ends) < 9


def test_a_list_of_plain_validation_loaders_is_named_by_number(make, lightning):
    trainer = lightning()
    loaders = [DataLoader(rows(8), batch_size=4), DataLoader(rows(4, seed=9), batch_size=4)]
    alone = trainer.validate(HFModule(Classifier(), make()), loaders, verbose=False)
    assert {name for part in alone for name in part} == {"eval_0_loss", "eval_1_loss"}


@pytest.mark.parametrize("step", ["validation_step", "test_step"])
@pytest.mark.parametrize("calls_super", [True, False])
def test_metrics_that_an_evaluation_of_ones_own_leaves_out_are_named(make, lightning, step, calls_super, recwarn):
    def own(self, batch, batch_idx):
        return getattr(HFModule, step)(self, batch, batch_idx) if calls_super else None

    kind = type(f"{step}_{calls_super}", (HFModule,), {step: own})
    module = kind(Classifier(), make(), compute_metrics=lambda prediction: {"own": 1.0})
    run = lightning().validate if step == "validation_step" else lightning().test
    run(module, HFDataModule(make(), None, rows(8), rows(8)), verbose=False)
    message = f"`compute_metrics` of {kind.__name__} is not called, because its own `{step}`"
    assert any(message in str(warning.message) for warning in recwarn) is not calls_super


def test_arguments_of_the_loader_are_named_beside_a_loader_of_ones_own(make, lightning):
    def told(loader, **values):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lightning().fit(HFModule(Classifier(), make(**values)), loader)
        return [str(one.message) for one in caught if issubclass(one.category, InertArgumentWarning)]

    (message,) = told(DataLoader(rows(16), batch_size=8), dataloader_drop_last=True)
    assert "your own DataLoader: `per_device_train_batch_size=4`, `dataloader_drop_last=True`" in message
    assert told(DataLoader(rows(16), batch_size=4)) == []
    assert (
        told(HFDataModule(make(dataloader_drop_last=True), rows(16)).train_dataloader(), dataloader_drop_last=True)
        == []
    )


def test_predict_gives_logits_and_feeds_a_writer(make, lightning, tmp_path):
    class Writer(BasePredictionWriter):
        written, places, ends = 0, [], []

        def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, loader_idx):
            self.written += len(prediction)
            self.places += indices

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            self.ends.append([place for batch in indices[0] for place in batch])

    module, writer = HFModule(Classifier(), make()), Writer("batch_and_epoch")
    by_data = lightning(callbacks=[writer]).predict(module, HFDataModule(make(), test_dataset=rows(13)))
    assert writer.places == list(range(13)) and writer.ends == [writer.places]
    plain = lightning().predict(module, DataLoader(rows(13), batch_size=8))
    expected = module.model.eval()(x=torch.stack([torch.as_tensor(row["x"]) for row in rows(13)]))["logits"]
    assert torch.allclose(torch.cat(by_data), expected) and torch.equal(torch.cat(plain), torch.cat(by_data))
    assert writer.written == 13


def test_sets_that_setup_makes_need_no_super(make, lightning):
    class Own(HFDataModule):
        def setup(self, stage):
            self.train_dataset, self.eval_dataset = rows(16), rows(8)

    trainer = lightning()
    trainer.fit(HFModule(Classifier(), make()), Own(make()))
    assert trainer.global_step == 4 and "eval_loss" in trainer.callback_metrics


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_command_without_its_data_names_the_argument(make, lightning, command):
    name = {"validate": "eval_dataset", "test": "test_dataset", "predict": "predict_dataset"}[command]
    with pytest.raises(DataError, match=f"`{name}=…`"):
        getattr(lightning(), command)(HFModule(Classifier(), make()), HFDataModule(make(), rows(8)))


# Optimizers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_an_optimizer_and_schedule_of_a_subclass_are_honoured(make, lightning, interval):
    class Own(HFModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    rates = Seen(lambda trainer, batch: float(trainer.callback_metrics["learning_rate"]))
    module = Own(Classifier(), make())
    before = weights(module)
    lightning(max_epochs=2, callbacks=[rates]).fit(module, HFDataModule(make(), rows(12)))
    assert rates.kept == [0.5 * 0.5 ** (i if interval == "step" else i // 3) for i in range(6)]
    assert isinstance(module.steps.optimizer.optimizer, torch.optim.SGD) and not torch.equal(weights(module), before)


def test_a_schedule_that_an_override_leaves_out_is_not_stepped(make, lightning):
    class Own(HFModule):
        def configure_optimizers(self):
            return super().configure_optimizers()["optimizer"]

    rates = Seen(lambda trainer, batch: float(trainer.callback_metrics["learning_rate"]))
    module = Own(Classifier(), make())
    lightning(callbacks=[rates]).fit(module, HFDataModule(make(), rows(12)))
    assert rates.kept == pytest.approx([0.01] * 3) and module.steps.lr_scheduler is None


@pytest.mark.parametrize("form", ["inside", "beside", "lists", "list", "none"])
def test_a_schedule_of_a_subclass_follows_its_metric(make, lightning, form):
    class WithPlateau(HFModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5)
            followed = {"scheduler": schedule, "monitor": "eval_loss", "strict": True}
            return {
                "inside": {"optimizer": optimizer, "lr_scheduler": followed},
                "beside": {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "eval_loss"},
                "lists": ([optimizer], [followed]),
                "list": [{"optimizer": optimizer, "lr_scheduler": followed}],
                "none": {"optimizer": optimizer, "lr_scheduler": schedule},
            }[form]

    module = WithPlateau(Classifier(), make())
    data = HFDataModule(make(), rows(8), rows(4, 1))
    if form == "none":
        with pytest.raises(MisconfigurationException, match="must include a monitor"):
            lightning().fit(module, data)
        return
    for _ in range(2):  # no evaluation is better by so much
        lightning(max_epochs=3).fit(module, data)
        assert module.steps.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**3
        assert "configure_optimizers" not in vars(module)


def scheduled(schedules_of):
    """Make a module whose optimizer begins at 0.5, with schedules that halve it."""

    class Own(HFModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            halves = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5) for _ in range(2)]
            return [optimizer], schedules_of(*halves)

    return Own


def test_each_schedule_of_a_subclass_is_stepped(make, lightning):
    module = scheduled(lambda one, two: [{"scheduler": one, "interval": "step"}, two])(Classifier(), make())
    lightning(max_epochs=2).fit(module, HFDataModule(make(), rows(12)))
    assert module.steps.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**6 * 0.5**2


def test_a_schedule_with_an_unknown_interval_is_refused(make, lightning):
    module = scheduled(lambda one, two: [{"scheduler": one, "interval": "batch"}])(Classifier(), make())
    with pytest.raises(MisconfigurationException, match='"step" or "epoch" but is "batch"'):
        lightning().fit(module, HFDataModule(make(), rows(12)))


def test_an_unknown_entry_of_a_schedule_is_named(make, lightning):
    module = scheduled(lambda one, two: [{"scheduler": one, "intervall": "step"}])(Classifier(), make())
    with pytest.warns(RuntimeWarning, match="unsupported keys in the lr scheduler dict: {'intervall'}"):
        lightning().fit(module, HFDataModule(make(), rows(12)))
    assert module.steps.optimizer.param_groups[0]["lr"] == 0.25  # an epoch each, Lightning's default


def test_a_schedule_follows_its_metric_where_lightning_makes_the_updates(make, lightning):
    class WithPlateau(HFModule):
        def __init__(self, model, args):
            super().__init__(model, args)
            self.automatic_optimization = True

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "eval_loss"}}

    module = WithPlateau(Classifier(), make())
    lightning(max_epochs=3).fit(module, HFDataModule(make(), rows(8), rows(4, 1)))
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**3


def test_configure_callbacks_may_return_nothing(make, lightning):
    class Own(HFModule):
        def configure_callbacks(self):
            return None

    trainer = lightning()
    trainer.fit(Own(Classifier(), make()), HFDataModule(make(), rows(8)))
    assert trainer.global_step == 2


def test_hf_callbacks_of_configure_callbacks_are_called(make, lightning):
    events = []

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            events.append(state.global_step)

    class Own(HFModule):
        def configure_callbacks(self):
            return [*super().configure_callbacks(), Noting()]

    lightning().fit(Own(Classifier(), make()), HFDataModule(make(), rows(8)))
    assert events == [1, 2]


class NeedsAName(TrainerCallback):
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (
            EarlyStopping,
            CallbackError,
            r"EarlyStopping among the callbacks is a class.\n\nHint: .*`EarlyStopping\(…\)`",
        ),
        (ModelCheckpoint, CallbackError, "ModelCheckpoint among the callbacks is a class"),
        ("EarlyStopping", CallbackError, "'EarlyStopping' is not a callback"),
        (NeedsAName, TypeError, "missing 1 required positional argument: 'name'"),
    ],
)
def test_an_entry_of_the_list_that_is_no_callback_is_named(make, lightning, entry, error, message):
    with pytest.raises(error, match=message):
        lightning(callbacks=[entry]).fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(8)))


def test_a_class_of_hf_callbacks_is_made_an_object(make, lightning):
    trainer = lightning(callbacks=[EarlyStoppingCallback])
    trainer.fit(HFModule(Classifier(), make()), HFDataModule(make(), rows(8), rows(4, 1)))
    assert isinstance(trainer.callbacks[0].handler.callbacks[0], EarlyStoppingCallback)


RETURNS_A_LOSS = {"training_step": lambda self, batch, batch_idx: self.model(**batch)["loss"]}


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(
    ("count", "methods", "message"),
    [
        (2, {}, "returned 2 optimizers"),
        (0, {}, "returned 0 optimizers"),
        (None, {}, "returned 0 optimizers"),
        (2, RETURNS_A_LOSS, "made no backward pass"),
        (0, RETURNS_A_LOSS, "returned 0 optimizers"),
        (None, RETURNS_A_LOSS, "returned 0 optimizers"),
    ],
)
def test_anything_but_one_optimizer_is_refused(make, lightning, count, methods, message):
    def configure_optimizers(self):
        return None if count is None else [torch.optim.SGD(self.parameters(), lr=0.5) for _ in range(count)]

    kind = type("Own", (HFModule,), {"configure_optimizers": configure_optimizers, **methods})
    with pytest.raises((ArgumentError, OverrideError), match=message):
        lightning().fit(kind(Classifier(), make()), HFDataModule(make(), rows(12)))
