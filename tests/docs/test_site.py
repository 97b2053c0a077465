"""The documentation site builds without a warning, its links hold, and a browser shows and finds its pages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

import hf_compat
from hf_compat import errors
from hf_compat.hf.callbacks import EVENTS
from hf_compat.hf.rows import OWN_ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt install chromium)")


class Found(HTMLParser):
    """The anchors of a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key, value in attrs if value and (key == "id" or (tag, key) == ("a", "name"))}
        self.links += [value for key, value in given.items() if value and (tag, key) in (("a", "href"), ("img", "src"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """What each page has, by its address on the site."""
    found = {
        path.relative_to(site).as_posix(): Found(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    return {name.removesuffix("index.html"): page for name, page in found.items()}


def test_each_public_name_is_shown_once(site):
    texts = [path.read_text(encoding="utf-8") for path in site.glob("api*/index.html")]
    shown = [name for text in texts for name in re.findall(r'<h3 id="hf_compat\.(\w+)"', text)]
    assert sorted(shown) == sorted(hf_compat.__all__), "the pages of the API show each public name once"
    assert max(map(len, texts)) < 500_000
    listed = re.findall(r"\[`(\w+)`\]", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(hf_compat.__all__)


def test_each_argument_event_and_error_has_an_anchor(pages):
    arguments = {field.name for field in dataclasses.fields(hf_compat.Seq2SeqTrainingArguments)} | {*OWN_ARGUMENTS}
    classes = {
        f"hf_compat.errors.{name}"
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__
    }
    assert len(arguments) > 110 and len(classes) > 20
    assert arguments - pages["arguments/"].anchors == set()
    assert EVENTS.keys() - pages["events_and_hooks/"].anchors == set()
    assert classes - pages["errors/"].anchors == set()


def test_links_within_the_site_hold(site, pages):
    broken, checked = [], 0
    for address, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link) or address == "404.html":
                continue
            target, anchor = urldefrag(urljoin(f"/{address}", link))
            target, checked = target.removeprefix("/"), checked + 1
            is_file = target not in pages and (site / target).is_file()
            if not is_file and (target not in pages or (anchor and unquote(anchor) not in pages[target].anchors)):
                broken.append(f"{address or 'index'}: {link}")
    assert checked > 1000 and broken == []


def test_each_page_is_there_as_markdown_too(site):
    listed = re.findall(r"^- \[.+?\]\((.*?\.md)\)", (site / "llms.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(listed) == len(set(listed)) > 40 and "index.html.md" in listed
    for name in listed:
        text = (site / name).read_text(encoding="utf-8")
        assert text.startswith("# ") and ":::" not in text, name
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
        assert [link for link in links if not (site / name).parent.joinpath(link).exists()] == [], name
    described = (site / "api_training" / "index.html.md").read_text(encoding="utf-8")
    assert "#### `train`" in described and "resume_from_checkpoint" in described


CHECK = """
<body><script>
const PAGES = @PAGES@, WIDTHS = @WIDTHS@, QUERIES = @QUERIES@, WORKER = "/@WORKER@";

async function tooWide(width) {
  const frame = document.createElement("iframe"), found = [];
  frame.style.width = width + "px";
  document.body.append(frame);
  for (const page of PAGES) {
    await new Promise(done => { frame.onload = done; frame.src = "/" + page; });
    const shown = frame.contentDocument, view = shown.documentElement;
    if (view.scrollWidth > view.clientWidth + 1) found.push([width, page, "the page"]);
    for (const part of shown.querySelectorAll(".md-content pre > code, .md-content table, .md-content img")) {
      // on a narrow screen code begins and ends at the edges of the page
      const column = width < 720 ? view.clientWidth : part.closest(".md-content__inner").getBoundingClientRect().right;
      if (part.scrollWidth > part.clientWidth + 1 || part.getBoundingClientRect().right > column + 1)
        found.push([width, page, part.tagName, part.textContent.trim().slice(0, 60)]);
    }
  }
  return found;
}

async function search() {
  const index = await (await fetch("/search/search_index.json")).json(), worker = new Worker(WORKER), found = {};
  const ask = message => new Promise(done => {
    worker.onmessage = event => done(event.data);
    worker.postMessage(message);
  });
  await ask({type: 0, data: {...index, options: {suggest: false}}});
  for (const query of QUERIES) {
    const answer = await ask({type: 2, data: query});
    found[query] = answer.data.items.slice(0, 3).map(group => group.map(one => one.location));
  }
  return found;
}

(async () => {
  const result = {wide: (await Promise.all(WIDTHS.map(tooWide))).flat(), search: await search()};
  await fetch("/result", {method: "POST", body: JSON.stringify(result)});
})().catch(error => fetch("/result", {method: "POST", body: JSON.stringify({error: String(error)})}));
</script></body>
"""
# What a person types, and where the answer is: it is among the first three pages.
WANTED = {
    "load_best_model_at_end": "arguments/#load_best_model_at_end",
    "warmup_steps": "arguments/#warmup_steps",
    "learning_rate": "arguments/#learning_rate",
    "bf16": "arguments/",
    "deepspeed": "arguments/#deepspeed",
    "resume": "resume/",
    "resume on other gpus": "scale/#resume-on-other-gpus",
    "several gpus": "scale/",
    "write a callback": "callbacks/#write-a-callback",
    "lightning callback": "callbacks/",
    "on_step_end": "events_and_hooks/#on_step_end",
    "checkpoint holds": "checkpoints/",
    "yaml": "command_fit/",
    "hyperparameter search": "search/",
    "OutputFolderError": "errors/#hf_compat.errors.OutputFolderError",
    "compute_metrics": "metrics/",
    "wandb": "loggers/",
    "notebook": "notebooks/",
    "slurm": "scale/#launchers",
    "preemption": "operations/#preemption",
    "HFModule": "native/",
    "compare": "command_compare/",
    "install": "start/#install",
    "plot": "command_line/#plot",
    "What does warmup_steps mean?": "arguments/#warmup_steps",
    "what is in a checkpoint": "checkpoints/",
    "how to write a callback": "callbacks/#write-a-callback",
    "How do I move a YAML": "command_fit/#move-your-yaml",
    "out of memory": "resume/#after-running-out-of-memory",
    "jupyter": "notebooks/",
    "ctrl-c": "checkpoints/#ctrl-c-and-signals",
    "speed": "benchmarks/",
    "uvx": "command_migrate/#without-torch",
    "s3://": "stores/",
    "freeze layers": "customise/#freeze-layers",
    "class weights": "customise/",
    "custom loss": "customise/",
    "parameter groups": "customise/",
    "multiple eval sets": "customise/",
    "streaming": "customise/#stream-the-data",
    "train on multiple gpus": "scale/",
    "fsdp_config": "arguments/#fsdp_config",
    "peft": "libraries/",
    "hyperparameter sweep": "search/",
}


@pytest.fixture(scope="module")
def looked_at(site, tmp_path_factory):
    """What a browser says of the pages: what is too wide, and what its search finds."""
    results: queue.Queue[bytes] = queue.Queue()
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    pages = [path.parent.relative_to(site).as_posix() + "/" for path in site.glob("*/index.html")]
    check = CHECK.replace("@PAGES@", json.dumps(sorted(pages))).replace("@WIDTHS@", "[1400, 400]")
    check = check.replace("@QUERIES@", json.dumps([*WANTED])).replace("@WORKER@", worker.relative_to(site).as_posix())

    class Answers(SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path != "/check.html":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(check.encode())

        def do_POST(self):
            results.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Answers, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
        address = f"http://127.0.0.1:{server.server_port}/check.html"
        with subprocess.Popen(
            [BROWSER, *flags.split(), profile, "--window-size=1500,1000", "--remote-debugging-port=0", address],
            stderr=subprocess.DEVNULL,
        ) as browser:
            with contextlib.suppress(queue.Empty):
                found = json.loads(results.get(timeout=300))
            browser.terminate()
        server.shutdown()
    return found


@in_a_browser
def test_nothing_is_wider_than_its_column(looked_at):
    assert looked_at["wide"] == []


@in_a_browser
def test_the_search_finds_the_page_that_is_wanted_among_the_first_three(looked_at):
    missed = {
        query: looked_at["search"][query]
        for query, wanted in WANTED.items()
        if not any(one.startswith(wanted) for group in looked_at["search"][query] for one in group)
    }
    assert missed == {}
