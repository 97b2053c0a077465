"""Signals about children wait while processes are forked: an error in a fork's hooks is lost, and a lock kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from helpers import toy
from hf_compat.data.loader import PreparedDataLoader
from hf_compat.runtime.signals import dead_among, holding_child_signals


@pytest.fixture
def handled():
    """Numbers of the signals that a handler has seen; it raises."""
    seen = []

    def handle(number, frame):
        seen.append(number)
        raise RuntimeError("a worker has died")

    before = signal.signal(signal.SIGCHLD, handle)
    yield seen
    signal.signal(signal.SIGCHLD, before)


def test_a_signal_waits_and_is_delivered(handled):
    with holding_child_signals() as deliver:
        os.kill(os.getpid(), signal.SIGCHLD)
        time.sleep(0.01)
        assert handled == []
    with pytest.raises(RuntimeError, match="a worker has died"):
        deliver()
    deliver()
    assert handled == [signal.SIGCHLD]
    with pytest.raises(RuntimeError, match="a worker has died"):
        os.kill(os.getpid(), signal.SIGCHLD)


def test_in_another_thread_or_system_nothing_waits(handled, monkeypatch):
    done, before = [], signal.getsignal(signal.SIGCHLD)

    def hold():
        with holding_child_signals() as deliver:
            done.append(signal.getsignal(signal.SIGCHLD))
        deliver()

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    monkeypatch.setattr("hf_compat.runtime.signals.SIGCHLD", None)
    hold()
    assert done == [before] * 2 and handled == []


def test_a_handler_that_is_set_meanwhile_stays(handled):
    before = signal.getsignal(signal.SIGCHLD)
    calls = []
    with holding_child_signals() as deliver:
        inner = signal.getsignal(signal.SIGCHLD)

        def chained(number, frame):  # as torch sets its own
            calls.append(number)
            inner(number, frame)

        signal.signal(signal.SIGCHLD, chained)
        os.kill(os.getpid(), signal.SIGCHLD)
    assert signal.getsignal(signal.SIGCHLD) is chained and calls == [signal.SIGCHLD] and handled == []
    with pytest.raises(RuntimeError):
        deliver()
    with pytest.raises(RuntimeError):
        os.kill(os.getpid(), signal.SIGCHLD)
    assert handled == [signal.SIGCHLD] * 2 and before is not chained


def test_another_thread_than_the_main_one_leaves_handlers_alone(handled):
    found = []

    def look():
        before = signal.getsignal(signal.SIGCHLD)
        with holding_child_signals() as deliver:
            found.append(signal.getsignal(signal.SIGCHLD) is before)
        deliver()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True]


def test_the_workers_of_a_loader_are_started_before_a_death_is_told_of(handled, monkeypatch):
    """A worker that dies while the next one is forked: the handler once ran, and raised, in the hooks of the fork."""
    start, started = multiprocessing.process.BaseProcess.start, []
    tell = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, lambda *parts: handled or tell(*parts))  # later ends are no news

    def start_beside_a_death(process):
        start(process)
        os.kill(os.getpid(), signal.SIGCHLD)
        started.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_beside_a_death)
    with pytest.raises(RuntimeError, match="a worker has died"):
        next(iter(PreparedDataLoader(toy.rows(64), batch_size=2, num_workers=2)))
    assert len(started) == 2
    assert not any(process.is_alive() for process in started)


def test_dead_children_are_found():
    fork = multiprocessing.get_context("fork")
    sleeping, ending = fork.Process(target=time.sleep, args=(60,)), fork.Process(target=time.sleep, args=(0.2,))
    sleeping.start(), ending.start()
    try:
        assert dead_among([sleeping, ending]) == [ending] and not ending.is_alive()
    finally:
        sleeping.kill()
        sleeping.join()
    assert dead_among([]) == []


class Lost:
    """What torch's iterator is when a worker has died with a batch under way."""

    def __init__(self, worker, text):
        self._workers, self.text = [worker], text

    def __next__(self):
        raise FileNotFoundError(self.text)


@pytest.mark.parametrize(
    ("seconds", "text", "kind", "message"),
    [
        (0.3, "no such file", RuntimeError, r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"),
        (60, "Caught FileNotFoundError in DataLoader worker process 0", FileNotFoundError, "Caught"),
    ],
    ids=["of a dead worker", "of the user's"],
)
def test_a_lost_connection_is_a_dead_worker(seconds, text, kind, message):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))
    worker.start()
    loader = PreparedDataLoader(toy.rows(8), batch_size=2, num_workers=1)
    lost = Lost(worker, text)
    try:
        with pytest.raises(kind, match=message):
            loader._reader(lost)()
    finally:
        worker.kill()
        worker.join()
