"""Figures of several rounds: medians and ranges, as tables for people and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from rich.table import Column, Table

from bench.serving.client import Figures
from bench.serving.contenders import CONTENDERS
from bench.serving.kinds import Lines

LOOP, GRAPH, WARM = "loop", "graph", "warm"
Results = dict[str, dict[str, dict[str, Any]]]  # by load, by line


@dataclass(frozen=True)
class Shown:
    """A table: which lines it has, by the first word of their names, and which figures, with their headings."""

    title: str
    lines: frozenset[str]
    columns: dict[str, str]

    def holds(self, name: str) -> bool:
        """Whether a line is of this table."""
        return contender(name) in self.lines


@dataclass(frozen=True)
class Grid:
    """A table before it is printed: its load, what it is about, headings, and figures by line."""

    load: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[dict[str, float] | None]]


def contender(line: str) -> str:
    """Whose line it is."""
    return line.split()[0]


def summary(rounds: Sequence[dict[str, Lines]]) -> Results:
    """Of each figure the median and the range, and the figures of all rounds."""
    beside = [{load: related(lines) for load, lines in each.items()} for each in rounds]
    return {
        load: {name: _summed([each[load][name] for each in beside]) for name in lines}
        for load, lines in beside[0].items()
    }


def related(lines: Lines) -> Lines:
    """Lines of a round, those under load with their images per second and CPU time beside the loop's of that round."""
    loop = lines.get(LOOP)
    if loop is None:
        return lines
    return {name: figures | _beside(name, figures, loop, lines.get(GRAPH)) for name, figures in lines.items()}


def _beside(name: str, figures: Figures, loop: Figures, graph: Figures | None) -> Figures:
    if name == LOOP or "per_s" not in figures:
        return {}
    beside = {"ratio": figures["per_s"] / loop["per_s"], "beyond_cpu_ms": figures["cpu_ms"] - loop["cpu_ms"]}
    if contender(name) == WARM and graph is not None:
        beside["graph_ratio"] = figures["per_s"] / graph["per_s"]
    return beside


def grids(results: Results) -> Iterator[Grid]:
    """For each load a table of each group of lines of which there are any."""
    for (load, lines), shown in product(results.items(), SHOWN):
        rows = {name: line["figures"] for name, line in lines.items() if shown.holds(name)}
        columns = {
            key: title for key, title in shown.columns.items() if any(key in figures for figures in rows.values())
        }
        if rows and columns:
            cells = {name: [figures.get(column) for column in columns] for name, figures in rows.items()}
            yield Grid(load, shown.title, tuple(columns.values()), cells)


def tables(results: Results, titles: Mapping[str, str]) -> Iterator[Table]:
    """For people, in a terminal."""
    for grid in grids(results):
        table = Table(Column(no_wrap=True), *grid.columns, title=f"{titles.get(grid.load, grid.load)}: {grid.title}")
        for name, cells in grid.rows.items():
            table.add_row(name, *map(_text, cells))
        yield table


def short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{float(f'{value:.3g}'):g}"


def _summed(rounds: list[Figures]) -> dict[str, Any]:
    numbers = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    figures = {name: _spread([each[name] for each in rounds]) for name in numbers}
    return {"figures": figures, "rounds": [{name: _rounded(value) for name, value in each.items()} for each in rounds]}


def _rounded(value: Any) -> Any:
    """Numbers as short as they are of use, those in lists and mappings too."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return _short(value) if isinstance(value, float) else value


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": _short(median(values)), "min": _short(min(values)), "max": _short(max(values))}


def _short(value: float) -> float:
    """Four digits say more than enough."""
    return float(f"{value:.4g}")


def _text(figure: dict[str, float] | None) -> str:
    """The median, and below it the range."""
    if figure is None:
        return ""
    middle, least, most = (short(figure[key]) for key in ("median", "min", "max"))
    return middle if least == most else f"{middle}\n({least}-{most})"


DISTURBANCE = {"steal": "steal", "others": "others"}
SHOWN = (
    Shown(
        "under load",
        frozenset({LOOP, GRAPH, *CONTENDERS, "uniform", "mixed"}),
        {
            "per_s": "images/s",
            "ratio": "ratio",
            "graph_ratio": "to graph",
            "p50_ms": "p50 ms",
            "p99_ms": "p99 ms",
            "cpu_ms": "CPU-ms",
            "beyond_cpu_ms": "beyond",
            "peak_mib": "MiB",
            "start_s": "start s",
            "failed": "failed",
            **DISTURBANCE,
        },
    ),
    Shown(
        "rows per forward",
        frozenset({"server", "threads", "warm"}),
        {
            "rows_mean": "mean",
            "rows_median": "median, at most",
            "single_forwards": "forwards of one row",
            "single_rows": "rows alone",
        },
    ),
    Shown(
        "one image at a time",
        frozenset({"bare", "passive", "one"}),
        {"p50_ms": "p50 ms", "forward_ms": "forward ms", "ratio": "ratio", "beyond_ms": "beyond, ms", **DISTURBANCE},
    ),
    Shown(
        "stopping early",
        frozenset({"early"}),
        {
            "forward_ms": "forward ms",
            "wall_ms": "wall ms",
            "catalog_share": "catalog",
            "forward_share": "measured",
            "forward_ratio": "ratio",
            "wall_ratio": "wall ratio",
            **DISTURBANCE,
        },
    ),
)
