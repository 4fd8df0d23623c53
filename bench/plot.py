"""Throughput beside the plain loop, drawn: ``python -m bench.plot bench/results/FILE.json --out docs/bench.svg``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.serving.report import LOOP

INK = "#808080"  # to be read on white as well as on black
COLOURS = ("#8ecae6", "#2f8fc4", "#e08a1e", "#9a6fb0")  # by number of connections, fewest first
BAR, WIDTH, HEAD = 0.24, 8.0, 0.75  # inches
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "layertap",  # the same figures give the same file
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
}


@dataclass(frozen=True)
class Bar:
    """A ratio's median and range."""

    median: float
    least: float
    most: float


Bars = dict[str, dict[int, Bar]]  # of a load: by contender and number of connections


def ratios(lines: Mapping[str, Any]) -> Bars:
    """What is drawn of a load: lines such as ``server 16`` that have a ratio to the loop."""
    found: Bars = {}
    for line, told in lines.items():
        name, _, connections = line.partition(" ")
        ratio = told["figures"].get("ratio")
        if ratio and connections.isdecimal() and name != LOOP:
            found.setdefault(name, {})[int(connections)] = Bar(ratio["median"], ratio["min"], ratio["max"])
    return found


def drawn(told: Mapping[str, Any]) -> Figure:
    """A panel for each load, a group of bars for each contender; SystemExit where no line has a ratio."""
    panels = {load: bars for load, lines in told["results"].items() if (bars := ratios(lines))}
    if not panels:
        raise SystemExit("nothing to draw: no line has a ratio to the loop")
    numbers = sorted({number for bars in panels.values() for group in bars.values() for number in group})
    colours = {number: COLOURS[place % len(COLOURS)] for place, number in enumerate(numbers)}
    heights = [HEAD + BAR * sum(len(group) + 1 for group in bars.values()) for bars in panels.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + HEAD), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (load, bars) in zip(axes, panels.items(), strict=True):
        axis.set_title(told.get("loads", {}).get(load, load), loc="left", fontweight="bold")
        _panel(axis, bars, colours)
    axes[-1].set_xlabel("images a second, as a multiple of the plain loop in the same round")
    handles = [mpl.patches.Patch(color=colour) for colour in colours.values()]
    figure.legend(handles, [f"{number} connections" if number > 1 else "1 connection" for number in numbers],
                  loc="outside upper right", ncols=len(numbers), frameon=False)  # fmt: skip
    return figure


def _panel(axis: Axes, bars: Bars, colours: Mapping[int, str]) -> None:
    """Groups from top to bottom, the fewest connections uppermost in each."""
    place, ticks = 0.0, {}
    for name, group in bars.items():
        ticks[name] = place + (len(group) - 1) / 2
        for number, bar in sorted(group.items()):
            reach = [[bar.median - bar.least], [bar.most - bar.median]]
            axis.barh(place, bar.median, 0.9, color=colours[number], xerr=reach, ecolor=INK)
            axis.annotate(
                f"{bar.median:.2f}", (bar.most, place), (4, 0), textcoords="offset points", va="center", size=8
            )
            place += 1
        place += 1
    axis.axvline(1.0, color=INK, linestyle="--", linewidth=1)
    axis.set_yticks(list(ticks.values()), list(ticks))
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def main(words: Sequence[str] | None = None) -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description="Throughput beside the plain loop.")
    parser.add_argument("file", type=Path, help="what bench.serving wrote")
    parser.add_argument("--out", type=Path, required=True, help="an .svg, .png or .pdf")
    parser.add_argument("--loads", nargs="+", help="loads to draw; all of them without it")
    chosen = parser.parse_args(words)
    told = json.loads(chosen.file.read_text())
    results = {load: lines for load, lines in told["results"].items() if chosen.loads is None or load in chosen.loads}
    with mpl.rc_context(STYLE):
        figure = drawn(told | {"results": results})
        figure.savefig(chosen.out, transparent=True, metadata={"Date": None} if chosen.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
