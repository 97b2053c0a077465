"""Hooks of mkdocs: pages of files outside of `docs/`, the order of search results, and each page as Markdown.

A link to a file outside of `docs/` leads to a page of the site that shows the file. Beside each HTML page there is its
Markdown, `index.html.md`, and `llms.txt` lists these, as https://llmstxt.org describes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
WITHIN = re.compile(r"\]\(([\w/]+\.(?:md|png|svg))(#[^)]*)?\)")
API = re.compile(r"^::: (\S+)\n(?:    .*\n)*", flags=re.MULTILINE)
LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml", ".ipynb": "json"}
# How much the pages of a section count in the search. Files of the repository are in no section.
BOOSTS = {"Start": 2.0, "Tutorial": 1.5, "How to": 2.0, "Reference": 1.0, "Explanation": 0.7, "Contributing": 0.4}
BOOST_OF_FILES = 0.1

_for_agents: dict[str, str] = {}  # the Markdown of each page, by its address


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version below each page."""
    source = (ROOT / "hf_compat" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', source, flags=re.MULTILINE)
    config.copyright = f"hf_compat {version}"
    _for_agents.clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of `docs/` that a page links to."""
    texts = [page.content_string for page in files.documentation_pages()]
    for path in sorted({path for text in texts for path in OUTSIDE.findall(text)}):
        source = (ROOT / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(Path(path).suffix, "text")
        title = path.replace("_", r"\_")  # `__init__` would be bold
        text = f"# {title}\n\n`````{language}\n{source}\n`````\n"
        files.append(File.generated(config, f"source/{path}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links to those pages, and weigh the page in the search. The sources themselves stay as they are."""
    section = page.ancestors[-1].title if page.ancestors else None
    page.meta["search"] = {"boost": BOOSTS.get(str(section), BOOST_OF_FILES)}
    if page.file.src_uri.startswith("source/"):
        return markdown
    _for_agents[page.url] = _as_markdown(markdown, page, config, files)
    return OUTSIDE.sub(lambda match: f"](source/{match[1]}.md)", markdown)


def _as_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page for a reader of Markdown: its links lead to Markdown, and it has the docstrings."""

    def linked(match: re.Match[str]) -> str:
        file = files.src_uris[match[1]]
        target = _address(file.url) if file.page is not None else file.url
        return f"]({get_relative_url(target, page.url)}{match[2] or ''})"

    def linked_outside(match: re.Match[str]) -> str:
        return f"]({get_relative_url(files.src_uris[f'source/{match[1]}.md'].url, page.url)})"

    def described(match: re.Match[str]) -> str:
        handler: Any = config.plugins["mkdocstrings"].get_handler("python")  # type: ignore[attr-defined]
        found = handler.collect(match[1], handler.get_options({}))
        found = found.final_target if found.is_alias else found
        members = found.all_members if "inherited_members: true" in match[0] else found.members
        return f"### `{match[1]}`\n\n{_description(found, members)}"

    return API.sub(described, WITHIN.sub(linked, OUTSIDE.sub(linked_outside, markdown)))


def _description(described: Any, members: Mapping[str, Any]) -> str:  # griffe's objects
    """The signature and docstring of a name, and of its public members."""
    parts = []
    shown = [one for name, one in members.items() if name[0] != "_" and (not one.is_alias or one.inherited)]
    for one in (described, *(one for one in shown if one.is_function or one.is_class or one.is_attribute)):
        if one is not described:
            parts.append(f"#### `{one.name}`\n")
        if one.is_function:
            parts.append(f"```python\n{one.signature()}\n```\n")
        if one.docstring is not None:
            parts.append(f"{one.docstring.value}\n")
    return "\n".join(parts) + "\n"


def _address(url: str) -> str:
    return f"{url.removesuffix('./')}index.html.md"


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the sections for `llms.txt`."""
    config.extra["sections"] = [(item.title, _pages_below(item)) for item in nav.items]
    return nav


def _pages_below(item: Any) -> list[Page]:  # of the navigation
    return [page for child in item.children for page in _pages_below(child)] if item.children else [item]


def on_post_build(config: MkDocsConfig) -> None:
    """Write the Markdown of each page beside its HTML, and the list of them."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section, pages in config.extra["sections"]:
        lines += [f"## {section}", ""]
        for page in pages:
            text = _for_agents[page.url]
            path = Path(config.site_dir, _address(page.url))
            path.write_text(text, encoding="utf-8")
            paragraphs = text.partition("\n")[2].strip().split("\n\n")
            first = " ".join(paragraphs[0].split()) if re.match(r"[\w`]", paragraphs[0]) else ""
            about = f": {first.partition('. ')[0].rstrip('.:')}." if first else ""
            lines.append(f"- [{page.title}]({_address(page.url)}){about}")
        lines.append("")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")
