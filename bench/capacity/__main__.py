"""``python -m bench.capacity plan FILE | simulate FILE | check | index``: machines for a rate, and how true that is."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bench.capacity.costs import Fleet, ImageCosts, Machine
from bench.capacity.formula import TARGET, count_machines, find_bottleneck, get_index_bytes_s, get_limits
from bench.capacity.simulation import SimulatedFleet
from bench.machine import described

WIDTH = 130  # where there is no terminal
MAX_SIMULATED = 100  # machines: two drawn by lot are the same of a hundred and of thousands
IMAGES_A_MACHINE = 1000


def read_plan(path: Path) -> tuple[ImageCosts, Machine]:
    """The costs and the machine that a YAML file has."""
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    return ImageCosts(**told["costs"]), Machine(**told["machine"])


def plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """What each part of a machine bears; machines for each rate; what the simulation makes of them."""
    costs, machine = read_plan(chosen.file)
    limits = get_limits(costs, machine)
    print_table("One machine", ["part", "images/s"], [[name, f"{limit:,.0f}"] for name, limit in limits.items()])
    fleets = [plan_fleet(costs, machine, rate, chosen.images) for rate in chosen.rates]
    rows = [
        [f"{it['rate']:,}", f"{it['machines']:,}", f"{it['index_mb_s']:,.0f}", *told(it["simulated"])] for it in fleets
    ]
    columns = ["images/s", "machines", "index MB/s", "simulated: images/s", "p50 ms", "p99 ms", "busiest part"]
    print_table(f"Machines of which no part is busier than {TARGET:.0%}", columns, rows)
    return {"limits": limits, "bottleneck": find_bottleneck(limits)[0], "fleets": fleets}


def plan_fleet(costs: ImageCosts, machine: Machine, rate: int, images: int) -> dict[str, Any]:
    """Machines for a rate, and a simulation of them, or of so many at their share of the rate as it takes."""
    machines = count_machines(costs, machine, rate)
    shown, index = min(machines, MAX_SIMULATED), get_index_bytes_s(costs, rate) / TARGET
    fleet = Fleet(machine, shown, index * shown / machines if index else None)
    simulated = SimulatedFleet(costs, fleet, max(images, IMAGES_A_MACHINE * shown), 0).run_open(rate * shown / machines)
    return {
        "rate": rate,
        "machines": machines,
        "index_mb_s": get_index_bytes_s(costs, rate) / 1e6,
        "simulated": {
            "machines": shown,
            "per_second": simulated.per_second,
            "p50_ms": 1000 * simulated.p50_s,
            "p99_ms": 1000 * simulated.p99_s,
            "busy": simulated.busy,
        },
    }


def told(simulated: Mapping[str, Any]) -> list[str]:
    """Cells of a table."""
    name, share = max(simulated["busy"].items(), key=lambda part: part[1])
    cells = [f"{simulated['per_second']:,.0f} by {simulated['machines']:,}"]
    return [*cells, f"{simulated['p50_ms']:.1f}", f"{simulated['p99_ms']:.1f}", f"{name}, {share:.0%}"]


def simulate(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """One machine, and clients of which each waits for its answer."""
    costs, machine = read_plan(chosen.file)
    machine = replace(machine, cores=chosen.cores or machine.cores)
    simulated = [SimulatedFleet(costs, Fleet(machine), chosen.images, 0).run_closed(each) for each in chosen.clients]
    rows = [
        [str(clients), f"{it.per_second:,.0f}", f"{1000 * it.p50_s:.1f}", f"{1000 * it.p99_s:.1f}", f"{it.rows:.1f}"]
        for clients, it in zip(chosen.clients, simulated, strict=True)
    ]
    print_table(f"{machine.cores} cores", ["clients", "images/s", "p50 ms", "p99 ms", "rows a forward"], rows)
    return [asdict(each) for each in simulated]


def check_costs(chosen: argparse.Namespace) -> dict[str, Any]:
    """A real server beside formula and simulation."""
    from bench.capacity.check import check, summarize

    rounds = check(chosen.model, os.cpu_count() or 1, chosen.connections, chosen.rounds, chosen.seconds)
    loads = list(summarize(rounds))
    rows = [
        [
            str(it["connections"]),
            f"{it['cores_available']:.2f}",
            *(f"{it[name]['per_second']:.0f}" for name in ("measured", "simulated")),
            *("{:.2f} ({:.2f} to {:.2f})".format(*it["ratios"][name]) for name in ("simulated", "formula")),
            *(f"{it[name]['rows']:.1f}" for name in ("measured", "simulated")),
            *(f"{it[name]['p50_ms']:.0f}" for name in ("measured", "simulated")),
        ]
        for it in loads
    ]
    columns = ["clients", "cores had", "images/s", "simulated", "ratio", "formula's ratio", "rows", "simulated"]
    print_table(f"{chosen.model}: {rounds[-1]['costs_ms']} ms", [*columns, "p50 ms", "simulated"], rows)
    return {"loads": loads, "rounds": rounds}


def write_index(chosen: argparse.Namespace) -> dict[str, Any]:
    """Index writes."""
    from bench.capacity.index import measure_writes

    writes = measure_writes(chosen.rows, chosen.dimensions)
    rows = [[name, f"{it['rows_per_s']:,}", f"{it['mb_per_s']:,}"] for name, it in writes.items()]
    print_table(f"Vectors of {chosen.dimensions} float32", ["to", "rows/s", "MB/s"], rows)
    return writes


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """For people."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description=__doc__)
    commands = parser.add_subparsers(required=True)
    planning = commands.add_parser("plan", help="machines for a rate")
    planning.add_argument("file", type=Path, help="costs and a machine, see bench/capacity/examples")
    planning.add_argument("--rates", type=int, nargs="+", default=[100, 1000, 10_000], help="images a second")
    planning.add_argument("--images", type=int, default=5000, help="of a simulation, at least")
    planning.set_defaults(do=plan)
    simulating = commands.add_parser("simulate", help="one machine and clients that wait for their answers")
    simulating.add_argument("file", type=Path, help="as of plan")
    simulating.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    simulating.add_argument("--cores", type=int, help="in place of the file's")
    simulating.add_argument("--images", type=int, default=5000)
    simulating.set_defaults(do=simulate)
    checking = commands.add_parser("check", help="a real server beside formula and simulation")
    checking.add_argument("--model", default="mobilenet_v3_small")
    checking.add_argument(
        "--connections", type=int, nargs="+", default=[16, 64], help="so many that all cores are busy"
    )
    checking.add_argument("--rounds", type=int, default=3)
    checking.add_argument("--seconds", type=float, default=4.0, help="of each measurement, five a round")
    checking.set_defaults(do=check_costs)
    writing = commands.add_parser("index", help="vectors written a second")
    writing.add_argument("--rows", type=int, default=20_000)
    writing.add_argument("--dimensions", type=int, default=2048)
    writing.set_defaults(do=write_index)
    for command in (planning, simulating, checking, writing):
        command.add_argument("--json", type=Path, help="a file for the results")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Compute or measure, print, write."""
    chosen = parse(words)
    machine = described()
    results = chosen.do(chosen)
    if chosen.json:
        command = shlex.join(["python", "-m", "bench.capacity", *(sys.argv[1:] if words is None else words)])
        chosen.json.write_text(
            json.dumps({"command": command, "machine": machine, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
