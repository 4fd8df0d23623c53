"""``python -m bench.front [--rounds 5] [--seconds 5] [--json FILE]``: what the server's own process can take.

It parses, plans, schedules and encodes; its workers run ``digits`` and decode nothing. Requests of one picture and of
many in turn, each on many connections: pictures a second, and the CPU time of that process alone, which is the limit
wherever others compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.front import DECODE_FIRST
from bench.machine import TICK_S, CpuMeter, described
from bench.serving.client import WARM_S, Sending, cpu_s, send
from bench.serving.pictures import written
from bench.serving.repeat import repeat_disturbed
from bench.serving.server import TIMES, Server, read_stat, running
from bench.startup import HOST, free_port

PATH = "/extract?layers=pool&pool=flatten&format=npy"
MANY = 32
Figures = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """Requests of so many pictures each, on so many connections."""

    pictures: int
    connections: int


LOADS: Mapping[str, Load] = {"one picture": Load(1, 32), f"{MANY} pictures": Load(MANY, 8)}


@contextmanager
def serving_undecoded(folder: Path) -> Iterator[Server]:
    """A server of ``digits`` that decodes nothing, ready and idle, that ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "bench.front.server", "serve", "--host", HOST, "--port", str(port)]
    with running(command, port, folder) as server:
        server.until("GET", "/readyz")
        server.settle()
        yield server


def make_sending(load: Load, pictures: Sequence[Path], folder: Path, seconds: int) -> Sending:
    """The pictures one by one, or as many in a form."""
    if load.pictures == 1:
        return Sending([PATH], pictures, load.connections, seconds)
    files = [("images", (path.name, path.read_bytes(), "image/jpeg")) for path in pictures] * load.pictures
    request = httpx.Request("POST", f"http://{HOST}", files=files[: load.pictures])
    body = folder / f"{load.pictures}.form"
    body.write_bytes(request.read())
    return Sending([PATH], [body], load.connections, seconds, request.headers["Content-Type"])


def measure(server: Server, load: Load, sending: Sending) -> Figures:
    """What the server's own process did for each picture meanwhile."""

    def read_own_s() -> float:
        return sum(map(int, read_stat(server.process.pid)[TIMES])) * TICK_S

    own, meter = read_own_s(), CpuMeter(lambda: cpu_s(server))
    told = send(server, sending)
    own, shares = read_own_s() - own, meter.get_shares()
    if told["refused"] or told["broken"] or not told["answers"]:
        raise SystemExit(f"not all was answered: {told}")
    pictures = told["answers"] * load.pictures
    return {
        "requests_per_s": told["answers"] / told["seconds"],
        "pictures_per_s": pictures / told["seconds"],
        "own_ms_a_picture": 1000 * own / pictures,
        "own_ms_a_request": 1000 * own / told["answers"],
        "own_cores": own / told["seconds"],
        "limit_pictures_per_s": pictures / own,
        "p50_ms": told["p50_ms"],
        **shares,
    }


def run_rounds(rounds: int, seconds: int) -> dict[str, list[Figures]]:
    """All loads in turn, round after round, on one server."""
    found: dict[str, list[Figures]] = {name: [] for name in LOADS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = written(folder)
        sendings = {key: make_sending(load, pictures, folder, seconds) for key, load in LOADS.items()}
        with serving_undecoded(folder) as server:
            for sending in sendings.values():
                send(server, sending, WARM_S)
            for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
                for key, load in LOADS.items():
                    found[key].append(repeat_disturbed(lambda k=key, one=load: measure(server, one, sendings[k])))
    return found


def show(found: Mapping[str, Sequence[Figures]]) -> None:
    """Medians, with the range of what one core of it would answer."""
    table = Table("a request has", "pictures/s", "of a core", "own ms a request", "a picture", "limit, pictures/s")
    for name, rounds in found.items():
        columns = {key: [each[key] for each in rounds] for key in rounds[0] if key != "runs"}
        limit = columns["limit_pictures_per_s"]
        table.add_row(
            name,
            f"{median(columns['pictures_per_s']):.0f}",
            f"{median(columns['own_cores']):.2f}",
            f"{median(columns['own_ms_a_request']):.2f}",
            f"{median(columns['own_ms_a_picture']):.3f}",
            f"{median(limit):.0f} ({min(limit):.0f} to {max(limit):.0f})",
        )
    Console().print(table)


def run_command(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.front", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument(
        "--decode-first", type=int, metavar="N", help="decode before batches form, as for a GPU, N pictures a message"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.decode_first:
        os.environ[DECODE_FIRST] = str(chosen.decode_first)
    machine = described()
    found = run_rounds(chosen.rounds, chosen.seconds)
    show(found)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine, "loads": found}, indent=1) + "\n")


if __name__ == "__main__":
    run_command()
