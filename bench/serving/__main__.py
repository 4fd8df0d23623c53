"""``python -m bench.serving [--rounds 3] [--loads L ...] [--only K ...] [--connections N ...] [--json FILE]``.

Round after round, load after load: the plain loop, then every server in turn, each alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.machine import described
from bench.serving import loads
from bench.serving.contenders import Vectors
from bench.serving.kinds import KINDS, USUAL, Bench, Lines, vectors
from bench.serving.loads import LOADS, Load
from bench.serving.pictures import written
from bench.serving.report import summary, tables
from bench.serving.server import OVERRIDDEN

TOLD = ("BENCH_", "LAYERTAP_", "OMP_", "GOMP_", "KMP_", "MALLOC_")
WIDTH = 140  # where there is no terminal


def rounds(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Lines]]:
    """The figures of each round, by load and line."""
    pictures = written(folder)
    turns = [(load, name) for load in chosen.loads for name in chosen.only if KINDS[name].suits(LOADS[load])]
    bench = Bench(folder, pictures, expected(chosen.loads, pictures[0]), chosen.connections, chosen.seconds)
    for load, name in track(turns, "preparing", console=Console(stderr=True), transient=True):
        KINDS[name].prepare(bench, LOADS[load])
    found: list[dict[str, Lines]] = [{load: {} for load in chosen.loads} for _ in range(chosen.rounds)]
    every = list(product(found, turns))
    for one, (load, name) in track(every, "measuring", console=Console(stderr=True), transient=True):
        one[load].update(KINDS[name].measure(bench, LOADS[load]))
    return found


def expected(names: Sequence[str], picture: Path) -> dict[str, Vectors]:
    """The picture's vectors of all layers that are asked for, by model."""
    layers: dict[str, dict[str, None]] = {}
    for load in map(LOADS.__getitem__, names):
        layers.setdefault(load.model, {}).update(dict.fromkeys(load.layers))
    return {model: vectors(Load("", model, (tuple(each),)), picture) for model, each in layers.items()}


def parsed() -> argparse.Namespace:
    """The options, all of them possible."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description="Servers beside a plain loop.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(loads.USUAL), metavar="NAME")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement, or more where answers are few")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), metavar="NAME", help=", ".join(KINDS))
    chosen = parser.parse_args()
    if min(chosen.rounds, chosen.seconds, *chosen.connections) < 1:
        parser.error("--rounds, --connections and --seconds are 1 or more")
    lacking = {name: lack for name in chosen.only or USUAL if (lack := KINDS[name].missing())}
    if chosen.only and lacking:
        parser.exit(2, "\n".join(dict.fromkeys(lacking.values())) + "\n")
    for lack in dict.fromkeys(lacking.values()):
        print(f"left out: {lack}", file=sys.stderr)
    chosen.only = [name for name in KINDS if name in (chosen.only or USUAL) and name not in lacking]
    return chosen


def settings() -> dict[str, str]:
    """What the environment sets for servers and threads, without folders and keys."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(TOLD) and name not in OVERRIDDEN and "/" not in value
    }


def command(chosen: argparse.Namespace) -> str:
    """What to type for these results."""
    words = ["python -m bench.serving"]
    for name in ("rounds", "loads", "connections", "seconds", "only"):
        value = getattr(chosen, name)
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def main() -> None:
    """Measure, print, write."""
    chosen = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended then too
    machine = described()
    with tempfile.TemporaryDirectory() as folder:
        results = summary(rounds(chosen, Path(folder)))
    titles = {name: LOADS[name].title for name in chosen.loads}
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(results, titles):
        console.print(table)
    if chosen.json:
        told = {"command": command(chosen), "settings": settings(), "machine": machine, "loads": titles}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({**told, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
