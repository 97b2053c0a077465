"""`trainer.accelerator` behaves like the Accelerator of transformers' Trainer."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader

import hf_compat
from helpers import toy
from hf_compat import Trainer
from hf_compat.data.order import RankSlice
from hf_compat.errors import MissingPackage
from hf_compat.trainer_methods.accelerate_facade import processes

# What Accelerate alone is about: FP8, its handlers, its own profiler, devices that share a tensor.
NOT_HERE = {
    "ao_recipe_handler", "autocast_handler", "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank",
    "ddp_handler", "fp8_recipe_handler", "init_handler", "lomo_backward",
    "maybe_context_parallel", "msamp_recipe_handler", "pipeline_parallel_rank", "profile", "profile_handler",
    "rng_types", "scaler_handler", "te_recipe_handler", "tensor_parallel_rank",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nobody_accumulates():
    """Clear the state that all Accelerators of a process share, which an earlier transformers run may have set."""
    GradientState._reset_state()


def both(tmp_path, **values):
    values = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **values}
    for api in (transformers, hf_compat):
        yield api.Trainer(toy.Classifier(), api.TrainingArguments(**values), train_dataset=toy.rows(8)).accelerator


def public(candidate):
    return {name for name in dir(candidate) if not name.startswith("_")}


def test_what_is_not_here_is_known(tmp_path):
    theirs, ours = both(tmp_path)
    assert {name for name in public(theirs) if not hasattr(ours, name)} == NOT_HERE
    for name in NOT_HERE:
        with pytest.raises(AttributeError, match=r"(?s)The Accelerator here has no .*Hint: "):
            getattr(ours, name)


@pytest.mark.parametrize(
    "values", [{}, {"gradient_accumulation_steps": 4}, {"accelerator_config": {"even_batches": False}}, {"bf16": True}]
)
def test_values_are_upstreams(tmp_path, values):
    theirs, ours = both(tmp_path, **values)
    differing = {
        name: (there, here)
        for name in public(theirs) & public(ours)
        if isinstance(there := getattr(theirs, name), (bool, int, float, str, type(None), torch.device))
        and there != (here := getattr(ours, name))
    }
    assert differing == {}


def test_its_states_are_upstreams(tmp_path):
    theirs, ours = both(tmp_path)
    for mine, other in ((ours.state, theirs.state), (ours.gradient_state, theirs.gradient_state)):
        lacking = {name for name in public(other) if not hasattr(mine, name)}
        assert lacking <= {"get_deepspeed_plugin", "select_deepspeed_plugin", "dataloader_references"}
        plain = (bool, int, str, type(None), torch.device)
        names = [name for name in public(other) - lacking if isinstance(getattr(other, name), plain)]
        assert {name: getattr(mine, name) for name in names} == {name: getattr(other, name) for name in names}


def test_the_state_in_the_arguments_is_real(make_args):
    args = make_args()
    assert args.distributed_state.num_processes == 1 and args.distributed_state.is_main_process
    assert args.distributed_state.distributed_type == DistributedType.NO
    args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    assert args.distributed_state.distributed_type == "MULTI_GPU" and args.deepspeed_plugin is None
    assert pickle.loads(pickle.dumps(args)).distributed_state.distributed_type == "NO"


def test_decorators_printing_and_order(make_args, capsys):
    accelerator = Trainer(toy.Classifier(), make_args()).accelerator
    done = []
    for decorate in (accelerator.on_main_process, accelerator.on_local_main_process, accelerator.on_last_process):
        decorate(lambda: done.append(1))()
    assert accelerator.on_process(lambda: 7, process_index=0)() == 7
    assert accelerator.on_process(lambda: 7, process_index=1)() == 7, "one process runs everything, as in Accelerate"
    assert done == [1, 1, 1]
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.print("hello", end="!")
    assert capsys.readouterr().out == "hello!"
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        assert mine == [1, 2, 3]


def test_what_is_prepared_and_what_is_trained(make_args):
    seen = []

    class Own(Trainer):
        def training_step(self, *args, **kwargs):
            accelerator = self.accelerator
            seen.append((accelerator._models == [self.model], accelerator._optimizers == [self.optimizer]))
            with accelerator.accumulate(self.model):
                return super().training_step(*args, **kwargs)

    trainer = Own(toy.Classifier(), make_args(max_steps=2), train_dataset=toy.rows(16))
    reference, loader = nn.Linear(2, 2), DataLoader(toy.rows(8), batch_size=2)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, made, same = trainer.accelerator.prepare(reference, loader, optimizer)
    assert model is reference and same.optimizer is optimizer and len(made) == 4
    assert trainer.accelerator.prepare(same) is same and trainer.accelerator.prepare(made) is made
    trainer.train()
    assert seen == [(True, True)] * 2 and trainer.accelerator._models == [trainer.model]
    assert trainer.accelerator.free_memory(model) == (None,) and trainer.accelerator._models == []
    assert trainer.accelerator.unwrap_model(nn.DataParallel(reference)) is reference


def test_gradients_are_clipped_by_value(make_args):
    accelerator = Trainer(toy.Classifier(), make_args()).accelerator
    weight = nn.Parameter(torch.ones(3))
    (weight * torch.tensor([5.0, -7.0, 0.1])).sum().backward()
    accelerator.clip_grad_value_([weight], 0.5)
    assert weight.grad.tolist() == pytest.approx([0.5, -0.5, 0.1])


def test_logging_without_a_tracker_says_where_logs_go(make_args):
    accelerator = Trainer(toy.Classifier(), make_args()).accelerator
    with pytest.warns(hf_compat.errors.HfCompatWarning, match=r"trainer\.log"):
        accelerator.log({"a": 1.0})
    accelerator.init_trackers("project", config={"a": 1})
    assert type(accelerator.get_tracker("wandb")) is GeneralTracker  # Accelerate's blank one, as under transformers
    accelerator.end_training()


@pytest.mark.parametrize("name", ["gather", "gather_for_metrics", "pad_across_processes"])
def test_what_a_script_puts_in_place_gathers_an_evaluation(tmp_path, name):
    """Upstream calls it equally often in each of two evaluations, even in one process with nothing to gather."""

    def calls(api):
        trainer = api.Trainer(
            toy.Classifier(),
            api.TrainingArguments(str(tmp_path / api.__name__), report_to="none", disable_tqdm=True, use_cpu=True),
            eval_dataset=toy.rows(10),
            compute_metrics=lambda p: {"samples": len(p.predictions)},
        )
        own, asked = getattr(trainer.accelerator, name), []
        setattr(trainer.accelerator, name, lambda *args, **kwargs: (asked.append(name), own(*args, **kwargs))[1])
        return [(trainer.evaluate()["eval_samples"], len(asked)) for _ in range(2)]

    assert calls(hf_compat) == calls(transformers)


def test_a_schedule_takes_accelerates_wrapper_and_without_it_that_is_said(tmp_path, monkeypatch):
    _, ours = both(tmp_path)
    optimizer = ours.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    prepared = ours.prepare(schedule)
    assert type(prepared) is AcceleratedScheduler and prepared.optimizers == [optimizer]
    assert ours.prepare(prepared) is prepared
    monkeypatch.setitem(sys.modules, "accelerate.scheduler", None)
    with pytest.raises(MissingPackage, match="a schedule in `accelerator"):
        ours.prepare(schedule)


@pytest.mark.parametrize(
    ("data", "as_objects", "ranks", "sharing", "is_last", "remainder", "expected"),
    [
        (torch.arange(3), False, 1, 1, True, 2, [0, 1]),
        (torch.arange(3), False, 1, 1, False, 2, [0, 1, 2]),
        (torch.arange(3), False, 1, 1, True, 0, [0, 1, 2]),
        (torch.arange(3), False, 1, 1, True, -1, [0, 1, 2]),
        (torch.arange(3), False, 1, 1, True, 1, [0]),
        (torch.arange(2), False, 2, 1, True, 3, [0, 1, 10]),
        (torch.arange(2), False, 2, 2, True, 1, [0]),
        (torch.arange(2), True, 1, 1, True, 1, [0]),
        ([1, 2], False, 1, 1, True, 1, [1]),
        ([1, 2], False, 1, 1, False, 1, [1, 2]),
        ([1, 2], True, 2, 1, True, 3, [1, 2, 1]),
        ([1, 2], True, 2, 2, False, 3, [1, 2]),
        ({"a": "b"}, True, 1, 1, True, 1, {"a": "b"}),
        ({}, True, 1, 1, True, 1, {}),
        ("ab", True, 1, 1, True, 1, "a"),
        (3, True, 1, 1, True, 1, 3),
    ],
)
def test_what_all_ranks_give_is_cut_at_the_end(
    data, as_objects, ranks, sharing, is_last, remainder, expected, tmp_path, monkeypatch
):
    ours = list(both(tmp_path))[1]
    ours.rank_slice = RankSlice(world_size=ranks // sharing, sharing=sharing)
    ours.gradient_state = SimpleNamespace(end_of_dataloader=is_last, remainder=remainder)
    monkeypatch.setattr(processes, "is_distributed", lambda: ranks > 1)
    monkeypatch.setattr(processes, "gather", lambda rows: torch.cat([rows + 10 * rank for rank in range(ranks)]))
    monkeypatch.setattr(processes, "gather_objects", lambda one: [one] * ranks)
    found = ours.gather_for_metrics(data, as_objects)
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected
