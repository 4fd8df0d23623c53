"""Figures of graphs as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.graphs.variants import HOOKS, VARIANTS

Figures = dict[str, Any]


def make_tables(results: Mapping[str, Mapping[str, Figures]]) -> Iterator[str]:
    """For each number of rows: what variants gain, with the range over rounds, and how far their values are off."""
    for rows in sorted({int(rows) for sizes in results.values() for rows in sizes}):
        measured = {name: sizes[str(rows)]["variants"] for name, sizes in results.items() if str(rows) in sizes}
        names = [name for name in VARIANTS if name != HOOKS and any(name in figures for figures in measured.values())]
        gains = [
            [
                architecture,
                f"{variants[HOOKS]['ms_per_row']:.3g}",
                *(_format_ratio(variants.get(name)) for name in names),
            ]
            for architecture, variants in measured.items()
        ]
        yield f"**Batches of {rows}: times as many rows a second as `{HOOKS}`**\n"
        yield from _list_lines(["", f"`{HOOKS}`, ms a row", *(f"`{name}`" for name in names)], gains)
        deviations = [
            [architecture, *(_format_deviation(variants.get(name)) for name in names)]
            for architecture, variants in measured.items()
        ]
        yield f"\n**Batches of {rows}: largest difference from `{HOOKS}`, as a share of the largest value**\n"
        yield from _list_lines(["", *(f"`{name}`" for name in names)], deviations)
        yield ""


def _list_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---:|' * (len(titles) - 1)}"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def _format_ratio(figures: Figures | None) -> str:
    if figures is None:
        return ""
    middle, least, most = (f"{figures['ratio'][key]:.2f}" for key in ("median", "min", "max"))
    return f"{middle} ({least} to {most})"


def _format_deviation(figures: Figures | None) -> str:
    return "" if figures is None else f"{figures['deviation']:.0e}"
