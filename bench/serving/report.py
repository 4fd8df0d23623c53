"""Figures of several rounds: medians and ranges, as tables for people and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from rich.table import Column, Table

from bench.serving.kinds import Lines

Results = dict[str, dict[str, dict[str, Any]]]  # by model, by line


@dataclass(frozen=True)
class Shown:
    """A table: which lines it has, by the first word of their names, and which figures, with their headings."""

    title: str
    lines: frozenset[str]
    columns: dict[str, str]


def summary(rounds: Sequence[dict[str, Lines]]) -> Results:
    """Of each figure the median and the range, and the figures of all rounds."""
    return {
        model: {name: _summed([each[model][name] for each in rounds]) for name in lines}
        for model, lines in rounds[0].items()
    }


def tables(results: Results) -> Iterator[Table]:
    """For each model a table of each group of lines of which there are any."""
    for (model, lines), shown in product(results.items(), SHOWN):
        rows = {name: line["figures"] for name, line in lines.items() if name.split()[0] in shown.lines}
        if rows:
            table = Table(Column(no_wrap=True), *shown.columns.values(), title=f"{model}, {shown.title}")
            for name, figures in rows.items():
                table.add_row(name, *(_text(figures.get(column)) for column in shown.columns))
            yield table


def _summed(rounds: list[dict[str, float]]) -> dict[str, Any]:
    figures = {name: _spread([each[name] for each in rounds]) for name in rounds[0]}
    return {"figures": figures, "rounds": [{name: _short(value) for name, value in each.items()} for each in rounds]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": _short(median(values)), "min": _short(min(values)), "max": _short(max(values))}


def _short(value: float) -> float:
    """Four digits say more than enough."""
    return float(f"{value:.4g}")


def _text(figure: dict[str, float] | None) -> str:
    """The median, and below it the range."""
    if figure is None:
        return ""
    middle, least, most = (f"{float(f'{figure[key]:.3g}'):g}" for key in ("median", "min", "max"))
    return middle if least == most else f"{middle}\n({least}-{most})"


SHOWN = (
    Shown(
        "under load",
        frozenset({"loop", "server", "warm", "uniform", "mixed"}),
        {
            "per_s": "images/s",
            "ratio": "ratio",
            "p50_ms": "p50 ms",
            "p99_ms": "p99 ms",
            "cpu_ms": "CPU-ms",
            "peak_mib": "MiB",
            "failed": "failed",
        },
    ),
    Shown(
        "one image at a time",
        frozenset({"bare", "passive", "one"}),
        {"p50_ms": "p50 ms", "forward_ms": "forward ms", "ratio": "ratio", "beyond_ms": "beyond, ms"},
    ),
    Shown(
        "stopping early",
        frozenset({"early"}),
        {
            "forward_ms": "forward ms",
            "wall_ms": "wall ms",
            "catalogue_share": "catalogue",
            "forward_share": "measured",
            "forward_ratio": "ratio",
            "wall_ratio": "wall ratio",
        },
    ),
)
