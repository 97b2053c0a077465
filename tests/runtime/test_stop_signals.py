"""Signals that ask to stop: none is lost, whenever it arrives."""

from __future__ import annotations

import signal

import pytest

from hf_compat.runtime.signals import StopSignals


def exchange(monkeypatch, meanwhile=lambda: None, others=0):
    """Stand for the exchange between processes; something may happen while it waits."""

    def highest_on_host(numbers, timeout_seconds):
        meanwhile()
        return [max(number, others) for number in numbers]

    monkeypatch.setattr("hf_compat.runtime.signals.highest_on_host", highest_on_host)


def test_a_signal_that_arrives_during_the_exchange_is_obeyed_at_the_next_one(monkeypatch):
    signals = StopSignals()
    exchange(monkeypatch, lambda: signals.note(signal.SIGTERM, None))
    assert signals.agree() is False, "the other processes do not know of it yet"
    exchange(monkeypatch)
    assert signals.agree() is True and signals.received == signal.SIGTERM


def test_a_signal_of_another_process_is_obeyed_here(monkeypatch):
    signals = StopSignals()
    exchange(monkeypatch, others=int(signal.SIGTERM))
    assert signals.agree() is True and signals.received == signal.SIGTERM


def test_a_signal_after_the_last_update_does_what_it_does_without_a_training():
    seen, before = [], signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopSignals().watched(stop=True):
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
        with pytest.raises(ValueError, match="own"), StopSignals().watched(stop=True):
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("an error of its own")
        assert seen == [signal.SIGTERM], "an error comes out as it is"
    finally:
        signal.signal(signal.SIGTERM, before)
