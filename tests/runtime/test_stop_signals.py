"""Signals that ask to stop: none is lost, whenever it arrives."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from hf_compat.runtime import signals as signals_module
from hf_compat.runtime.signals import StopSignals, is_requeued, requeue


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


def test_ctrl_c_ends_the_second_time_and_a_signal_to_stop_does_not():
    signals = StopSignals()
    for number in (signal.SIGTERM, signal.SIGTERM):
        signals.note(number, None)
    assert signals.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signals.note(signal.SIGINT, None)
    signals.received = None
    signals.note(signal.SIGINT, None)
    assert signals.received == signal.SIGINT and not signals.asks_for_requeue
    signals.note(signal.SIGUSR1, None)
    assert signals.asks_for_requeue


def mine(number, frame):
    SEEN.append(number)


SEEN: list[int] = []
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    SEEN.clear()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("stop", "requeue", "interrupt", "user", "watched"),
    [
        (True, False, signal.default_int_handler, signal.SIG_DFL, {signal.SIGTERM, signal.SIGINT}),
        (True, True, signal.default_int_handler, signal.SIG_DFL, set(NUMBERS)),
        (False, True, signal.default_int_handler, signal.SIG_DFL, {signal.SIGUSR1}),
        (True, True, signal.SIG_IGN, signal.SIG_DFL, {signal.SIGTERM, signal.SIGUSR1}),
        (True, True, mine, mine, {signal.SIGTERM, signal.SIGINT}),
        (False, False, signal.default_int_handler, signal.SIG_DFL, set()),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_which_signals_are_watched_and_given_back(stop, requeue, interrupt, user, watched):
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGUSR1, user)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signals = StopSignals()
    with signals.watched(stop, requeue):
        assert {number for number in NUMBERS if signal.getsignal(number) == signals.note} == watched
        assert signals.are_watched == (stop or requeue)
        if signal.SIGTERM in watched:
            signal.signal(signal.SIGTERM, mine)  # the user's, set meanwhile
            before[signal.SIGTERM] = mine
    assert {number: signal.getsignal(number) for number in NUMBERS} == before and not signals.are_watched


@pytest.mark.parametrize(
    ("number", "handler", "ends_by"),
    [
        (None, None, None),
        (signal.SIGTERM, mine, "mine"),
        (signal.SIGTERM, signal.SIG_DFL, SystemExit),
        (signal.SIGUSR1, None, SystemExit),
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGINT, mine, "mine"),
    ],
)
def test_a_signal_is_obeyed_as_without_a_training(number, handler, ends_by):
    SEEN.clear()
    signals = StopSignals()
    signals.received = number
    signals._handlers = {} if handler is None else {number: handler}
    if isinstance(ends_by, type):
        with pytest.raises(ends_by) as raised:
            signals.obey()
        assert ends_by is KeyboardInterrupt or raised.value.code == 128 + number
    else:
        signals.obey()
    assert ([number] if ends_by == "mine" else []) == SEEN and signals.received is None


@pytest.mark.parametrize(
    ("job", "content", "expected", "warned"),
    [
        ("17", None, False, False),
        ("17", '{"job": "17"}', True, False),
        ("18", '{"job": "17"}', False, False),
        (None, '{"job": null}', False, False),
        ("17", "{", False, True),
        ("17", "[]", False, True),
        ("17", "{}", False, True),
    ],
)
def test_a_job_that_was_queued_again(tmp_path, monkeypatch, caplog, job, content, expected, warned):
    monkeypatch.setattr(signals_module, "slurm_job_id", lambda: job)
    if content is not None:
        (tmp_path / "requeued.json").write_text(content)
    assert is_requeued(str(tmp_path)) is expected
    assert ("cannot be read" in caplog.text) == warned


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (0, "warning", "SLURM has queued job 17 again"),
        (1, "no right", "SLURM did not queue job 17 again: no right. Run `scontrol requeue 17`"),
        (None, "no scontrol", "SLURM did not queue job 17 again: no scontrol"),
    ],
)
def test_a_job_is_queued_again(tmp_path, monkeypatch, caplog, status, said, told):
    asked = []

    def run(command, **options):
        asked.append(command)
        if status is None:
            raise OSError(said)
        return SimpleNamespace(returncode=status, stderr=f" {said}\n")

    monkeypatch.setattr(signals_module.subprocess, "run", run)
    monkeypatch.setattr(signals_module, "slurm_job_id", lambda: None)
    requeue(str(tmp_path))
    assert not asked and not list(tmp_path.iterdir())
    monkeypatch.setattr(signals_module, "slurm_job_id", lambda: "17")
    with caplog.at_level("INFO"):
        requeue(str(tmp_path))
    assert asked == [["scontrol", "requeue", "17"]] and told in caplog.text and is_requeued(str(tmp_path))
    assert [record.levelname for record in caplog.records] == ["INFO" if status == 0 else "ERROR"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_ctrl_c_alone_interrupts(number):
    signals = StopSignals()
    assert signals.asks_for_requeue is False
    signals.note(number, None)
    assert signals.received == number and signals.asks_for_requeue is (number == signal.SIGUSR1)
    signals.note(signal.SIGTERM, None)
    assert signals.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signals.note(signal.SIGINT, None)
    assert signals.received == signal.SIGTERM


@pytest.mark.parametrize("dead", [[], [1], [0, 2]])
def test_workers_that_have_died_are_waited_for(monkeypatch, dead):
    joined, asked = [], []
    processes = [SimpleNamespace(sentinel=f"s{place}") for place in range(3)]
    for process in processes:
        process.join = lambda seconds, process=process: joined.append((process, seconds))
    ended = [processes[place] for place in dead]
    monkeypatch.setattr(signals_module, "_DEATH_SECONDS", 7.0)
    wait = lambda sentinels, timeout: asked.append((sentinels, timeout)) or [f"s{place}" for place in dead]  # noqa: E731
    monkeypatch.setattr(signals_module.connection, "wait", wait)
    assert signals_module.dead_among(iter(processes)) == ended
    assert joined == [(process, 7.0) for process in ended] and asked == [(["s0", "s1", "s2"], 7.0)]
