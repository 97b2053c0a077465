"""Writing beside training: one write at a time, its error at the next call."""

import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from hf_compat.runtime import threads
from hf_compat.runtime.threads import BackgroundWriter, Helpers


def test_writes_follow_one_another():
    writer, done, go = BackgroundWriter(), [], threading.Event()

    def first():
        go.wait(60)
        done.append(1)

    writer.submit(first)
    writer.wait(only_if_ended=True)
    assert done == []
    go.set()
    writer.submit(lambda: done.append(2))
    writer.wait()
    assert done == [1, 2]


def test_an_error_is_raised_once_at_the_next_call():
    writer = BackgroundWriter()
    writer.submit(lambda: os.mkdir("/no/such/folder/inside"))
    with pytest.raises(FileNotFoundError):
        writer.submit(lambda: None)
    writer.wait()
    writer.wait(only_if_ended=True)


def test_as_many_helpers_work_at_once_as_were_asked_for():
    working, most, go = [], [], threading.Event()
    two = threading.Semaphore(0)

    def work():
        working.append(None)
        most.append(len(working))
        two.release()
        go.wait(60)
        working.pop()

    with Helpers(2) as helpers:
        tasks = [helpers.submit(work) for _ in range(5)]
        assert two.acquire(timeout=60) and two.acquire(timeout=60)
        assert not two.acquire(timeout=0.2), "a third one works"
        go.set()
        for task in tasks:
            task.result(60)
    assert max(most) == 2 and len(most) == 5


class Interrupted(Future):
    """A task whose wait Ctrl-C interrupts once."""

    times = 0

    def cancel(self):
        self.times += 1
        if self.times == 1:
            raise KeyboardInterrupt
        return super().cancel()


def test_the_end_cancels_what_has_not_begun_and_waits_for_the_rest(caplog):
    waiting, failed, working, go = Future(), Future(), Future(), threading.Event()
    failed.set_exception(OSError("full"))
    assert working.set_running_or_notify_cancel()
    threading.Timer(0.05, lambda: (working.set_result(1), go.set())).start()
    threads.end([waiting, failed, working])
    assert waiting.cancelled() and go.wait(60) and working.done() and caplog.records == []
    tasks = [Future(), Interrupted(), Future()]
    with pytest.raises(KeyboardInterrupt):
        threads.end(tasks)
    assert all(task.cancelled() for task in tasks) and "`kill -9" in caplog.text


def test_a_process_waits_at_its_end_for_its_own_tasks(monkeypatch):
    registered, own, of_parent = [], Future(), Future()
    monkeypatch.setattr(threads.atexit, "register", registered.append)
    monkeypatch.setattr(threads, "_BESIDE", {own: os.getpid(), of_parent: os.getpid() + 1})
    threads._wait_at_exit.__wrapped__()
    registered[0]()
    assert own.cancelled() and not of_parent.cancelled()


def test_a_thread_that_never_began_is_not_joined():
    joined, helpers = [], Helpers(2)
    helpers._threads = [
        SimpleNamespace(is_alive=lambda one=one: one, join=lambda one=one: joined.append(one)) for one in (True, False)
    ]
    with helpers:
        pass
    assert joined == [True]


@pytest.mark.parametrize(
    ("is_under_way", "is_done", "only_if_ended", "left"),
    [(False, False, True, None), (True, False, True, "pending"), (True, False, False, None), (True, True, True, None)],
)
def test_a_wait_may_leave_a_write_alone(is_under_way, is_done, only_if_ended, left):
    writer, write = BackgroundWriter(), Future()
    if is_under_way:
        writer.under_way = write
    if is_done:
        write.set_result(None)
    writer.wait(only_if_ended)
    assert (writer.under_way is write) is (left is not None) and write.cancelled() is (
        is_under_way and not only_if_ended
    )


def test_a_thread_begins_only_while_fewer_work_than_may(monkeypatch):
    begun = []

    class Thread:
        def __init__(self, target, name):
            self.target = target

        def start(self):
            begun.append(self)

        def is_alive(self):
            return False

    monkeypatch.setattr(threads.threading, "Thread", Thread)
    with Helpers(2) as helpers:
        tasks = [helpers.submit(pow, 2, number) for number in range(4)]
        assert len(begun) == 2
        begun[0].target()
        assert [task.result(0) for task in tasks] == [1, 2, 4, 8], "one thread has done all of it"
        last = [helpers.submit(pow, 3, number) for number in range(2)]
        assert len(begun) == 3, "the other one still works"
        begun[1].target()
        begun[2].target()
        assert [task.result(0) for task in last] == [1, 3]
