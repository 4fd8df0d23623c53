"""``python -m bench.graphs [--architectures A ...] [--variants V ...] [--rows 1 8] [--json FILE]``.

Times each variant of each architecture in turn on one thread and prints what it gains beside hooks in float32. Figures
are added to those in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.graphs.contenders import Contenders, Run
from bench.graphs.tables import Figures, make_tables
from bench.graphs.variants import ARCHITECTURES, HOOKS, VARIANTS
from bench.machine import CpuMeter, described
from layertap.models.devices.devices import use_threads
from layertap.service.allocator import keep_large_blocks

FOLDER = Path.home() / ".cache" / "layertap-bench" / "graphs"


def measure(contenders: Contenders, names: Sequence[str], rows: int, rounds: int, seconds: float) -> Figures:
    """Milliseconds a row and ratios to hooks, by variant, over so many rounds; who else used the cores."""
    runs = {name: contenders.prepare(VARIANTS[name], rows) for name in names}
    meter = CpuMeter(time.process_time)
    with torch.no_grad(), use_threads(1):
        values = {name: run() for name, run in runs.items()}  # memory is allocated, and algorithms are chosen
        turns = [list(_take_turns(runs, seconds / rounds)) for _ in range(rounds)]
    figures = {}
    for name in names:
        ratios = [median(timing[HOOKS] / timing[name] for timing in timings) for timings in turns]
        figures[name] = {
            "ms_per_row": round(median(timing[name] for timings in turns for timing in timings) * 1000 / rows, 3),
            "deviation": compute_deviation(values[name], values[HOOKS]),
            "ratio": {"median": round(median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)},
        }
    return {"turns": [len(timings) for timings in turns], **meter.get_shares(), "variants": figures}


def compute_deviation(values: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    return float(f"{float((values.float() - expected).abs().amax() / expected.abs().amax()):.2g}")


def _take_turns(runs: Mapping[str, Run], seconds: float) -> Iterator[dict[str, float]]:
    """Seconds of each variant, turn by turn, at least one; every other turn goes the other way."""
    end = time.perf_counter() + seconds
    for number in itertools.count():
        if number and time.perf_counter() > end:
            return
        timing = {}
        for name in list(runs) if number % 2 else [*runs][::-1]:
            start = time.perf_counter()
            runs[name]()
            timing[name] = time.perf_counter() - start
        yield timing


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description="What compiled forwards gain.")
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each number of rows of an architecture, at least"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where graphs are kept from run to run")
    parser.add_argument("--compile-only", action="store_true", help="time nothing")
    parser.add_argument("--json", type=Path, help="a file for the results")
    return parser.parse_args()


def main() -> None:
    """Compile, time, write, print."""
    options = parse()
    keep_large_blocks()  # as a server does: without it memory that each forward gets anew is a third of its time
    names = list(dict.fromkeys([HOOKS, *options.variants]))
    results: dict[str, dict[str, Figures]] = {}
    machine: dict[str, object] = described()
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    for architecture in options.architectures:
        contenders = Contenders(architecture, options.folder)
        for rows in options.rows:
            taken = [name for name in names if VARIANTS[name].takes(rows)]
            for name in taken:
                contenders.compile(VARIANTS[name], rows)
            if not options.compile_only:
                figures = measure(contenders, taken, rows, options.rounds, options.seconds)
                results.setdefault(architecture, {})[str(rows)] = figures
    if options.json and not options.compile_only:
        told = {"command": "python -m bench.graphs", "machine": machine, "results": results}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(make_tables(results)))


if __name__ == "__main__":
    main()
