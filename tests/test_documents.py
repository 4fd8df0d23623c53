"""The documents point to what is there: files, headings, settings and options of the command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "dist", "out") for part in path.relative_to(ROOT).parts)
)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
IN_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
ELSEWHERE = ("https://", "http://", "mailto:")


@cache
def prose(path: Path) -> str:
    """A document without what its fenced blocks hold."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What a link may have after ``#``: the headings as GitHub spells them, a number after those that come again."""
    seen: Counter[str] = Counter()
    names = []
    for heading in HEADING.findall(prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        names.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(names)


def links(path: Path) -> Iterator[str]:
    """What a document links to within the project, pictures included."""
    for target in LINK.findall(IN_CODE.sub("", prose(path))):
        if not target.startswith(ELSEWHERE):
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links(path: Path) -> None:
    """Every relative link of a document leads to a file, and its anchor to a heading there."""
    broken = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        goal = (path.parent / name).resolve() if name else path
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    assert broken == []


def test_documents_are_found() -> None:
    """The documents that the test of links reads are those of the project."""
    names = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert {"README.md", "docs/reference/http.md", "examples/README.md", "bench/README.md"} <= names
