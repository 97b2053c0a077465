"""A local S3 server (moto's) that fails as it is told to: in a process of its own, so that it outlives a killed run.

Each request is of a kind: `put`, `multipart`, `get`, `list`, `head` or `delete`. A fault names a kind, how it fails,
how many requests of it go well first, and how many fail then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("put", "multipart", "get", "list", "head", "delete")
# How a request fails. After `cut after` and `late`, the store has done what was asked.
WAYS = ("500", "503", "403", "hangs", "cut before", "cut after", "cut within")
BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
CREDENTIALS |= {"AWS_EC2_METADATA_DISABLED": "true"}


@dataclass
class Fault:
    kind: str
    way: str
    after: int = 0
    count: int = 10**9
    within: str = ""  # a part of the key


class Store:
    """The server, as a test sees it."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def fail(self, *faults: Fault) -> None:
        self._post("faults", [asdict(one) for one in faults])

    def log(self) -> list[tuple[str, str]]:
        """Kind and key of each request since the last call."""
        return [tuple(one) for one in self._post("log", None)]

    def reset(self) -> None:
        self.fail()
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).read()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")).read()
        self.log()

    def variables(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def _post(self, name: str, content: object) -> list:
        body = json.dumps(content).encode()
        with urllib.request.urlopen(f"{self.endpoint}/_store/{name}", data=body) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def serving():
    """Serve within the context."""
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            store = Store(int(server.stdout.readline()))
            store.reset()
            yield store
        finally:
            server.kill()


@contextlib.contextmanager
def reached(store: Store, read_timeout: float = 2.0):
    """Let s3fs in this process, and in those it starts, reach the server, without long waits."""
    import fsspec
    import s3fs

    before = {name: os.environ.get(name) for name in store.variables()}
    os.environ.update(store.variables())
    options = {"config_kwargs": {"read_timeout": read_timeout, "connect_timeout": 2, "retries": {"max_attempts": 1}}}
    fsspec.config.conf["s3"] = options
    s3fs.core.S3FileSystem.retries = 1
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.core.S3FileSystem.retries = 5
        del fsspec.config.conf["s3"]
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def kind_of(method: str, key: str, query: str) -> str:
    if "uploads" in query or "uploadId" in query or "partNumber" in query:
        return "multipart"
    if method == "DELETE" or query.startswith("delete"):
        return "delete"
    if method == "GET" and not key:
        return "list"
    return {"PUT": "put", "POST": "put", "GET": "get", "HEAD": "head"}[method]


class _Failing:
    """moto's application, within one that fails."""

    def __init__(self, inner) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self._faults: list[Fault] = []
        self._log: list[tuple[str, str]] = []

    def __call__(self, environ, start):
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith("/_store/"):
            return self._control(path.rpartition("/")[2], environ, start)
        if path.startswith("/moto-api") or path.count("/") < 1:
            return self._inner(environ, start)
        key = path.lstrip("/").partition("/")[2]
        kind = kind_of(environ["REQUEST_METHOD"], key, query)
        way = self._way_of(kind, key)
        return self._inner(environ, start) if way is None else self._fail(way, environ, start)

    def _way_of(self, kind: str, key: str) -> str | None:
        with self._lock:
            self._log.append((kind, key))
            for fault in self._faults:
                if fault.kind == kind and fault.within in key and fault.count > 0:
                    if fault.after > 0:
                        fault.after -= 1
                    else:
                        fault.count -= 1
                        return fault.way
        return None

    def _control(self, name: str, environ, start):
        content = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            answer: list = []
            if name == "faults":
                self._faults = [Fault(**one) for one in content]
            else:
                answer, self._log = self._log, []
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def _fail(self, way: str, environ, start):
        if way in ("cut after", "cut within"):
            answer: list = []
            body = b"".join(self._inner(environ, lambda *given: answer.extend(given)))
            if way == "cut within" and body:
                start(*answer[:2])
                return _Half(body, environ)
        elif way == "hangs":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            time.sleep(6)
        elif way in ("500", "503", "403"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            codes = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}
            text = f'<?xml version="1.0"?><Error><Code>{codes[way]}</Code><Message>told to</Message></Error>'.encode()
            start(f"{way} Told", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
            return [text]
        _cut(environ)
        raise ConnectionAbortedError(way)


class _Half:
    """The first half of an answer, after which the connection is cut."""

    def __init__(self, body: bytes, environ) -> None:
        self._body, self._environ = body, environ

    def __iter__(self):
        yield self._body[: len(self._body) // 2]
        time.sleep(0.05)
        _cut(self._environ)
        raise ConnectionAbortedError


def _cut(environ) -> None:
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, _Failing(DomainDispatcherApplication(create_backend_app)), threaded=True)
    server.daemon_threads = True
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
