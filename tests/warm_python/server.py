"""The warm process: imports everything once, then forks for every command that a client sends.

`client.py` starts it. It ends with the test session. Nothing here starts a thread: a fork would inherit the locks that
threads hold.
"""

from __future__ import annotations

import array
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

from warm_python import child, imports


class Server:
    """Forks for clients, passes their signals on, and tells them how their process has ended.

    Args:
        folder: The session's folder; its name is the address.
        session: Process id of the test session.
        loaded: What this process has imported.
        listener: Listens at the address.
    """

    def __init__(self, folder: Path, session: int, loaded: imports.Loaded, listener: socket.socket) -> None:
        self.folder, self.loaded, self.listener = folder, loaded, listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(os.pidfd_open(session), selectors.EVENT_READ, lambda: sys.exit(0))

    def run(self) -> None:
        """Serve until the session has ended."""
        while True:
            for key, _ in self.selector.select():
                key.data()

    def accept(self) -> None:
        """Take a client's command: fork for it, or tell the client to use the real interpreter."""
        connection, _ = self.listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        facts, streams = _received(connection)
        reason = child.why_real(facts, self.loaded)
        self._note(reason or "forked", facts["words"])
        if reason:
            connection.close()
        else:
            self._fork(connection, facts, streams)
        for stream in streams:
            os.close(stream)

    def _fork(self, connection: socket.socket, facts: dict, streams: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            self.listener.close()
            connection.close()
            child.become(facts, streams, self.loaded)  # does not return
        ended = os.pidfd_open(pid)
        connection.sendall(b"forked\n")

        def obey() -> None:
            numbers = connection.recv(4096)
            for number in numbers.split() or [signal.SIGKILL]:  # a client that is gone was killed
                _send(pid, int(number), facts["leads_group"])
            if not numbers:
                self.selector.unregister(connection)

        def end() -> None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.selector.unregister(ended)
            os.close(ended)
            if connection in self.selector.get_map():
                self.selector.unregister(connection)
                _answer(connection, status)
            connection.close()

        self.selector.register(ended, selectors.EVENT_READ, end)
        self.selector.register(connection, selectors.EVENT_READ, obey)

    def _note(self, said: str, words: list[str]) -> None:
        with open(self.folder / "commands.log", "a") as log:
            log.write(f"{said}: {' '.join(words)[:200]!r}\n")


def listening(folder: Path) -> socket.socket:
    """Listen at a session's address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0" + folder.name.encode())
    listener.listen(64)
    return listener


def _received(connection: socket.socket) -> tuple[dict, list[int]]:
    numbers = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_LEN(3 * numbers.itemsize))
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    with connection.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(header, "big"))), list(numbers)


def _answer(connection: socket.socket, status: int) -> None:
    try:
        connection.sendall(b"%d\n" % status)
    except OSError as error:  # the client was killed in this instant: nobody waits for the status
        print("no client:", error, file=sys.stderr)


def _send(pid: int, number: int, to_group: bool) -> None:
    try:
        os.killpg(pid, number) if to_group else os.kill(pid, number)
    except ProcessLookupError as error:  # it ends in this instant
        print("no process:", error, file=sys.stderr)


def main(folder: str, session: str) -> None:
    """Import everything, then serve the clients of a test session."""
    del sys.path[0]  # tests/, for this package alone
    loaded = imports.load()
    server = Server(Path(folder), int(session), loaded, listening(Path(folder)))
    gc.collect()
    gc.freeze()  # what is imported: a collection in a fork would take 0.4 s for it, and copy its pages
    server.run()
