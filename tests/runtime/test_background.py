"""Writing beside training: one write at a time, its error at the next call."""

import os
import threading

import pytest

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
