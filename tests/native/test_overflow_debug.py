"""`debug="underflow_overflow"`: what transformers prints, an error at the same call, and no hook left behind."""

import re

import pytest
import torch
import toy
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Upstream

import hf_compat
from hf_compat import HFDataModule, HFModule, Trainer
from hf_compat.engine.model_hooks import DebugUnderflowOverflow as Ours
from hf_compat.errors import NonFiniteNumber, UnsupportedArgument


class Deep(nn.Module):
    """Modules within modules, tuples of tuples, None, a shared module, integers; the output explodes at a call."""

    def __init__(self, explodes_at: int, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
        self.lstm = nn.LSTM(4, 4)
        self.again = nn.ModuleDict({"shared": self.lstm, "last": nn.Linear(4, 2)})
        self.calls, self.explodes_at, self.value = 0, explodes_at, value

    def forward(self, ids, mask=None):
        hidden, state = self.again["shared"](self.first(ids))
        self.calls += 1
        if self.calls > self.explodes_at:
            hidden = hidden * self.value
        return self.again["last"](hidden), state, None, {"ids": ids}


CASES = {
    "infinity": ({}, 2, float("inf")),
    "nan": ({}, 1, float("nan")),
    "few frames": ({"max_frames_to_save": 3}, 2, float("inf")),
    "traced": ({"trace_batch_nums": [1, 2]}, 9, 1.0),
    "traced over an overflow": ({"trace_batch_nums": [1]}, 1, float("inf")),
    "stopped": ({"trace_batch_nums": [1], "abort_after_batch_num": 1}, 9, 1.0),
}


def watched(debug, options, explodes_at, value) -> str | None:
    model = Deep(explodes_at, value)
    debug(model, **options)
    try:
        for _ in range(4):
            model(torch.arange(6).reshape(2, 3), None)
    except ValueError as error:
        return str(error).split(",")[0].split(" after")[0].split(" in the")[0]
    return None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_printed_and_where_it_stops_is_transformers(case, capsys):
    errors, texts = zip(*((watched(debug, *case), capsys.readouterr().out) for debug in (Upstream, Ours)), strict=True)
    assert texts[0] == texts[1] and (errors[0] is None or "abs min" in texts[0] or "has" in texts[0])
    assert (errors[0] is None) == (errors[1] is None)


def test_what_upstream_cannot_print_is_shown(capsys):
    Ours(nn.Identity(), trace_batch_nums=[0, 1, 2]).model(torch.tensor([True, False]))
    watch = Ours(nn.Identity(), trace_batch_nums=[0])
    watch.model(torch.empty(0))
    shown = capsys.readouterr().out
    assert "0.00e+00 1.00e+00 input[0]" in shown and re.search(r"empty output", shown)


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
