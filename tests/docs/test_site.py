"""The documentation site builds without a warning, and each link in it leads to a page and an anchor that exist."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

import hf_compat
from hf_compat import errors
from hf_compat.hf.argument_values import OWN_ARGUMENTS
from hf_compat.hf.callbacks import EVENTS

ROOT = Path(__file__).resolve().parents[2]


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
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r'<h3 id="hf_compat\.(\w+)"', page)
    assert sorted(shown) == sorted(hf_compat.__all__), "docs/api.md shows each public name once"


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
