"""What a fit prepares, logs and gives back, with a Lightning trainer that trains nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Timer
from torch import nn

from hf_compat.errors import CheckpointError
from hf_compat.plan.translate import RunCounts
from hf_compat.trainer_methods import fit
from hf_compat.trainer_methods.fit import MeshModule, TrainerModule, lightning_fit, log_start
from hf_compat.training_run.resumer import ResumeAt


class Plan(SimpleNamespace):
    """Stands in for a Lightning plan, as `dataclasses.replace` sees it."""


def plan(**values):
    usual = {"world_size": 1, "device": "cpu", "strategy": "one_device", "precision": "32-true"}
    return Plan(**usual | values)


COUNTS = RunCounts(3, 4, 1000, 3000, 16, 8, 12)


@pytest.mark.parametrize(
    ("resumed", "done", "skips", "extra"),
    [
        (False, 0, False, []),
        (True, 9, False, ["epoch 2 and global step 9", "past 2 epochs and 2 batches"]),
        (True, 9, True, ["epoch 2 and global step 9"]),
        (True, 0, False, ["epoch 0 and global step 0", "past 0 epochs and 0 batches"]),
        (True, 11, False, ["epoch 2 and global step 11", "past 2 epochs and 6 batches"]),
    ],
)
@pytest.mark.parametrize("level", ["passive", "info", "debug", "warning"])
def test_the_lines_of_a_start(resumed, done, skips, extra, level, monkeypatch, caplog):
    lines = []
    monkeypatch.setattr(fit, "log_line", lambda line, logger: lines.append((line, logger)))
    args = SimpleNamespace(
        gradient_accumulation_steps=2, per_device_train_batch_size=8, ignore_data_skip=skips, log_level=level
    )
    with caplog.at_level("INFO", fit.logger.name):
        log_start(plan(), COUNTS, args, 1234567, done, resumed)
    assert [line.partition(" = ")[2] for line, _ in lines[1:9]] == [
        "1,000", "3", "4", "8", "16", "2", "12", "1,234,567",
    ]  # fmt: skip
    assert [any(text in line for line, _ in lines[9:]) for text in extra] == [True] * len(extra)
    assert len(lines) == 9 + len(extra)
    assert {logger for _, logger in lines} == {fit.logger if level in ("info", "debug") else None}
    told = f", from update {done} on" if done else ""
    assert f"1,234,567 parameters, 12 updates of 16 samples{told}, on cpu, 32-true" in caplog.text


@pytest.mark.parametrize(
    ("changes", "gpus", "processes", "warned"),
    [
        ({}, 4, "", False),
        ({"device": "cuda:0"}, 1, "", False),
        ({"device": "cuda:0"}, 4, "", True),
        ({"device": "cuda:0", "world_size": 4, "strategy": "ddp"}, 4, " in 4 processes (ddp)", False),
        ({"world_size": 2, "strategy": "fsdp2"}, 1, " in 2 processes (fsdp2)", False),
    ],
)
def test_processes_and_gpus_of_a_start(changes, gpus, processes, warned, monkeypatch, caplog):
    monkeypatch.setattr(fit, "log_line", lambda *_: None)
    monkeypatch.setattr(fit.torch.cuda, "device_count", lambda: gpus)
    args = SimpleNamespace(
        gradient_accumulation_steps=1, per_device_train_batch_size=8, ignore_data_skip=False, log_level="passive"
    )
    with caplog.at_level("INFO", fit.logger.name):
        log_start(plan(**changes), COUNTS, args, 10, 0, False)
    assert f"on {changes.get('device', 'cpu')}{processes}, 32-true" in caplog.text
    assert ("uses one of 4 GPUs, with 16 samples an update" in caplog.text) is warned
    assert ("(DataParallel), with 64." in caplog.text) is warned


class Trained:
    """Stands in for a Trainer whose training is prepared."""

    def __init__(self, told, strategy="one_device", limit=None, finished=False, scaler=None, held=None):
        self.told, self.model, self._compiled_model = told, nn.Linear(1, 1), held
        self.args = SimpleNamespace(
            device=SimpleNamespace(type="cpu"), enable_jit_checkpoint=True, ddp_timeout=9, process_index=0
        )
        self._lightning_options = {} if limit is None else {"max_time": limit}
        self._plan = SimpleNamespace(of=lambda args, model: plan(strategy=strategy))
        self._saver, self.lightning_trainer, self.model_wrapped = "saver", None, "wrapped"
        self.state = SimpleNamespace(global_step=5)
        self.accelerator = SimpleNamespace(scaler="old", unscale="old", run_backward="own", sync_gradients=False)
        self.stop_signals = SimpleNamespace(watched=self._watched)
        self.run = SimpleNamespace(
            counts=COUNTS, start=SimpleNamespace(is_finished=finished, epoch=2), checkpoint=None, module=None,
            windows=SimpleNamespace(updates_to_skip=1, close=lambda: told.append("closed")), lightning_trainer=None,
        )  # fmt: skip

    @contextlib.contextmanager
    def _watched(self, *how):
        self.told.append(("watched", *how))
        yield

    def add_callback(self, callback):
        self.told.append(("added", type(callback).__name__))

    def pop_callback(self, callback):
        self.told.append(("removed", type(callback).__name__))

    def _call_wrap_model(self, training):
        self.told.append(("wrapped", training))

    def get_num_trainable_parameters(self):
        return 2


def prepared(monkeypatch, told, scaler=None, slurm=None):
    class Bridge:
        def __init__(self, *_):
            pass

        def keep_requested_kwargs(self, keeps):
            told.append(("kept", keeps))

    class Precision:
        unscale = "unscale"

        def __init__(self):
            self.scaler = scaler

    module = SimpleNamespace(leave_fit=lambda: told.append("left"))
    trainer = SimpleNamespace(precision_plugin=Precision() if scaler != "none" else object())
    monkeypatch.setattr(fit, "ForwardPrecision", Precision)
    monkeypatch.setattr(fit, "HFBridge", Bridge)
    monkeypatch.setattr(fit, "with_counts", lambda plan, args, counts: plan)
    monkeypatch.setattr(fit.dataclasses, "replace", lambda plan, **changes: Plan(**{**vars(plan), **changes}))
    monkeypatch.setattr(fit, "wrap_forward", lambda *what: told.append(("forward", *what[1:])))
    monkeypatch.setattr(fit, "make_module", lambda host, plan: module)
    monkeypatch.setattr(fit, "make_lightning_trainer", lambda host, plan, bridge: told.append(plan) or trainer)
    monkeypatch.setattr(fit, "start_from", lambda *what: told.append(("from", *what[1:])))
    monkeypatch.setattr(fit, "log_start", lambda *what, is_resumed: told.append(("logged", what[3:], is_resumed)))
    monkeypatch.setattr(fit, "slurm_job_id", lambda: slurm)
    monkeypatch.setattr(fit, "uncompiled", lambda held: held.of)
    return trainer, module


@pytest.mark.parametrize("strategy", ["one_device", "deepspeed"])
@pytest.mark.parametrize("limit", [None, "00:00:00:10"])
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("slurm", [None, "7"])
def test_a_fit_is_built_and_taken_apart(strategy, limit, finished, fails, slurm, monkeypatch):
    told = []
    trainer, module = prepared(monkeypatch, told, slurm=slurm)
    host = Trained(told, strategy, limit, finished)
    run = host.run
    raised = pytest.raises(ValueError, match="within") if fails else contextlib.nullcontext()
    with raised, lightning_fit(host, run) as pair:
        assert pair == (trainer, module) == (run.lightning_trainer, run.module)
        assert host.is_deepspeed_enabled is (strategy == "deepspeed") and module.num_training_updates == 12
        if fails:
            raise ValueError("within")
    made = next(one for one in told if isinstance(one, Plan))
    assert getattr(made, "max_epochs", None) == (-1 if finished else None)
    timer = Timer.__name__
    assert [one for one in told if not isinstance(one, Plan)] == [
        *[("added", timer)] * (limit is not None), ("wrapped", True),
        *[("forward", "32-true", "cpu")] * (strategy != "deepspeed"), ("from", 2, 5, 1), ("logged", (2, 5), False),
        ("watched", True, slurm is not None, 9), "left", "closed", ("kept", False),
        *[("removed", timer)] * (limit is not None),
    ]  # fmt: skip
    assert run.module is run.lightning_trainer is None and host.lightning_trainer is trainer
    accelerator = host.accelerator
    assert accelerator.run_backward is accelerator.unscale is accelerator.scaler is None
    assert accelerator.sync_gradients is True and host.model_wrapped is host.model


@pytest.mark.parametrize("scaler", [None, "scaler", "none"])
def test_a_scaler_is_that_of_the_fit(scaler, monkeypatch):
    told = []
    prepared(monkeypatch, told, scaler)
    host = Trained(told)
    with lightning_fit(host, host.run):
        assert host.accelerator.scaler == ("scaler" if scaler == "scaler" else None)
        assert host.accelerator.unscale == ("unscale" if scaler == "scaler" else "old")


@pytest.mark.parametrize("is_own", [False, True])
def test_a_compiled_model_is_kept_for_the_next_training(is_own, monkeypatch):
    told = []
    prepared(monkeypatch, told)
    host = Trained(told)
    held = host._compiled_model = SimpleNamespace(of=host.model if is_own else "another")
    with lightning_fit(host, host.run):
        pass
    assert host.model_wrapped is (held if is_own else host.model)


def test_a_resumed_fit_says_so(monkeypatch):
    told = []
    prepared(monkeypatch, told)
    host = Trained(told)
    host.run.checkpoint = "c"
    with lightning_fit(host, host.run):
        pass
    assert ("logged", (2, 5), True) in told


class Alone(TrainerModule):
    """A module whose trainer is what a test says."""

    def __init__(self, host, trainer):
        nn.Module.__init__(self)
        self.__dict__.update(steps=host, held=trainer, model="model")

    trainer = property(lambda self: self.held)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_set_up_restores_lightnings_callbacks(ranks, stage, monkeypatch):
    told = []
    monkeypatch.setattr(fit, "leave_at_exit", lambda: told.append("leaves"))
    monkeypatch.setattr(fit, "HFCheckpointIO", lambda own: ("ours", own))
    resumer = SimpleNamespace(is_loading=True, restore=lambda *what: told.append(what))
    host = SimpleNamespace(_resumer=resumer, _run=SimpleNamespace(checkpoint="c"))
    strategy = SimpleNamespace(checkpoint_io="theirs")
    Alone(host, SimpleNamespace(world_size=ranks, strategy=strategy)).setup(stage)
    fits = stage == "fit"
    assert told == ["leaves"] * (ranks > 1) + [(ResumeAt.CALLBACKS_SET_UP, "c")] * fits
    assert strategy.checkpoint_io == (("ours", "theirs") if fits else "theirs")


@pytest.mark.parametrize("has_callbacks", [False, True])
def test_lightnings_callbacks_are_prepared_if_there_are_any(has_callbacks, monkeypatch):
    told = []
    monkeypatch.setattr(fit, "prepare_lightning_callbacks", lambda *what: told.append(what[2]))
    monkeypatch.setattr(fit, "leave_lightning_callbacks", told.append)
    host = SimpleNamespace(_callbacks=SimpleNamespace(lightning=["callback"] * has_callbacks))
    module = Alone(host, "trainer")
    assert list(module.configure_callbacks()) == [] and told == ["model"] * has_callbacks
    module.teardown("fit")
    assert told[-1] == "trainer"


def starting(told, monkeypatch, **changes):
    """A module that starts a fit, and its host."""
    facts = {"ranks": 1, "mesh": False, "deepspeed": False, "made_of": "model", "own": True, "made": False, "rank": 0}
    facts = SimpleNamespace(**facts | {"in_updates": False, "callbacks": [], "shards": None} | changes)

    class Mesh:
        pass

    model = nn.Linear(1, 1)
    frozen = model.bias.requires_grad_(False)
    monkeypatch.setattr(fit, "HFMeshStrategy", Mesh)
    monkeypatch.setattr(fit, "wrapped_model", lambda strategy, model: "wrapped")
    monkeypatch.setattr(fit, "limit_waiting", lambda seconds: told.append(("waits", seconds)))
    monkeypatch.setattr(fit, "make_model_state", lambda model, wrapped, shards: ("state", wrapped, shards))
    monkeypatch.setattr(fit, "check_optimized", lambda optimizer, model, warns: told.append(("checked", warns)))
    monkeypatch.setattr(fit, "tell_of_other_optimizer", lambda *what: told.append("other"))
    monkeypatch.setattr(fit, "unwrap_optimizer", lambda optimizer: optimizer)
    monkeypatch.setattr(fit, "unfreeze_optimized", lambda trainer: told.append("unfrozen"))
    monkeypatch.setattr(fit.WindowModule, "on_fit_start", lambda self: told.append("started"))
    agreement = SimpleNamespace(sources=SimpleNamespace(in_updates=facts.in_updates))
    run = SimpleNamespace(checkpoint="c", loader="loader", flag_agreement=agreement, frozen=None)
    resumer = SimpleNamespace(is_loading=True, restore=lambda *what: told.append(what))
    host = SimpleNamespace(
        model=model, _run=run, _resumer=resumer, args=SimpleNamespace(ddp_timeout=9), optimizer="optimizer",
        is_deepspeed_enabled=facts.deepspeed, _own_optimizer="optimizer" if facts.own else "another",
        _optimizer_made_of=model if facts.made_of == "model" else None, _created_lr_scheduler=facts.made,
        lr_scheduler="schedule", callback_handler=SimpleNamespace(),
        _callbacks=SimpleNamespace(lightning=facts.callbacks),
        _tree=SimpleNamespace(parameters=lambda model: list(model.parameters())),
        accelerator=SimpleNamespace(take_up=lambda state, optimizer: ("taken", optimizer)),
    )  # fmt: skip
    strategy = Mesh() if facts.mesh else SimpleNamespace()
    if facts.shards is not None:
        strategy.writes_shards = facts.shards
    trainer = SimpleNamespace(should_stop=True, world_size=facts.ranks, strategy=strategy, global_rank=facts.rank)
    return Alone(host, trainer), host, run, frozen


@pytest.mark.parametrize(
    ("changes", "checked", "other"),
    [
        ({}, [], True),
        ({"made": True}, [], False),
        ({"made_of": "none"}, [("checked", True)], True),
        ({"own": False}, [("checked", True)], True),
        ({"own": False, "rank": 1}, [("checked", False)], False),
        ({"own": False, "mesh": True}, [], False),
        ({"own": False, "deepspeed": True}, [], False),
        ({"in_updates": True}, [], True),
        ({"in_updates": True, "mesh": True}, [], False),
        ({"ranks": 2}, [], True),
        ({"callbacks": ["c"]}, [], True),
        ({"shards": True}, [], True),
    ],
)
def test_the_start_of_a_fit(changes, checked, other, monkeypatch):
    told = []
    module, host, run, frozen = starting(told, monkeypatch, **changes)
    module.on_fit_start()
    assert run.stops_at_start is True and module.trainer.should_stop is False
    assert told == [
        *[("waits", 9)] * (changes.get("ranks", 1) > 1), (ResumeAt.OPTIMIZER_MADE, "c"), *checked, *["other"] * other,
        *["unfrozen"] * ("callbacks" in changes), "started",
    ]  # fmt: skip
    assert host._checks_optimizer is not (changes.get("mesh", False) or changes.get("deepspeed", False))
    looks = changes.get("in_updates", False) and not changes.get("mesh", False)
    assert (run.frozen is not None and run.frozen[0] is frozen and len(run.frozen) == 1) is looks
    assert host._optimizer_made_of is None and host.optimizer == host._own_optimizer == ("taken", "optimizer")
    handler = host.callback_handler
    assert (handler.model, handler.lr_scheduler, handler.train_dataloader) == (host.model, "schedule", "loader")
    assert handler.optimizer == ("taken", "optimizer") and host._resumer.is_loading is False
    assert (
        host._fit_model_state == ("state", "wrapped", changes.get("shards", False)) and host.model_wrapped == "wrapped"
    )


def test_an_optimizer_that_cannot_be_restored_ends_the_start(monkeypatch):
    told = []
    module, host, _, _ = starting(told, monkeypatch)

    def fail(*_):
        raise CheckpointError("broken")

    host._resumer.restore = fail
    with pytest.raises(CheckpointError):
        module.on_fit_start()
    assert told == [] and host._resumer.is_loading is True


@pytest.mark.parametrize("folder", [None, "c"])
def test_a_spread_model_is_sharded_and_then_loaded(folder, monkeypatch):
    told = []

    class Mesh:
        def shard(self, model):
            told.append(("sharded", model))

    monkeypatch.setattr(fit, "HFMeshStrategy", Mesh)
    resumer = SimpleNamespace(later_weights=folder, restore=lambda *what: told.append(what))
    module = type("Own", (MeshModule,), {"__init__": Alone.__init__, "trainer": Alone.trainer})(
        SimpleNamespace(_resumer=resumer), SimpleNamespace(strategy=Mesh())
    )
    module.configure_model()
    assert told == [("sharded", "model"), *[(ResumeAt.MODEL_READY, "c")] * (folder is not None)]
    assert resumer.later_weights is None


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("one_device", TrainerModule), ("ddp", TrainerModule), ("fsdp2", MeshModule), ("tensor_parallel", MeshModule)],
)
def test_the_module_of_a_strategy(strategy, kind, monkeypatch):
    monkeypatch.setattr(TrainerModule, "__init__", lambda self, model, steps: None)
    assert type(fit.make_module(SimpleNamespace(model=None), plan(strategy=strategy))) is kind


@pytest.mark.parametrize("callbacks", [[], ["c"]])
def test_options_of_lightnings_trainer_are_passed_on(callbacks, monkeypatch):
    told = []
    monkeypatch.setattr(fit, "WindowTrainer", lambda *what, **options: told.append((what, options)))
    host = SimpleNamespace(
        _callbacks=SimpleNamespace(lightning=callbacks, loggers=lambda: ["logger"]),
        args=SimpleNamespace(_launch="launch"),
        _lightning_options={"max_time": "1", "detect_anomaly": True, "benchmark": None, "barebones": False},
    )  # fmt: skip
    fit.make_lightning_trainer(host, "plan", SimpleNamespace(arranged=["arranged"]))
    loggers = ["logger"] if callbacks else []
    assert told == [(("plan", ["arranged"], loggers, "launch"), {"detect_anomaly": True, "barebones": False})]
    assert len(host._lightning_options) == 4
