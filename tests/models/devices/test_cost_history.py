"""Readings of costs that are kept from start to start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layertap.models.catalog.catalog import Costs
from layertap.models.devices import cost_history
from layertap.models.devices.cost_history import MAX_READINGS, CostHistory, open_history
from tests.conftest import net_spec
from tests.loading import load_model

USUAL = Costs(base=0.25, per_row=0.125, row_bytes=100, speedup=1.5)
DISTURBED = Costs(base=4.0, per_row=2.0, row_bytes=100, speedup=0.4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a history is kept; neither the file nor its folder is there yet."""
    return tmp_path / "costs" / "model.json"


def test_noise_is_outvoted(path: Path) -> None:
    """One disturbed start decides nothing, once there are others."""
    assert CostHistory(path).update(lambda: DISTURBED).per_row == DISTURBED.per_row
    CostHistory(path).update(lambda: USUAL)
    assert CostHistory(path).update(lambda: USUAL) == USUAL


def test_last_reading(path: Path) -> None:
    """After some starts nothing is measured any more."""
    for _ in range(MAX_READINGS):
        CostHistory(path).update(lambda: USUAL)

    def measure() -> Costs:
        raise AssertionError("it is measured again")

    assert CostHistory(path).update(measure) == USUAL
    assert len(json.loads(path.read_bytes())) == MAX_READINGS


def test_speedup_that_does_not_pay(path: Path) -> None:
    """A row runs on one core where all are hardly quicker."""
    assert CostHistory(path).update(lambda: replace(USUAL, speedup=1.1)).speedup == 1.0


GOOD = {"base": 0.1, "per_row": 0.1, "row_bytes": 1, "speedup": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\xff",
        "{}",
        "[1]",
        "[{}]",
        *(json.dumps([GOOD | {"per_row": value}]) for value in (0, -1, None, "x", [], float("nan"), float("inf"))),
        json.dumps([GOOD | {"more": 1}]),
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_damaged_file(path: Path, text: str) -> None:
    """What is no list of readings is measured anew, and put right."""
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    assert CostHistory(path).update(lambda: USUAL) == USUAL
    assert len(json.loads(path.read_bytes())) == 1


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    """A model loads although nothing can be kept."""
    (tmp_path / "costs").touch()
    assert CostHistory(tmp_path / "costs" / "model.json").update(lambda: USUAL) == USUAL


def test_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has so many files, and no more; no half of one is left."""
    monkeypatch.setattr(cost_history, "MAX_FILES", 3)
    for number in range(5):
        open_history(tmp_path, number).update(lambda: USUAL)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3


def test_models(tmp_path: Path) -> None:
    """A model finds its own readings again, whatever its weights are; another one has others."""
    spec = net_spec("Chain")
    for each in (spec, replace(spec, weights="random:1"), net_spec("Tied")):
        load_model(each, 1, 1, costs_folder=tmp_path)
    assert sorted(len(json.loads(file.read_bytes())) for file in tmp_path.iterdir()) == [1, 2]
    load_model(spec, 1, 2, costs_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
