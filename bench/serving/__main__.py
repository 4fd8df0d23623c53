"""``python -m bench.serving [--rounds 3] [--models M ...] [--connections N ...] [--seconds S] [--json FILE]``.

Round after round, model after model: the plain loop, then the server in every way there is in ``kinds.KINDS``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.machine import described
from bench.serving.kinds import KINDS, MIXED, Bench, Lines
from bench.serving.pictures import written
from bench.serving.report import summary, tables
from bench.serving.server import OVERRIDDEN, serving

WITH_WRK = {"server", "warm", "mixed"}


def rounds(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Lines]]:
    """The figures of each round, by model and line; one server for all of them."""
    found: list[dict[str, Lines]] = [{model: {} for model in chosen.models} for _ in range(chosen.rounds)]
    pictures = written(folder)
    with serving(chosen.models, folder, warm="warm" in chosen.only) as server:
        bench = Bench(server, pictures, chosen.connections, chosen.seconds)
        turns = list(product(found, chosen.models, (name for name in KINDS if name in chosen.only)))
        for one, model, name in track(turns, "measuring", console=Console(stderr=True), transient=True):
            one[model].update(KINDS[name](bench, model, one[model]))
    return found


def parsed() -> argparse.Namespace:
    """The options, all of them possible."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description="A server beside a plain loop.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(MIXED), default=list(MIXED), metavar="NAME")
    parser.add_argument("--connections", nargs="+", type=int, default=[16, 64], metavar="N")
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="NAME")
    chosen = parser.parse_args()
    if min(chosen.rounds, chosen.seconds, *chosen.connections) < 1:
        parser.error("--rounds, --connections and --seconds are 1 or more")
    if WITH_WRK & set(chosen.only) and not shutil.which("wrk"):
        parser.exit(2, "wrk is missing: apt-get install wrk, or leave out what needs it by --only loop one early\n")
    return chosen


def settings() -> dict[str, str]:
    """The server's settings from the environment, without folders and keys."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("LAYERTAP_") and name not in OVERRIDDEN and "/" not in value
    }


def command(chosen: argparse.Namespace) -> str:
    """What to type for these results."""
    words = ["python -m bench.serving"]
    for name in ("rounds", "models", "connections", "seconds", "only"):
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
    for table in tables(results):
        Console().print(table)
    if chosen.json:
        told = {"command": command(chosen), "settings": settings(), "machine": machine, "results": results}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
