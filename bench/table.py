"""Results of ``bench.serving`` as Markdown: ``python -m bench.table bench/results/FILE.json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.serving.report import Grid, grids, short

RANGED = "ratio"  # the others vary with the machine from round to round, and their ranges say little


def markdown(told: dict[str, Any]) -> Iterator[str]:
    """A table for each load, medians over the rounds; ratios with their range; then the command, date and machine."""
    titles = told.get("loads", {})
    for grid in grids(told["results"]):
        yield f"**{titles.get(grid.load, grid.load)}: {grid.title}**\n"
        yield from _lines(grid)
        yield ""
    machine = told["machine"]
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    yield f"`{told['command']}`, {machine['date']}, {cores}, torch {machine['torch']}"


def _lines(grid: Grid) -> Iterator[str]:
    yield _row(["", *grid.columns])
    yield _row(["---", *("---:" for _ in grid.columns)])
    for name, cells in grid.rows.items():
        shown = [_cell(cell, column == RANGED) for column, cell in zip(grid.columns, cells, strict=True)]
        yield _row([f"`{name}`", *shown])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(figure: dict[str, float] | None, ranged: bool) -> str:
    if figure is None:
        return ""
    middle, least, most = (short(figure[key]) for key in ("median", "min", "max"))
    return f"{middle} ({least} to {most})" if ranged and least != most else middle


def main(words: Sequence[str] | None = None) -> None:
    """Read, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.table", description="Results as Markdown.")
    parser.add_argument("file", type=Path, help="what bench.serving wrote")
    for line in markdown(json.loads(parser.parse_args(words).file.read_text())):
        print(line)


if __name__ == "__main__":
    main()
