"""What stands in for the interpreter: hands a command to the warm process and ends as the process forked there ends.

    python -IS client.py FOLDER REAL_PYTHON STAND_IN [what follows `python` in a command]

Imports little: every command pays for it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Its own `__main__` holds nothing: the forks fill it.
SERVER = "import sys; sys.path[0] = sys.argv[1]; from warm_python.server import main; main(*sys.argv[2:])"
START_SECONDS = 120
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def connected(folder: str) -> socket.socket | None:
    """A connection to the warm process of a test session, if it runs."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(b"\0" + os.path.basename(folder).encode())
    except OSError:
        connection.close()
        return None
    return connection


def started(folder: str, real: str) -> socket.socket | None:
    """Start the warm process, one client at a time; None if it does not come up."""
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connected(folder)
        if connection is not None or os.path.exists(os.path.join(folder, "failed")):
            return connection
        with open(os.path.join(folder, "session.json")) as file:
            session = json.load(file)
        with open(os.path.join(folder, "server.log"), "wb") as log:
            command = [real, "-c", SERVER, TESTS, folder, str(session["process"])]
            server = subprocess.Popen(
                command, env=session["environment"], cwd=session["folder"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while connection is None and server.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
            connection = connected(folder)
        if connection is None:
            open(os.path.join(folder, "failed"), "w").close()
        return connection


def request(connection: socket.socket, stand_in: str, words: list[str]) -> None:
    """Send the command with the standard streams."""
    ignored = [int(one) for one in PASSED_ON if signal.getsignal(one) is signal.SIG_IGN]
    mask = os.umask(0)
    os.umask(mask)
    facts = {
        "executable": stand_in, "words": words, "folder": os.getcwd(), "environment": dict(os.environ),
        "process": os.getpid(), "parent": os.getppid(),
        "leads_group": os.getpgrp() == os.getpid(), "ignored": ignored, "mask": mask,
    }  # fmt: skip
    text = json.dumps(facts).encode()
    streams = array.array("i", [0, 1, 2])
    header = len(text).to_bytes(4, "big")
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(text)


def main() -> None:
    folder, real, stand_in, *words = sys.argv[1:]
    connection = connected(folder) or started(folder, real)
    try:
        if connection is None:
            raise OSError("no warm process")
        request(connection, stand_in, words)  # fails where a standard stream is closed, or the folder is gone
    except OSError:
        os.execv(real, [real, *words])
    answers = connection.makefile("rb")
    if not answers.readline().startswith(b"forked"):
        os.execv(real, [real, *words])

    def pass_on(number: int, _: object) -> None:
        connection.sendall(b"%d\n" % number)

    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    status = int(answers.readline() or 1)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
