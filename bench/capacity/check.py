"""A real server under load beside the formula and the simulation, whose costs are measured on it in the same round."""

from __future__ import annotations

import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.capacity.costs import Fleet, ImageCosts, Machine
from bench.capacity.formula import find_bottleneck, get_limits
from bench.capacity.simulation import Simulated, SimulatedFleet
from bench.closed_loop import run_closed
from bench.machine import TICK_S, CpuMeter
from bench.serving.metrics import get_rows_per_forward, read_batch_rows
from bench.serving.pictures import written
from bench.serving.server import TIMES, Server, read_stat, serving
from bench.startup import HOST
from layertap.service.load.scenario import RequestKind, make_scenario

MANY = 16
SHAPE = [3, 224, 224]
WARM_UP = 20
COST_CONNECTIONS = 4
SIMULATED = 4000
Figures = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """CPU seconds of an image: of the server's own process and of its workers; rows of a forward, on average."""

    own_s: float
    workers_s: float
    rows: float


def check(model: str, cores: int, connections: Sequence[int], rounds: int, seconds: float) -> list[Figures]:
    """Each round's costs, and for each load what was measured and what formula and simulation say of it."""
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder))
        kinds = make_kinds(model, Path(folder))
        with serving([model], Path(folder)) as server:
            return [run_round(server, kinds, cores, connections, seconds) for _ in range(rounds)]


def make_kinds(model: str, folder: Path) -> Mapping[str, RequestKind]:
    """Requests of one picture of the folder, of many, and of a row that need not be decoded."""
    path = f"/extract?model={model}&layers=avgpool&pool=flatten&format=npy"
    row = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    tensor = {"data": b64encode(row.tobytes()).decode(), "dtype": "float32", "shape": SHAPE}
    sources: dict[str, Any] = {
        "one": {"picture": "."},
        "many": {"picture": ".", "inputs": MANY},
        "row": {"json": {"inputs": [{"tensor": tensor}]}},
    }
    entries = [{"name": name, "path": path, **source} for name, source in sources.items()]
    return {kind.name: kind for kind in make_scenario(entries, folder)}


def run_round(
    server: Server, kinds: Mapping[str, RequestKind], cores: int, connections: Sequence[int], seconds: float
) -> Figures:
    """Costs first, then loads."""
    costs = make_costs(*(measure_cost(server, kinds[name], seconds) for name in ("one", "many", "row")))
    loads = [compare(server, kinds["one"], costs, cores, number, seconds) for number in connections]
    return {"costs_ms": describe_costs(costs), "loads": loads}


def measure_cost(server: Server, kind: RequestKind, seconds: float) -> Cost:
    """What an image takes while a few connections ask: CPU time, which others on the machine change little."""
    url = get_url(server)
    run_closed(kind, url, COST_CONNECTIONS, requests=WARM_UP)
    own, all_, rows = read_own_s(server), server.cpu_s(), read_batch_rows(server.port)
    images = run_all(kind, url, COST_CONNECTIONS, seconds) * kind.inputs
    own, all_ = read_own_s(server) - own, server.cpu_s() - all_
    per_forward = get_rows_per_forward(rows, read_batch_rows(server.port))
    return Cost(own / images, (all_ - own) / images, per_forward["rows_mean"])


def make_costs(one: Cost, many: Cost, row: Cost) -> ImageCosts:
    """The parts of a forward by forwards of two sizes, decoding by what a picture takes more than a row."""
    base = max(0.0, (one.workers_s - many.workers_s) / (1 / one.rows - 1 / many.rows))
    per_row = max(0.0, row.workers_s - base / row.rows)
    decode = max(0.0, one.workers_s - base / one.rows - per_row)
    return ImageCosts(decode, one.own_s, base, per_row)


def compare(
    server: Server, kind: RequestKind, costs: ImageCosts, cores: int, connections: int, seconds: float
) -> Figures:
    """One load, measured; and what is said of it for the cores that the server had, others using the rest."""
    url = get_url(server)
    run_closed(kind, url, connections, requests=WARM_UP)
    meter, rows = CpuMeter(server.cpu_s), read_batch_rows(server.port)
    total = run_closed(kind, url, connections, seconds=seconds)
    shares = meter.get_shares()
    measured_rows = get_rows_per_forward(rows, read_batch_rows(server.port))["rows_mean"]
    available = cores * max(1 - shares["steal"] - shares["others"], 0.05)
    slowed = costs.slow_down(cores / available)
    _, formula = find_bottleneck(get_limits(slowed, Machine(cores), min(measured_rows, costs.max_rows)))
    simulated = SimulatedFleet(slowed, Fleet(Machine(cores)), SIMULATED, 0).run_closed(connections)
    return {
        "connections": connections,
        "cores_available": round(available, 2),
        **shares,
        **describe(total.goodput, total.latency_ms, measured_rows, formula, simulated),
    }


def describe(measured: float, latency: dict[str, float], rows: float, formula: float, simulated: Simulated) -> Figures:
    """Measured beside said, and their ratios."""
    return {
        "measured": {"per_second": measured, "p50_ms": latency["p50"], "p99_ms": latency["p99"], "rows": rows},
        "formula": {"per_second": formula, "ratio": formula / measured},
        "simulated": {
            "per_second": simulated.per_second,
            "ratio": simulated.per_second / measured,
            "p50_ms": 1000 * simulated.p50_s,
            "p99_ms": 1000 * simulated.p99_s,
            "rows": simulated.rows,
        },
    }


def describe_costs(costs: ImageCosts) -> dict[str, float]:
    """Milliseconds of an image."""
    names = ("decode_s", "front_s", "forward_base_s", "forward_row_s")
    return {name.removesuffix("_s"): round(1000 * getattr(costs, name), 3) for name in names}


def run_all(kind: RequestKind, url: str, connections: int, seconds: float) -> int:
    """How many requests were answered; SystemExit where one was not."""
    total = run_closed(kind, url, connections, seconds=seconds)
    if total.failed or not total.requests:
        raise SystemExit(f"not all was answered: {total}")
    return total.requests


def read_own_s(server: Server) -> float:
    """CPU seconds so far of the server's own process."""
    return sum(map(int, read_stat(server.process.pid)[TIMES])) * TICK_S


def get_url(server: Server) -> str:
    """Where it answers."""
    return f"http://{HOST}:{server.port}"


def summarize(rounds: Sequence[Figures]) -> Iterator[Figures]:
    """For each load medians over the rounds, with the range of the ratios."""
    for place, first in enumerate(rounds[0]["loads"]):
        loads = [each["loads"][place] for each in rounds]

        def middle(get: Callable[[Figures], float], loads: Sequence[Figures] = loads) -> float:
            return median(map(get, loads))

        ratios = {name: sorted(each[name]["ratio"] for each in loads) for name in ("formula", "simulated")}
        yield {
            "connections": first["connections"],
            "cores_available": middle(lambda it: it["cores_available"]),
            "measured": {name: middle(lambda it, n=name: it["measured"][n]) for name in first["measured"]},
            "simulated": {name: middle(lambda it, n=name: it["simulated"][n]) for name in first["measured"]},
            "formula": middle(lambda it: it["formula"]["per_second"]),
            "ratios": {name: [median(values), values[0], values[-1]] for name, values in ratios.items()},
        }
