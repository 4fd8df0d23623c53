"""``python -m bench.policy [--models M ...] [--rules R ...] [--cores 2] [--seeds 3] [--json FILE] [--chart FILE]``.

Runs every load of every model under every rule, prints what each is beside the batcher as it is, and draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.policy.chart import draw
from bench.policy.loads import LOADS, compare
from bench.policy.models import MODELS
from bench.policy.rules import GROWING, RULES

WIDTH = 110  # where there is no terminal
Results = dict[str, dict[str, dict[str, dict[str, float]]]]  # by model, load, rule and figure


def make_table(model: str, loads: dict[str, dict[str, dict[str, float]]]) -> Table:
    """A model's figures: those of the batcher as it is in themselves, the others as ratios to them."""
    table = Table("load", "rule", "answers/s", "p50 ms", "p99 ms", "rows", "lone rows", "large s", title=model)
    for load, rules in loads.items():
        for rule, figures in rules.items():
            suffix = "" if rule == GROWING else "_ratio"
            compared = [f"{figures[name + suffix]:.4g}" for name in ("per_s", "p50_ms", "p99_ms")]
            others = [f"{figures['rows']:.1f}", f"{figures['lone_rows']:.2f}", f"{figures['large_s']:.2f}"]
            table.add_row(load, rule, *compared, *others)
            load = ""
        table.add_section()
    return table


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy", description="Batching rules, simulated.")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--rules", nargs="+", choices=tuple(RULES), default=list(RULES), metavar="NAME")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--chart", type=Path, help="an .svg, .png or .pdf")
    return parser.parse_args()


def main() -> None:
    """Simulate, print, write, draw."""
    options = parse()
    rules = list(dict.fromkeys([GROWING, *options.rules]))
    turns = [(model, load) for model in options.models for load in LOADS]
    results: Results = {model: {} for model in options.models}
    for model, load in track(turns, "simulating", console=Console(stderr=True), transient=True):
        results[model][load.title] = compare(model, load, rules, options.cores, options.seeds)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for model, loads in results.items():
        console.print(make_table(model, loads))
    command = f"python -m bench.policy --cores {options.cores} --seeds {options.seeds}"
    told = {"command": command, "date": datetime.now(UTC).date().isoformat(), "results": results}
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.chart:
        draw(told, options.chart)


if __name__ == "__main__":
    main()
