"""`LossLog`: its sums, the filter, the entries of a log, and its state in a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import hf_compat
from helpers import toy
from hf_compat.errors import LossError
from hf_compat.training_run.loss_log import LossLog, raise_for_bad_loss

NAN, INF = float("nan"), float("inf")


def loss_log(first_update=0, filter_nonfinite=True):
    return LossLog("cpu", first_update, filter_nonfinite)


def run_updates(log, updates, first=0):
    """Add updates, each a list of its micro-batches' losses. Return the number of updates."""
    for done, losses in enumerate(updates, start=first):
        for loss in losses:
            log.add(torch.tensor(loss), done)
        log.end_update()
    return first + len(updates)


def take(log, updates_done, grad_norm=None, learning_rate=None, **options):
    return log.take(updates_done, grad_norm, learning_rate, lambda tensor: tensor, **options)


def test_a_log_is_the_mean_since_the_last_one_and_begins_the_next():
    log = loss_log()
    done = run_updates(log, [[1.0, 2.0], [3.0, 4.0]])
    assert take(log, done) == {"loss": 5.0}
    done = run_updates(log, [[7.0]], done)
    assert take(log, done) == {"loss": 7.0}
    assert (log.total, log.last_logged) == (17.0, 3)


def test_the_entries_stand_in_the_order_of_the_log():
    log = loss_log()
    log.averages.add("aux", 2.0)
    done = run_updates(log, [[NAN], [1.0]])
    entries = take(log, done, torch.tensor(0.5), 1e-3)
    assert list(entries) == ["loss", "grad_norm", "learning_rate", "nonfinite_steps", "aux"]
    assert entries["grad_norm"] == 0.5 and isinstance(entries["grad_norm"], float)
    assert entries["aux"] == 2.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_loss_that_is_not_finite_counts_as_the_mean_so_far(value, on_device, monkeypatch):
    if on_device:  # the choice that waits for no device gives the same numbers
        monkeypatch.setattr(LossLog, "_READ_AT_ONCE", ())
    log = loss_log()
    done = run_updates(log, [[4.0], [value], [1.0]])
    # upstream: the sum so far over the updates since the last log, the one under way counted
    assert take(log, done)["loss"] == pytest.approx((4.0 + 4.0 / 2 + 1.0) / 3)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_update_counts_once_however_many_of_its_losses_are_hidden(on_device, monkeypatch):
    if on_device:
        monkeypatch.setattr(LossLog, "_READ_AT_ONCE", ())
    log = loss_log()
    done = run_updates(log, [[NAN, INF], [1.0, 1.0], [1.0, NAN]])
    assert take(log, done)["nonfinite_steps"] == 2
    done = run_updates(log, [[1.0]], done)
    assert take(log, done)["nonfinite_steps"] == 2  # of the run, not since the last log


def test_losses_of_many_updates_that_nobody_reads_are_counted(monkeypatch):
    monkeypatch.setattr(LossLog, "_READ_AT_ONCE", ())
    log = loss_log()
    done = run_updates(log, [[NAN if number in (3, 300, 599) else 1.0] for number in range(600)])
    assert log.state_dict()["nonfinite_steps"] == 3 == log.nonfinite_updates
    assert take(log, done)["nonfinite_steps"] == 3


def test_without_the_filter_the_log_says_what_was():
    log = loss_log(filter_nonfinite=False)
    done = run_updates(log, [[1.0], [NAN]])
    entries = take(log, done)
    assert entries["loss"] != entries["loss"] and list(entries) == ["loss"]


def test_the_sum_is_one_tensor_which_is_added_to_in_place():
    log = loss_log()
    held = log.since_last_log
    done = run_updates(log, [[1.5]])
    assert held.item() == 1.5
    take(log, done)
    assert held is log.since_last_log and held.item() == 0.0


def test_a_subclass_may_log_a_sum_of_its_own():
    log = loss_log()
    done = run_updates(log, [[1.0], [1.0]])
    own = torch.tensor(8.0)
    assert take(log, done, summed=own) == {"loss": 4.0}
    assert own.item() == 0.0 and log.since_last_log.item() == 2.0 and log.total == 8.0


def test_losses_of_all_processes_are_averaged():
    log = loss_log()
    done = run_updates(log, [[1.0]])
    entries = log.take(done, None, None, lambda own: torch.stack([own, torch.tensor(3.0)]))
    assert entries == {"loss": 2.0} and log.total == 2.0


def test_the_mean_of_the_run_counts_what_no_log_has_said():
    log = loss_log(first_update=10)
    done = run_updates(log, [[1.0], [2.0]], 10)
    take(log, done)
    done = run_updates(log, [[6.0]], done)
    assert log.mean(done) == 3.0
    assert log.mean(done) == 3.0 and log.total == 9.0


def test_the_mean_of_a_run_that_trained_nothing_is_zero():
    assert loss_log(first_update=4).mean(4) == 0.0


def test_a_log_goes_on_where_its_state_stood():
    updates = [[0.1, 0.7], [NAN], [0.3], [INF, 0.2], [0.9]]
    whole, before, after = loss_log(2), loss_log(2), loss_log(0)
    for log in (whole, before):
        done = run_updates(log, updates[:1], 2)
        take(log, done)
        done = run_updates(log, updates[1:3], done)
        log.averages.add("aux", 0.25, weight=3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for log in (whole, after):
        log.averages.add("aux", 0.5)
        run_updates(log, updates[3:], done)
    assert take(whole, 7) == take(after, 7)
    assert whole.mean(7) == after.mean(7)
    assert whole.state_dict() == after.state_dict()


def test_a_run_state_of_the_first_versions_is_read():
    log = loss_log()
    log.load_state_dict({"tr_loss": torch.tensor(1.5), "total_loss": 2.0, "last_logged": 3, "first_update": 1})
    assert (log.since_last_log.item(), log.total, log.last_logged, log.first_update) == (1.5, 2.0, 3, 1)
    assert log.nonfinite_updates == 0


def test_a_callback_may_turn_the_filter_off_during_a_run(tmp_path):
    def losses(package, folder):
        class TurnsOff(package.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                args.logging_nan_inf_filter = state.global_step < 4

        args = package.TrainingArguments(
            str(folder), max_steps=6, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, seed=1,
            save_strategy="no", per_device_train_batch_size=4,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = package.Trainer(toy.NanAt((3, 5)), args, train_dataset=toy.rows(), callbacks=[TurnsOff()])
        trainer.train()
        return [str(log["loss"]) for log in trainer.state.log_history if "loss" in log]

    found = losses(hf_compat, tmp_path / "ours")
    assert found == losses(transformers, tmp_path / "theirs")
    assert "nan" not in found[:4] and found[4] == "nan"


@pytest.mark.parametrize(
    ("loss", "found", "hint"),
    [
        (None, "None, not a tensor", "end it with `return loss.detach()`."),
        (0.5, "0.5, not a tensor", "`return loss.detach()`, without `.item()`."),
        ((torch.zeros(()), 1), "not a tensor", "`return loss.detach()` alone."),
        (torch.zeros(2, 1), "a tensor of shape (2, 1), not a scalar", "`loss.mean().detach()`."),
        (
            torch.zeros((), device="meta"),
            "a tensor on meta, and the run is on cpu",
            "end it with `return loss.detach()`.",
        ),
    ],
)
def test_a_loss_that_cannot_be_added_is_explained(loss, found, hint):
    error = RuntimeError("torch's")
    with pytest.raises(LossError) as raised:
        raise_for_bad_loss(loss, torch.device("cpu"), error)
    fact, _, way_out = str(raised.value).partition("\n\nHint: ")
    assert found in fact and way_out.endswith(hint) and raised.value.__cause__ is error
    assert raise_for_bad_loss(torch.zeros(()), torch.device("cpu"), error) is None
