"""The road of a request in docs/explanation/architecture.md: functions that a warm picture calls, in this order."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from bench.calls import KINDS, count_calls, serving_kinds

DOCUMENT = Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md"
NUMBERED = re.compile(r"^(\d+)\. \*\*.*$", re.MULTILINE)
STEP = re.compile(r"(\d+)\. \*\*[\w ]+\*\* — .*`((?:models|service)/[\w/]+\.py)`: `([\w.]+)`( \(worker\))?\.?")
MAX_STEPS = 20


@dataclass(frozen=True)
class Step:
    """A function of the road; ``in_worker``: another process calls it."""

    number: int
    file: str
    function: str
    in_worker: bool


def list_steps() -> list[Step]:
    """The document's list; every numbered line of it is a step."""
    lines = [match.group() for match in NUMBERED.finditer(DOCUMENT.read_text(encoding="utf-8"))]
    found = [STEP.fullmatch(line) for line in lines]
    unread = [line for line, match in zip(lines, found, strict=True) if match is None]
    assert not unread, "these are not written as `1. **name** — what it does. `path.py`: `function``"
    return [Step(int(each[1]), each[2], each[3], bool(each[4])) for each in found if each is not None]


def test_list_is_short() -> None:
    """At most twenty steps, numbered from 1."""
    assert [each.number for each in list_steps()] == list(range(1, len(list_steps()) + 1))
    assert 1 < len(list_steps()) <= MAX_STEPS


def test_steps_exist() -> None:
    """Each file has its function, and does not only import it."""
    for step in list_steps():
        module = importlib.import_module("layertap." + step.file.removesuffix(".py").replace("/", "."))
        function = reduce(getattr, step.function.split("."), module)
        assert (function.__module__, function.__qualname__) == (module.__name__, step.function)


def test_warm_picture_goes_this_way() -> None:
    """Each step of the server's process is called, in the listed order by the first call."""
    with serving_kinds(["jpeg"]) as live:
        called = list(count_calls(live, KINDS["jpeg"]).by_name())
    steps = [(step.file, step.function) for step in list_steps() if not step.in_worker]
    assert [step for step in steps if step not in called] == []
    assert steps == sorted(steps, key=called.index)
