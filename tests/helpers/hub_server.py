"""A Hub of one's own: what huggingface_hub asks of it for pushes, over HTTP, with failures where a test wants them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

# Kept as large files, by the end of their names, as the Hub's `.gitattributes` says.
LARGE = (".bin", ".safetensors", ".pt", ".pth")


@dataclass
class Pushed:
    """A commit that has arrived."""

    repo: str
    revision: str
    message: str
    files: dict[str, bytes]


@dataclass
class Hub:
    """The server.

    Args:
        fail: Gets the number of a request, from 0, its method and path; returns a status to answer with, "drop" (the
            connection, nothing is done), "lose" (the answer, what was asked is done), "hang", or None.
    """

    fail: object = None
    commits: list[Pushed] = field(default_factory=list)
    repos: dict[str, dict] = field(default_factory=dict)
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    slow_seconds: float = 0.0

    def messages(self):
        return [commit.message for commit in self.commits]

    def tree(self, repo):
        return self.trees.get(repo, {})

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, method, path, body):
        """Return what is said to a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if repo in self.repos:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
            self.repos[repo] = asked
            return 200, {"url": f"{self.url}/{repo}", "name": repo, "id": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "orgs": []}
        if found := re.fullmatch(r"/api/models/(.+)/preupload/([^/]+)", path):
            return 200, {"files": [self.mode(found[1], file["path"]) for file in json.loads(body)["files"]]}
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self.place(o) for o in json.loads(body)["objects"]]}
        if found := re.fullmatch(r"/large/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.large[found[1]] = body
            return 200, {}
        if found := re.fullmatch(r"/verify/(\w+)", path):
            return (200, {}) if found[1] in self.large else (404, {"error": "not there"})
        if found := re.fullmatch(r"/api/models/(.+)/commit/([^/]+)", path):
            return self.commit(found[1], unquote(found[2]), body)
        if found := re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path):
            return 200, {"id": found[1], "sha": f"{len(self.commits):040x}", "tags": [], "siblings": []}
        return 404, {"error": f"no such place: {method} {path}"}

    def mode(self, repo, path):
        there = self.tree(repo).get(path)
        is_large = path.endswith(LARGE)
        oid = None
        if there is not None:
            blob = b"blob %d\0" % len(there) + there
            oid = hashlib.sha256(there).hexdigest() if is_large else hashlib.sha1(blob).hexdigest()
        return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": oid}

    def place(self, asked):
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.large:
            return known
        links = {"upload": "large", "verify": "verify"}
        return known | {"actions": {name: {"href": f"{self.url}/{at}/{asked['oid']}"} for name, at in links.items()}}

    def commit(self, repo, revision, body):
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        lines = [json.loads(line) for line in body.splitlines()]
        files = {}
        for line in lines[1:]:
            value = line["value"]
            is_file = line["key"] == "file"
            files[value["path"]] = base64.b64decode(value["content"]) if is_file else self.large[value["oid"]]
        with self.lock:
            self.trees.setdefault(repo, {}).update(files)
            self.commits.append(Pushed(repo, revision, lines[0]["value"]["summary"], files))
            oid = f"{len(self.commits):040x}"
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}


def handler_of(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer in two packets waits for an acknowledgement of the first

        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command != "GET" else b""
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                body = self.read_chunks()
            with hub.lock:
                number = len(hub.requests)
                hub.requests.append((self.command, self.path))
                hub.tokens.append(self.headers.get("Authorization"))
            fate = hub.fail(number, self.command, self.path) if hub.fail else None
            if fate == "hang":
                hub.ended.wait(60)
            time.sleep(hub.slow_seconds)
            if fate in ("drop", "hang"):
                return self.hang_up()
            answer = (fate, {"error": "as the test wants it"}) if isinstance(fate, int) else None
            status, said = answer or hub.answer(self.command, self.path.partition("?")[0], body)
            if fate == "lose":
                return self.hang_up()
            self.reply(status, json.dumps(said).encode())

        def hang_up(self):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(2)

        def reply(self, status, content):
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def read_chunks(self):
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_HEAD = handle_any  # noqa: N815 - http.server's names

        def log_message(self, *args):
            pass

    return Handler


@contextlib.contextmanager
def running_hub(**options):
    """Run a server in a thread."""
    hub = Hub(**options)
    hub.server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.server.daemon_threads = True
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def every_second(number, method, path):
    """Fail every second request."""
    return 500 if number % 2 else None


@contextlib.contextmanager
def talked_to(monkeypatch, hub, pauses=False):
    """Let huggingface_hub, and transformers, take a server for the Hub; without pauses between attempts."""
    import huggingface_hub
    import transformers.utils.hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    if not pauses:
        import types

        monkeypatch.setattr(_http, "time", types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
    huggingface_hub.utils.close_session()
    try:
        yield
    finally:
        huggingface_hub.utils.close_session()
