"""``layers``, ``check`` and ``plan``: what models are made of, what fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.server import Live
from tests.service.cli.commands import CONFIG, Command


def test_layers(command: Command) -> None:
    """``layers`` shows the tree, each layer with its class and the shape of one row."""
    done = command("layers", "digits")
    assert done.status == 0
    shown = (". Digits 1×10 NC", "conv1 Conv2d 1×32×16×16 NCHW", "2 calls", "pool AdaptiveAvgPool2d 1×64×1×1")
    assert [words for words in shown if words not in " ".join(done.out.split())] == []
    assert all(len(line) <= 100 for line in done.out.splitlines())
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("words", "query"),
    [
        (("--type", "Conv2d", "--functions"), {"type": "Conv2d", "functions": "true"}),
        (("--leaf", "--match", "block2*"), {"leaf": "true", "match": "block2*"}),
    ],
)
def test_filters(command: Command, live: Live, words: tuple[str, ...], query: dict[str, str]) -> None:
    """Filters are the route's: as text the same layers, as JSON the same description."""
    done = command("layers", "digits", *words, "--json")
    wanted = live.client.get("/models/digits/layers", params=query).json()
    found = json.loads(done.out)
    assert found.keys() == wanted.keys()
    assert found["layers"]
    for one, other in zip(found["layers"], wanted["layers"], strict=True):
        measured = {"cost": 0, "share": 0}  # anew each time
        assert {**one, **measured} == {**other, **measured}
    tree = live.client.get("/models/digits/layers", params=query, headers={"Accept": "text/plain"}).text
    for where in ((), ("--url", live.url)):
        assert mask_costs(command("layers", "digits", *words, *where).out) == mask_costs(tree)


def mask_costs(text: str) -> str:
    """A tree without its percentages, which are measured anew each time, and without the spaces beside them."""
    return re.sub(r" *\d+%", " %", text)


RAISING = """
def raising():
    raise ValueError("words of the operator's own code")
"""


@pytest.mark.parametrize("words", [("check",), ("plan",)])
def test_a_factory_that_raises(command: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    """The traceback of the operator's own code is on stderr, and that is where they are told to look."""
    (tmp_path / "own_raising.py").write_text(RAISING)
    warm = "warm: [{layers: [linear], compile: true}]"
    text = CONFIG.replace("tests.service.nets_http:Touchy", "own_raising:raising")
    (tmp_path / "m.yaml").write_text(f"{text}    {warm}\n")
    done = command(*words, "--config", tmp_path / "m.yaml")
    assert done.status == 2
    assert "ValueError: words of the operator's own code" in done.notes
    assert "own_raising.py" in done.notes
    assert "own_raising.py, line 3: raise ValueError(" in done.out + done.notes  # in one line, too
    assert "stderr has the traceback" in done.out + done.notes
    assert "server" not in done.out


def test_plan(command: Command, tmp_path: Path) -> None:
    """``plan`` lists every warm plan, what answers it, and what a row costs; a bad one is told in a line."""
    file = tmp_path / "models.yaml"
    file.write_text(f"{CONFIG}    warm: [{{layers: ['.'], pool: flatten}}]\n")
    done = command("plan", "--config", file)
    assert done.status == 0
    line = next(line for line in done.out.splitlines() if "touchy" in line)
    assert "hooks" in line
    assert "." in line
    file.write_text(f"{CONFIG}    warm: [{{layers: [nowhere]}}]\n")
    bad = command("plan", "--config", file)
    assert bad.status == 2
    assert "nowhere" in bad.notes
    assert "Traceback" not in bad.notes
