"""Count the faults of plain English that issue 33 names, over the package, the pages and the tests' docstrings.

    python tests/house/words.py [ROOT] [--where FAULT]

The script judges nothing: it prints a table of counts, and with `--where` each place of one fault.

| corpus | text that is counted |
|---|---|
| `package` | docstrings, comments and strings of four or more words in `hf_compat/` |
| `docs` | README.md and the pages under `docs/`, without code blocks |
| `tests` | docstrings in `tests/` |

The generated pages (`GENERATED`) are left out: their words are strings of the package.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("arguments.md",)
LONG_SENTENCE_WORDS = 25


class Text(NamedTuple):
    """A piece of prose and its place."""

    place: str
    words: str


def package(root: Path) -> Iterator[Text]:
    for path in sorted((root / "hf_compat").rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(root))
        yield from comments(source, name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 4:
                yield from paragraphs(node.value, f"{name}:{node.lineno}")


def docs(root: Path) -> Iterator[Text]:
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.name not in GENERATED:
            prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            yield from paragraphs(prose, str(path.relative_to(root)))


def tests(root: Path) -> Iterator[Text]:
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if is_documented and (text := ast.get_docstring(node)):
                yield from paragraphs(text, f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}")


CORPORA = (package, docs, tests)


def comments(source: str, name: str) -> Iterator[Text]:
    """Comments of a module; the lines of one block are one text."""
    block, first, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield Text(f"{name}:{first}", " ".join(block))
                block = []
            first = token.start[0] if not block else first
            last = token.start[0]
            block.append(token.string.lstrip("#: "))
    if block:
        yield Text(f"{name}:{first}", " ".join(block))


def paragraphs(text: str, place: str) -> Iterator[Text]:
    """Paragraphs, list items and table cells, each on one line, code replaced by one word."""
    text = re.sub(r"(?<!`)`[^`\n]+`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for part in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\||\n#+ |\n\s*(?:Args|Returns|Raises|Examples?):\s*\n", text):
        if words := " ".join(part.split()):
            yield Text(place, words)


def sentences(text: Text) -> list[str]:
    return re.split(r"(?<=[.!?])\)?\*{0,2}\s+(?=[A-Z`\"'(\[*])", text.words)


def matching(pattern: str) -> Callable[[Text], list[str]]:
    """Search for a pattern, and quote it with some words of its surroundings."""
    found = re.compile(pattern)
    return lambda text: [text.words[max(0, m.start() - 30) : m.end() + 40] for m in found.finditer(text.words)]


def long_sentences(text: Text) -> list[str]:
    return [s for s in sentences(text) if len(re.findall(r"[\w'-]+", s)) > LONG_SENTENCE_WORDS]


def joined_thoughts(text: Text) -> list[str]:
    """Sentences with three words or more on both sides of a colon or semicolon."""
    return [s for s in sentences(text) if re.search(r"(?:\S+ ){2}[^\s:;]+[:;] (?:\S+ ){2}\S+", s)]


FAULTS: dict[str, Callable[[Text], list[str]]] = {
    "return-what": matching(r"\bReturn (?:what|who|whether what)\b"),
    "bare-relative": matching(r"(?:^|[,;:(] |\b(?:and|of|for|by|to|from|with|in|than|as) )(?:what|who|whoever)\b"),
    "is-no": matching(r"\b(?:is|are|was|were|be|been) no (?!longer|more\b)"),
    "nobody": matching(r"(?i)\b(?:no|some|any|every)body\b|\b(?:some|any|every)one\b|\bno one\b"),
    "labels": matching(r"(?i)\bwords only\b|\bneither vocabulary\b|\bboth vocabularies\b|\bvocabulary\b"),
    "rooms": matching(r"(?i)\b(?:rooms?|doors?|houses?|drawers?|guests?)\b"),
    "stand": matching(r"(?i)\b(?:stands?|stood)\b(?! for\b)"),
    "go-on": matching(r"(?i)\b(?:go|goes|going|went|gone) on\b"),
    "tell": matching(r"(?i)\b(?:tells?|told)\b"),
    f"over-{LONG_SENTENCE_WORDS}-words": long_sentences,
    "joined": joined_thoughts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--where", choices=FAULTS, help="print the places of this fault")
    given = parser.parse_args()
    texts = {corpus.__name__: list(corpus(given.root)) for corpus in CORPORA}
    if given.where:
        for text in (text for corpus in texts.values() for text in corpus):
            for quote in FAULTS[given.where](text):
                print(f"{text.place}  …{quote}…")
        return
    counted = {
        fault: [sum(len(find(t)) for t in corpus) for corpus in texts.values()] for fault, find in FAULTS.items()
    }
    counted["(sentences)"] = [sum(len(sentences(t)) for t in corpus) for corpus in texts.values()]
    counted["(words)"] = [sum(len(t.words.split()) for t in corpus) for corpus in texts.values()]
    print(f"{'':16}" + "".join(f"{name:>10}" for name in texts))
    for fault, numbers in counted.items():
        print(f"{fault:16}" + "".join(f"{number:>10}" for number in numbers))


if __name__ == "__main__":
    main()
