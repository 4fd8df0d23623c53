"""``python -m bench.profile [--cases embedding map] [--connections 16] [--seconds 8] [--json FILE]``.

A server under load: CPU time by what its threads are for, beside the same work done alone, and what each step took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import described
from bench.profile.threads import LOOP, THREADS, Samples, samples, used
from bench.serving.client import Sending, loaded, watched
from bench.serving.contenders import extract
from bench.serving.pictures import written
from bench.serving.server import Server, serving
from bench.startup import LIMIT_S

STEPS = ("parse", "decode", "queue", "forward", "copy", "encode")
WORK = ("decoding", "forwards")


@dataclass(frozen=True)
class Case:
    """What is asked for, and what that shows."""

    title: str
    model: str
    layer: str
    pool: str


def profiled(case: Case, connections: int, seconds: int, folder: Path) -> dict[str, Any]:
    """Milliseconds of an image: ``cpu`` by role, ``alone`` the work without a server, ``steps`` as requests waited."""
    pictures = written(folder)
    with serving([case.model], folder, THREADS) as server:
        path = extract(case.model, [case.layer], case.pool, "npy")
        loaded(server, Sending([path], pictures, connections, 1))
        before, cpu = samples(server), used(server)
        figures = loaded(server, Sending([path], pictures, connections, seconds))
        cpu, told = used(server) - cpu, _gained(before, server)
    images = told["layertap_step_seconds_count", "encode"]
    rows = max(round(images / told["layertap_batch_rows_count", ""]), 1)
    work = _alone(case, rows, seconds, pictures)
    spent = {role: 1000 * taken / images for role, taken in cpu.most_common()}
    return {
        **{key: figures[key] for key in ("per_s", "p50_ms", "p99_ms", "failed")},
        "rows": rows,
        "cpu": spent,
        "alone": work,
        "beyond": sum(spent.values()) - sum(work.values()),
        "steps": {step: 1000 * told["layertap_step_seconds_sum", step] / images for step in STEPS},
    }


def _gained(before: Samples, server: Server) -> Samples:
    return {key: value - before.get(key, 0.0) for key, value in samples(server).items()}


def _alone(case: Case, rows: int, seconds: float, pictures: list[Path]) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.profile.alone", "--model", case.model, "--layers", case.layer]
    command += ["--rows", str(rows), "--seconds", str(seconds), "--pictures", *map(str, pictures)]
    told, _ = watched(command, seconds + LIMIT_S)
    found: dict[str, float] = json.loads(told)
    return found


def table(name: str, found: dict[str, Any]) -> Table:
    """For people."""
    title = f"{CASES[name].title}: {found['per_s']:.1f} images/s, {found['rows']} rows a forward"
    shown = Table("CPU-ms an image", "in the server", "alone", "beyond", title=title)
    for role in dict.fromkeys((LOOP, *WORK, *found["cpu"])):
        spent, alone = found["cpu"].get(role, 0.0), found["alone"].get(role, 0.0)
        shown.add_row(role, f"{spent:.2f}", f"{alone:.2f}" if alone else "", f"{spent - alone:.2f}")
    shown.add_section()
    whole = sum(found["cpu"].values())
    shown.add_row("all", f"{whole:.2f}", f"{whole - found['beyond']:.2f}", f"{found['beyond']:.2f}")
    return shown


def waits(results: dict[str, dict[str, Any]]) -> Table:
    """How long requests were in each step, at their own pace: much of it is waiting for others."""
    shown = Table("wall ms a request", *STEPS, "p50", "p99", title="Steps (means, as Server-Timing has them)")
    for name, found in results.items():
        cells = [*found["steps"].values(), found["p50_ms"], found["p99_ms"]]
        shown.add_row(name, *(f"{value:.2f}" for value in cells))
    return shown


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="Where each millisecond goes.")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args()
    machine, results = described(), {}
    for name in chosen.cases:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = profiled(CASES[name], chosen.connections, chosen.seconds, Path(folder))
        Console().print(table(name, results[name]))
    Console().print(waits(results))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        words = f"--cases {' '.join(chosen.cases)} --connections {chosen.connections} --seconds {chosen.seconds}"
        told = {"command": f"python -m bench.profile {words}", "machine": machine, "results": results}
        chosen.json.write_text(json.dumps(told, indent=2) + "\n")


CASES = {
    "embedding": Case("An embedding, MobileNetV3-small avgpool", "mobilenet_v3_small", "avgpool", "flatten"),
    "map": Case("A map of 400 kB as npy, ResNet-50 layer4", "resnet50", "layer4", "none"),
}

if __name__ == "__main__":
    main()
