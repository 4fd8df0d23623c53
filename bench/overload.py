"""Five times more than a server can bear: ``python -m bench.overload [--model M] [--seconds S] [--json FILE]``.

Closed loop first, which tells the capacity; then an open loop at a multiple of it, whose clients give up after a while
and say so; then one client again, until it is answered as before. All of it on one server, with what
``layertap load`` sends with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.closed_loop import run_closed
from bench.machine import described
from bench.serving.pictures import written
from bench.serving.server import Server, serving
from bench.startup import HOST
from layertap.service.load.run import REFUSALS, Sender, list_percentiles, summarize
from layertap.service.load.scenario import RequestKind, make_scenario

NORMAL = 2.0  # times the latency before: an answer that took no longer is as before
PROBES = 5
RECOVERY_S = 60.0
REFUSED = (429,)


def make_kind(model: str, picture: Path, patience: float | None = None) -> RequestKind:
    """One picture for one layer; its client waits so many seconds."""
    headers = {} if patience is None else {"X-Request-Timeout": f"{patience:g}"}
    path = f"/extract?model={model}&layers=avgpool&pool=flatten&format=npy"
    entry = {"name": "avgpool", "path": path, "picture": picture.name, "headers": headers}
    return make_scenario([entry], picture.parent)[0]


def measured(server: Server, picture: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of the three phases."""
    url = f"http://{HOST}:{server.port}"
    one = make_kind(chosen.model, picture, chosen.patience)
    before = [run_closed(one, url, 1, requests=PROBES).latency_ms for _ in range(2)][-1]  # the first ones warm up
    patient = make_kind(chosen.model, picture)
    run_closed(patient, url, chosen.connections, requests=2 * chosen.connections)
    capacity = run_closed(patient, url, chosen.connections, seconds=chosen.seconds).goodput
    rate = chosen.times * capacity
    flood, begun, cpu = Sender([one], url, allow=REFUSED), time.perf_counter(), time.process_time()
    asyncio.run(flood.send_at(rate, chosen.seconds))
    elapsed_s = time.perf_counter() - begun
    over = summarize(flood.samples, elapsed_s)
    cpu = (time.process_time() - cpu) / elapsed_s
    recovered = recovery(url, one, before.get("p50", 0.0))
    return {
        "capacity": capacity,
        "rate": rate,
        "goodput": over.goodput,
        "ratio": over.goodput / capacity,
        "refusal_ms": list_percentiles(each.seconds for each in flood.samples if each.outcome in REFUSALS),
        "outcomes": over.outcomes,
        "latency_ms": over.latency_ms,
        "idle_p50_ms": before.get("p50"),
        "normal_after_s": recovered,
        "client_cpu": round(cpu, 3),
    }


def recovery(url: str, one: RequestKind, before_ms: float) -> float | None:
    """Seconds from the end of the flood until answers take as long as before; None if they never do."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < RECOVERY_S:
        probe = run_closed(one, url, 1, requests=1)
        if probe.goodput and probe.latency_ms["p50"] <= NORMAL * before_ms:
            return time.perf_counter() - begun
    return None


def table(results: dict[str, Any]) -> Table:
    """For people."""
    shown = Table("figure", "value", title="Overload")
    for name, value in results.items():
        shown.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return shown


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description="More than a server can bear.")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the closed and of the open loop")
    parser.add_argument("--connections", type=int, default=16, help="of the closed loop")
    parser.add_argument("--times", type=float, default=5.0, help="how many times the capacity")
    parser.add_argument("--patience", type=float, default=4.0, help="seconds that a client of the flood waits")
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args()
    machine = described()
    with tempfile.TemporaryDirectory() as folder:
        picture = written(Path(folder))[0]
        with serving([chosen.model], Path(folder)) as server:
            results = measured(server, picture, chosen)
    Console().print(table(results))
    if chosen.json:
        words = {name: value for name, value in vars(chosen).items() if name != "json"}
        command = "python -m bench.overload " + " ".join(f"--{name} {value}" for name, value in words.items())
        chosen.json.write_text(
            json.dumps({"command": command, "machine": machine, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
