"""``bench.graphs``: what it writes and prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.graphs.__main__ import main
from bench.graphs.tables import make_tables
from bench.graphs.variants import HOOKS, VARIANTS


def test_tables() -> None:
    """Two tables for each number of rows; what was not measured is left empty."""
    figures = {"ms_per_row": 12.345, "ratio": {"median": 1.5, "min": 1.25, "max": 2.0}, "deviation": 0.00021}
    some, all_ = (dict.fromkeys(names, figures) for names in ((HOOKS, "graph"), VARIANTS))
    lines = list(
        make_tables({"net": {"8": {"variants": some}}, "other": {"1": {"variants": some}, "8": {"variants": all_}}})
    )
    assert [line.partition(":")[0].strip() for line in lines if "**" in line] == [
        *["**Batches of 1"] * 2,
        *["**Batches of 8"] * 2,
    ]
    first, second, third = (line.split(" | ") for line in lines if "1.50 (1.25 to 2.00)" in line)
    assert first == ["| other", "12.3", "1.50 (1.25 to 2.00) |"]
    assert (second[0], third[0]) == ("| net", "| other")
    assert (second.count(""), third.count("")) == (len(VARIANTS) - 3, 0)
    assert sum("2e-04" in line for line in lines) == 3


@pytest.mark.slow
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of hooks, which need no compiler, are added to those in the file."""
    file = tmp_path / "graphs.json"
    words = ["--architectures", "mobilenet_v3_small", "--variants", "hooks, channels_last", "--rounds", "2"]
    for rows in ("1", "2"):
        more = ["--rows", rows, "--seconds", "0", "--folder", str(tmp_path / "graphs"), "--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["bench.graphs", *words, *more])
        main()
    figures = json.loads(file.read_text())["results"]["mobilenet_v3_small"]
    assert list(figures) == ["1", "2"]
    for each in figures.values():
        assert each["turns"] == [1, 1]
        assert each["variants"][HOOKS]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        assert set(each["variants"]) == {HOOKS, "hooks, channels_last"}
    assert "**Batches of 2: " in capsys.readouterr().out
