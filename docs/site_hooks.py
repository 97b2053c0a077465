"""Hooks of mkdocs: a link to a file outside of `docs/` leads to a page of the site that shows the file."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml", ".ipynb": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of `docs/` that a page links to."""
    texts = [page.content_string for page in files.documentation_pages()]
    for path in sorted({path for text in texts for path in OUTSIDE.findall(text)}):
        source = (ROOT / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(Path(path).suffix, "text")
        files.append(
            File.generated(config, f"source/{path}.md", content=f"# {path}\n\n`````{language}\n{source}\n`````\n")
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links to those pages. The sources themselves stay as they are."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return OUTSIDE.sub(lambda match: f"](source/{match[1]}.md)", markdown)
