"""`debug="underflow_overflow"`: what transformers prints, an error at the same call, and no hook left behind."""

import re

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Upstream

import hf_compat
from helpers import toy
from hf_compat import HFDataModule, HFModule, Trainer
from hf_compat.engine.model_hooks import watch_for_overflow
from hf_compat.errors import NonFiniteNumber, UnsupportedArgument


def test_what_upstream_cannot_print_is_shown(capsys):
    class Odd(nn.Module):
        def forward(self, mask, empty):
            return torch.tensor(float("inf"))

    model = Odd()
    theirs = Odd()
    Upstream(theirs)
    with pytest.raises(RuntimeError):
        theirs(torch.tensor([True, False]), torch.empty(0))
    watch = watch_for_overflow(model)
    with pytest.raises(NonFiniteNumber, match=r"inf/nan detected(.|\n)*Hint"):
        model(torch.tensor([True, False]), torch.empty(0))
    shown = capsys.readouterr().out
    assert "0.00e+00 1.00e+00 input[0]" in shown and re.search(r"empty input\[1\]", shown)
    watch.remove()
    model(torch.tensor([True]), torch.empty(0))


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


class Blows(toy.Classifier):
    """Gives infinite logits from a call on."""

    calls, last = 0, 3

    def forward(self, x, labels=None):
        self.calls += 1
        out = super().forward(x, labels)
        out["logits"] = out["logits"] * (float("inf") if self.calls > self.last else 1.0)
        return tuple(out.values())


def blown(api, folder, capsys):
    torch.manual_seed(0)
    args = api.TrainingArguments(
        str(folder), debug="underflow_overflow", use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=100
    )
    trainer = api.Trainer(Blows(), args, train_dataset=toy.rows(64))
    with pytest.raises(ValueError, match="inf/nan detected"):
        trainer.train()
    printed = capsys.readouterr().out.splitlines()
    return trainer, "\n".join(line for line in printed if "real_accelerator.py" not in line)  # DeepSpeed's own


def test_a_training_stops_where_transformers_does_and_prints_the_same(tmp_path, capsys):
    theirs, expected = blown(transformers, tmp_path / "theirs", capsys)
    ours, shown = blown(hf_compat, tmp_path / "ours", capsys)
    assert shown == expected and "Detected inf/nan during batch_number=4" in shown
    assert ours.state.global_step == theirs.state.global_step == 3
    assert hooks_of(ours.model) == 0


def test_a_training_without_overflow_leaves_no_hook_and_changes_no_number(make_args, tmp_path):
    found = []
    for debug in ("underflow_overflow", ""):
        args = make_args(output_dir=str(tmp_path), debug=debug, eval_strategy="epoch", num_train_epochs=1)
        torch.manual_seed(0)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(20), eval_dataset=toy.rows(9))
        seen = []
        trainer.add_callback(_HooksAtSteps(seen))
        trainer.train()
        trainer.train()  # hooks are put on anew, once
        found.append([trainer.state.log_history[-1]["train_loss"], trainer.model.state_dict()])
        assert set(seen) == {0 if not debug else sum(1 for _ in trainer.model.modules())}
        assert hooks_of(trainer.model) == 0
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


class _HooksAtSteps(hf_compat.TrainerCallback):
    def __init__(self, seen: list) -> None:
        self.seen = seen

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(hooks_of(model))


def test_a_native_fit_stops_too_and_the_next_one_puts_no_second_hook(make_args, tmp_path, lightning, capsys):
    args = hf_compat.TrainingArguments(str(tmp_path), debug="underflow_overflow", use_cpu=True, report_to="none")
    module = HFModule(Blows(), args)
    assert isinstance(module, LightningModule)
    data = HFDataModule(args, train_dataset=toy.rows(40))
    with pytest.raises(NonFiniteNumber, match="inf/nan detected"):
        lightning().fit(module, data)
    assert "Detected inf/nan" in capsys.readouterr().out
    module.model.last = 10**9
    lightning().fit(module, data)
    assert hooks_of(module.model) == 0


def test_a_tpus_metrics_are_refused_with_the_reason(make_args, tmp_path):
    with pytest.raises(UnsupportedArgument, match=r"debug=.*TPU"):
        Trainer(toy.Classifier(), make_args(output_dir=str(tmp_path), debug="tpu_metrics_debug"))
