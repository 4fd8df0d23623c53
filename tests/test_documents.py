"""The documents point to what is there: files, headings, classes, settings, commands and their options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from layertap.models.grammar import SOURCES
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import OPERATIONS
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.statistics import STATISTICS
from layertap.models.points import SITES
from layertap.service.cli.main import app
from layertap.service.explain.explanation_methods import METHODS
from layertap.service.formats.table import FORMATS
from layertap.service.settings import Settings

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
TESTS = {each.name for each in (ROOT / "tests").rglob("test_*.py")}
PAST = ROOT / "CHANGELOG.md"  # tells of files that were
FILE = re.compile(r"`((?:models|service|tests|bench|fuzz|examples|docs)/[\w./-]+\.\w+)`")
NOUN = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|.*\| `([\w/]+\.py)` \|$", re.MULTILINE)


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
    """Every link of a document leads to a file, and its anchor to a heading there; files that it names are there."""
    broken = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        goal = (path.parent / name).resolve() if name else path
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    assert broken == []
    named = FILE.findall(prose(path)) if path != PAST else []
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert set(re.findall(r"`(test_\w+\.py)`", prose(path))) <= TESTS


def test_words() -> None:
    """Each class that the architecture names as one of its words stands in the file that it names."""
    words = NOUN.findall(prose(ROOT / "docs/explanation/architecture.md"))
    assert len(words) >= 10
    for names, file in words:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in names.replace("`", "").split(", "):
            assert re.search(rf"^class {name}\b", text, re.MULTILINE), (name, file)


UNITS = {"": 1, "million": 10**6, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_settings() -> None:
    """The configuration's reference has a row for each setting and no others, with the default that the setting has."""
    text = prose(ROOT / "docs/reference/configuration.md")
    told: dict[str, str] = {}
    rows = re.findall(r"^\| ((?:`[A-Z_]+`(?:, )?)+) \|(?: ([^|]*) \|)?", text, re.MULTILINE)
    named = [name.lower() for names, _ in rows for name in re.findall("[A-Z_]+", names)]
    assert sorted(named) == sorted(Settings.model_fields)
    for names, defaults in rows:
        told |= zip(re.findall("[A-Z_]+", names), re.split(r", (?=\S)", defaults.strip()), strict=False)
    fixed = {name: field.default for name, field in Settings.model_fields.items() if not field.default_factory}
    compared = {name: value for name, value in fixed.items() if isinstance(value, int | float | str) and value != ""}
    assert len(compared) > 25
    for name, value in compared.items():
        shown = told[name.upper()]
        if isinstance(value, str):
            assert shown == value, name
        else:
            number, _, unit = shown.partition(" ")
            assert float(number.replace(",", "")) * UNITS[unit] == value, name


def test_commands() -> None:
    """The reference of the command line names every command, and the options of those that have a section."""
    text = prose(ROOT / "docs/reference/command-line.md")
    commands = typer.main.get_command(app).commands
    assert set(re.findall(r"^\| `layertap (\w+)", text, re.MULTILINE)) == set(commands)
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert {"serve", "extract", "load"} <= sections.keys()
    for name in ("serve", "extract", "load"):
        options = {each.opts[0] for each in commands[name].params if each.opts[0].startswith("--")} - {"--help"}
        cells = "\n".join(re.findall(r"^\| ([^|]*) \|", sections[name], re.MULTILINE))
        assert set(re.findall(r"`(--[\w-]+)`", cells)) == options


TABLES = {"site": SITES, "op": OPERATIONS, "objective": OBJECTIVES, "pool": POOLINGS, "statistic": STATISTICS}
TABLES |= {"method": METHODS, "format": FORMATS, "source": SOURCES}


@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str) -> None:
    """Whatever a request or a configuration may name stands in code in the reference."""
    pages = ("http.md", "configuration.md", "command-line.md")
    text = "\n".join((ROOT / "docs/reference" / page).read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"[\w.-]+", " ".join(IN_CODE.findall(text))))
    assert set(TABLES[table]) <= named
