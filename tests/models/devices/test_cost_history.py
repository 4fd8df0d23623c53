"""Readings of costs that are kept from start to start."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from layertap.models.catalog.catalog import Costs
from layertap.models.devices import costs
from layertap.models.devices.costs import MAX_READINGS, ForwardSeconds, add_reading, locate_history, make_costs
from tests.conftest import net_spec
from tests.loading import load_model

USUAL = ForwardSeconds(one=0.25, per_row=0.125, speedup=1.5)
DISTURBED = ForwardSeconds(one=4.0, per_row=2.0, speedup=0.5)
GOOD = {"one": 0.25, "per_row": 0.125, "speedup": 1.5}
FIGURES = (0, -1, None, "x", [], float("nan"), float("inf"), 10**400)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a history is kept; neither the file nor its folder is there yet."""
    return tmp_path / "costs" / "model.json"


def test_noise_is_outvoted(path: Path) -> None:
    """One disturbed load decides nothing, once there are others."""
    assert add_reading(path, DISTURBED) == [DISTURBED]
    add_reading(path, USUAL)
    readings = add_reading(path, USUAL)
    assert readings == [DISTURBED, USUAL, USUAL]
    assert make_costs(readings, 1) == Costs(base=0.125, per_row=0.125, row_bytes=1, speedup=1.5)


def test_old_readings_go(path: Path) -> None:
    """The newest count: what has changed since the others is found out."""
    for _ in range(MAX_READINGS):
        add_reading(path, DISTURBED)
    for _ in range(MAX_READINGS - 1):
        add_reading(path, USUAL)
    assert add_reading(path, USUAL) == [USUAL] * MAX_READINGS


@pytest.mark.parametrize(("speedup", "kept"), [(1.1, 1.0), (0.5, 1.0), (1.5, 1.5)])
def test_speedup_that_does_not_pay(speedup: float, kept: float) -> None:
    """A row runs on one core where all are hardly quicker."""
    assert make_costs([replace(USUAL, speedup=speedup)], 1).speedup == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\xff",
        "{}",
        "[1]",
        "[{}]",
        *(json.dumps([GOOD | {name: value}]) for name in GOOD for value in FIGURES),
        json.dumps([GOOD | {"more": 1}]),
        json.dumps([GOOD] * 10_000),
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_damaged_file(path: Path, text: str) -> None:
    """What is no list of readings counts for nothing, and is put right."""
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    assert add_reading(path, USUAL) == [USUAL]
    assert add_reading(path, USUAL) == [USUAL] * 2


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_file_that_can_not_be_read(path: Path, make: Callable[[Path], None]) -> None:
    """It is not replaced: who can read it has more readings."""
    path.parent.mkdir()
    make(path)
    assert add_reading(path, USUAL) == [USUAL]
    assert list(path.parent.iterdir()) == [path]


def test_shared_folder(path: Path) -> None:
    """Whoever may write to the folder may read its files."""
    path.parent.mkdir()
    path.parent.chmod(0o770)
    add_reading(path, USUAL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    """A model loads although nothing can be kept."""
    (tmp_path / "costs").touch()
    assert add_reading(tmp_path / "costs" / "model.json", USUAL) == [USUAL]


def test_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has so many files, and no more; no half of one is left."""
    monkeypatch.setattr(costs, "MAX_FILES", 3)
    for number in range(5):
        add_reading(locate_history(tmp_path, number), USUAL)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3


def test_models(tmp_path: Path) -> None:
    """A model finds its own readings again, whatever its weights are; another one has others."""
    spec = net_spec("Chain")
    for each in (spec, replace(spec, weights="random:1"), net_spec("Tied")):
        load_model(each, 1, 1, costs_folder=tmp_path)
    assert sorted(len(json.loads(file.read_bytes())) for file in tmp_path.iterdir()) == [1, 2]
    load_model(spec, 1, 2, costs_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
