"""The update mechanics for each wrapper are chosen once a fit, and do what their names say."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lomo_optim import Lomo
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer
from hf_compat.engine.module import WindowModule
from hf_compat.engine.strategies import ForwardPrecision, UpdateMechanics
from hf_compat.engine.windows import Window, Windows
from hf_compat.errors import UnsupportedArgument
from hf_compat.optim.stepping import behaviour_of
from hf_compat.runtime.launch import Launch


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group with this process as its only rank."""
    store = distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class DeepSpeedEngine:
    """Records the engine's calls in order. The real one needs several processes to exchange gradients."""

    def __init__(self):
        self.calls = []

    def backward(self, loss, *, scale_wrt_gas=True):
        self.calls.append(("backward", scale_wrt_gas))

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append(("boundary", is_boundary))

    def get_global_grad_norm(self):
        self.calls.append("norm")
        return 3.0

    def zero_grad(self):
        self.calls.append("zero_grad")


def steps_of(make_args, wrapped, processes=2, **values):
    """A Trainer that reports several processes."""
    trainer = Trainer(toy.Classifier(), make_args(**values), train_dataset=toy.rows())
    launch = Launch(process_index=0, local_process_index=0, world_size=processes, local_world_size=processes)
    trainer.args.__dict__["_launch"] = launch
    trainer.model_wrapped = wrapped
    return trainer


def chosen(make_args, wrapped, processes=2, **values):
    steps = steps_of(make_args, wrapped, processes, **values)
    return UpdateMechanics(steps, torch.Tensor.backward, ForwardPrecision())


def count_exchange(exchanged, bucket):
    exchanged.append(bucket.index())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


ALWAYS = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def test_ddp_exchanges_at_a_windows_end(group, make_args):
    wrapped = DistributedDataParallel(toy.Classifier())
    mechanics = chosen(make_args, wrapped)
    assert mechanics.engine is None
    exchanged = []
    wrapped.register_comm_hook(exchanged, count_exchange)
    batch = torch.utils.data.default_collate(toy.rows(4))
    counts = []
    for is_last in (False, False, True, False):
        mechanics.exchange(is_last)
        wrapped(**batch)["loss"].backward()
        counts.append(len(exchanged))
    assert counts == [0, 0, 1, 1]
    assert chosen(make_args, wrapped, processes=1).exchange is None
    assert chosen(make_args, wrapped, **ALWAYS).exchange is None


def test_fsdp2_reduces_at_a_windows_end(group, make_args):
    wrapped = fully_shard(toy.Classifier())
    asked = []
    wrapped.set_requires_gradient_sync = asked.append
    mechanics = chosen(make_args, wrapped)
    assert mechanics.engine is None
    for is_last in (False, True):
        mechanics.exchange(is_last)
    assert asked == [True, False, True]  # the first one: a fit before may have left it off
    asked.clear()
    assert chosen(make_args, wrapped, **ALWAYS).exchange is None and asked == [True]


def test_the_engine_runs_backward_and_knows_the_norm(make_args):
    engine = DeepSpeedEngine()
    steps = steps_of(make_args, engine, **ALWAYS)
    steps.create_optimizer_and_scheduler(2)
    steps.lr_scheduler = None
    module = WindowModule(torch.nn.Linear(1, 1), steps)
    module.mechanics = mechanics = UpdateMechanics(steps, torch.Tensor.backward, ForwardPrecision())
    assert mechanics.engine is engine
    mechanics.exchange(False)
    mechanics.backward(torch.tensor(1.0))
    module._in_force, module._calls_before_zero_grad = (steps.optimizer, steps.lr_scheduler), False
    module.take_step = lambda: engine.calls.append("step")
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module._update(Window([{}], None, True, 1.0))
    assert module.measured["grad_norm"] == 3.0
    assert engine.calls == [("boundary", False), ("backward", False), "step", "norm", "zero_grad"]


def test_it_is_chosen_once_a_fit(make_args, monkeypatch):
    made = []

    def count(*args):
        made.append(UpdateMechanics(*args))
        return made[-1]

    monkeypatch.setattr("hf_compat.engine.module.UpdateMechanics", count)
    trainer = Trainer(toy.Classifier(), make_args(max_steps=3), train_dataset=toy.rows())
    trainer.train()
    trainer.train()
    assert [mechanics.exchange for mechanics in made] == [None] * 2  # one device makes no call a micro-batch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightnings_own_precision_and_strategy(make_args, precision, tmp_path):
    """`HFModule` in a plain `lightning.Trainer`: Lightning's plugins do not scale gradients that are clipped here."""
    args = make_args(max_steps=3, bf16=precision == "bf16-mixed", gradient_accumulation_steps=2)
    module = HFModule(toy.Classifier(), args)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, HFDataModule(args, train_dataset=toy.rows()))
    assert trainer.global_step == 3
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(("processes", "scaled", "reason"), [(2, False, "2 processes"), (1, True, "scaled")])
def test_an_optimizer_of_the_users_own_that_steps_in_the_backward_pass_is_refused(make_args, processes, scaled, reason):
    """The arguments, which are checked earlier, do not name this optimizer."""
    model = toy.Classifier()
    steps = steps_of(make_args, model, processes)
    precision = ForwardPrecision("16-mixed", torch.amp.GradScaler("cpu")) if scaled else ForwardPrecision()
    mechanics = UpdateMechanics(steps, torch.Tensor.backward, precision)
    with pytest.raises(UnsupportedArgument, match=reason):
        mechanics.begin(pl.LightningModule(), behaviour_of(Lomo(model, lr=0.1)), lambda: 0.1)


def test_several_optimizers_are_switched_together():
    trained, seen = torch.nn.Linear(1, 1), []

    class Switching(torch.optim.SGD):
        def train(self):
            seen.append("train")

        def eval(self):
            seen.append("eval")

    stepping = behaviour_of(Switching(trained.parameters(), lr=0.1), torch.optim.SGD(trained.parameters(), lr=0.1))
    stepping.attach()
    stepping.to_training()
    stepping.to_evaluation()
    stepping.detach()
    assert (seen, stepping.switches, stepping.steps_in_backward) == (["train", "eval"], True, False)


@pytest.mark.parametrize(
    ("skip", "left", "begins_after", "given"),
    [(4, None, 2, [3, 4]), (5, None, 2, [4]), (5, [2], 3, [2, 3, 4]), (4, [], 3, [3, 4])],
)
def test_ranks_that_share_sequences_go_on_within_a_batch_of_theirs(skip, left, begins_after, given):
    """A batch of the loader has a micro-batch of each rank; those that are left of one are trained first."""
    begun = []

    class Exchanged(list):
        @property
        def micro_batches(self):
            return self

    class Shared(Windows):
        def __init__(self):
            self._sharers, self.loader = 2, None
            adapter = SimpleNamespace(deepspeed_ulysses_dl_adapter=lambda batches, model: Exchanged(batches))
            self.steps = SimpleNamespace(accelerator=adapter, model_wrapped=None)

        def _start_loader(self, skip, position, after_start):
            begun.append(skip)
            return iter([])

    shared = Shared()
    passes = shared._begin(
        skip, None if left is None else SimpleNamespace(shared=left and [torch.tensor(one) for one in left])
    )
    shared._shared += [torch.tensor(3), torch.tensor(4)]
    assert begun == [begins_after] and [int(one) for one in passes] == given
