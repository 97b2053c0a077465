"""Signals that nobody asked to be handled do what they do in any script: in training, evaluation and prediction."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import toy
from helpers.parity.compare import same
from helpers.signalled import ended, forked, wait_for
from hf_compat import Trainer, TrainerCallback, get_last_checkpoint, set_seed
from hf_compat.errors import InertArgumentWarning

METHODS = ["train", "evaluate", "predict"]


class SlowRows:
    """Rows of which each takes a second, from the third batch on; a file says that they are being read."""

    def __init__(self, mark: Path):
        self.rows, self.mark = toy.rows(40), mark

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index >= 8:
            self.mark.touch()
            time.sleep(1.0)
        return self.rows[index]


def call(trainer: Trainer, method: str, rows: object) -> object:
    return trainer.predict(rows) if method == "predict" else getattr(trainer, method)()


SIGNALS = [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 77)]
# an interrupted loader waits four seconds for its worker
WAITS = [(signal.SIGINT, 77, method, 1) for method in METHODS[1:]]
CASES = [(*end, method, workers) for end in SIGNALS for method in METHODS for workers in (0, 1)]


@pytest.mark.parametrize(
    ("number", "status", "method", "workers"),
    [pytest.param(*case, marks=[pytest.mark.matrix] * (case in WAITS)) for case in CASES],
)
def test_a_signal_is_obeyed_at_once(make_args, tmp_path, method, number, status, workers):
    mark = tmp_path / "reading"
    rows = SlowRows(mark)
    args = make_args(per_device_eval_batch_size=4, dataloader_num_workers=workers)

    def body():
        call(Trainer(toy.Classifier(), args, train_dataset=rows, eval_dataset=rows), method, rows)

    pid = forked(body)
    wait_for(mark)
    time.sleep(0.05)
    os.kill(pid, number)
    assert ended(pid, within=8.0 if workers and number == signal.SIGINT else 2.0) == status


class At(TrainerCallback):
    """Call a function once, at an event."""

    def __init__(self, event: str, function: Callable[[], object]):
        self.function = function
        setattr(self, event, self.once)

    def on_init_end(self, args, state, control, **kwargs): ...

    def once(self, args, state, control, **kwargs):
        function, self.function = self.function, lambda: None
        function()


EVENTS = {"train": "on_step_end", "evaluate": "on_prediction_step", "predict": "on_prediction_step"}


@pytest.mark.parametrize("method", METHODS)
def test_handlers_are_the_users_own_within_and_after(make_args, method):
    seen = []
    rows = toy.rows(16)
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in watched]
    look = At(EVENTS[method], lambda: seen.append([signal.getsignal(number) for number in watched]))
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=rows, eval_dataset=rows, callbacks=[look])
    call(trainer, method, rows)
    assert seen == [before] and [signal.getsignal(number) for number in watched] == before


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_handler_that_a_callback_installs_stays(make_args, method, jit):
    def handler(number, frame): ...

    def interrupting(number, frame):
        raise KeyboardInterrupt

    def install():
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, interrupting)

    rows = toy.rows(16)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for interrupt in (False, True):
            at = At(EVENTS[method], lambda: [install(), interrupt and signal.raise_signal(signal.SIGINT)])
            trainer = Trainer(
                toy.Classifier(), make_args(enable_jit_checkpoint=jit), train_dataset=rows, eval_dataset=rows,
                callbacks=[at],
            )  # fmt: skip
            if interrupt:
                with pytest.raises(KeyboardInterrupt):
                    call(trainer, method, rows)
            else:
                call(trainer, method, rows)
            assert signal.getsignal(signal.SIGTERM) is handler and signal.getsignal(signal.SIGINT) is interrupting
            for number, old in before.items():
                signal.signal(number, old)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@pytest.mark.parametrize("method", METHODS)
def test_after_ctrl_c_the_same_trainer_goes_on(make_args, method):
    rows = toy.rows(16)
    set_seed(3)
    at = At(EVENTS[method], lambda: signal.raise_signal(signal.SIGINT))
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=rows, eval_dataset=rows, callbacks=[at])
    with pytest.raises(KeyboardInterrupt) as caught:
        call(trainer, method, rows)
    assert caught.value.__suppress_context__
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trainer.train().global_step == 8 and "eval_loss" in trainer.evaluate()


def in_thread(body: Callable[[], None]) -> BaseException | None:
    raised: list[BaseException] = []

    def run():
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_in_another_thread_is_itself(make_args, method):
    rows = toy.rows(16)

    def interrupt():
        raise KeyboardInterrupt

    at = At(EVENTS[method], interrupt)
    trainer = Trainer(toy.Classifier(), make_args(), train_dataset=rows, eval_dataset=rows, callbacks=[at])
    assert isinstance(in_thread(lambda: call(trainer, method, rows)), KeyboardInterrupt)
    assert in_thread(lambda: call(trainer, method, rows)) is None


def test_checkpoints_on_signals_need_the_main_thread(make_args):
    trainer = Trainer(toy.Classifier(), make_args(enable_jit_checkpoint=True), train_dataset=toy.rows(16))
    with pytest.warns(InertArgumentWarning, match="enable_jit_checkpoint.*main thread"):
        assert in_thread(trainer.train) is None


def test_a_handler_of_the_users_own_comes_after_the_checkpoint(make_args, tmp_path):
    """It returns, so that the script goes on behind `train()`."""
    seen = []
    out = tmp_path / "out"
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append((number, get_last_checkpoint(out))))
    try:
        at = At("on_substep_end", lambda: signal.raise_signal(signal.SIGTERM))
        args = make_args(enable_jit_checkpoint=True, gradient_accumulation_steps=2)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows(40), callbacks=[at])
        assert trainer.train().global_step == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [(signal.SIGTERM, str(out / "checkpoint-1"))]


@pytest.mark.parametrize("event", ["on_epoch_end", "on_evaluate"])
def test_a_signal_after_the_last_update_is_obeyed(make_args, tmp_path, event):
    at = At(event, lambda: signal.raise_signal(signal.SIGTERM))
    args = make_args(enable_jit_checkpoint=True, num_train_epochs=1, eval_strategy="epoch")
    trainer = Trainer(
        toy.Classifier(), args, train_dataset=toy.rows(8), eval_dataset=toy.rows(8), callbacks=[at]
    )  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert caught.value.code == 128 + signal.SIGTERM
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")


def test_an_ignored_ctrl_c_stays_ignored(make_args):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        at = At("on_step_end", lambda: signal.raise_signal(signal.SIGINT))
        trainer = Trainer(
            toy.Classifier(), make_args(enable_jit_checkpoint=True), train_dataset=toy.rows(16), callbacks=[at]
        )
        assert trainer.train().global_step == 8
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_sealed_checkpoint_survives_sigterm_in_the_middle_of_the_next(make_args, tmp_path):
    mark = tmp_path / "writing"

    def body():
        from hf_compat.checkpoint import manifest

        seal = manifest.seal

        def slow(folder, *rest):
            if "checkpoint-3" in str(folder):
                mark.touch()
                time.sleep(30)
            seal(folder, *rest)

        manifest.seal = slow
        run(make_args(save_strategy="steps", save_steps=1, async_save=True))

    def run(args, resume=False):
        set_seed(3)
        trainer = Trainer(toy.Classifier(), args, train_dataset=toy.rows())
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    pid = forked(body)
    wait_for(mark)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid, within=2.0) == -signal.SIGTERM
    assert get_last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    resumed = run(make_args(), resume=True)
    assert same(resumed, run(make_args(output_dir=str(tmp_path / "whole"))))


def test_a_killed_worker_leaves_the_handlers_as_they_were(make_args):
    class Deadly:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGKILL)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    trainer = Trainer(
        toy.Classifier(), make_args(dataloader_num_workers=1, enable_jit_checkpoint=True), train_dataset=Deadly()
    )
    with pytest.raises(RuntimeError, match="worker"):
        trainer.train()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
