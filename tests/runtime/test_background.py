"""Writing beside training: one write at a time, its error at the next call."""

import os
import threading

import pytest

from hf_compat.runtime.threads import BackgroundWriter


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
