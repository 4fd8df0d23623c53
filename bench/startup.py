"""How long a start takes: ``python -m bench.startup [--source SOURCE] [--beside PYTHON] [--rounds 5] [--json FILE]``.

Fresh processes in turn, round after round: Python that only imports torch and torchvision, a server until it is ready
for the first time, with nothing kept from other starts, one until it is ready, one until it has answered an extraction.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.machine import described

IMPORT = "import torch, torchvision; print(torch.__version__, flush=True)"
LAYERTAP = (sys.executable, "-m", "layertap")  # what the command `layertap` runs, installed or not
PICTURE = Path(__file__).parents[1] / "examples" / "digit.png"
HOST = "127.0.0.1"
TRY_S = 0.01  # between two tries, and so the resolution
LIMIT_S = 120.0
EXIT_S = 30.0

Measure = Callable[[], float]


def importing() -> float:
    """Seconds from the start of a Python until torch and torchvision are imported."""
    begun = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        heard, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        seconds = time.perf_counter() - begun
        imported = bool(heard and process.stdout.readline())
        process.kill()
    if not imported:
        raise SystemExit(f"torch and torchvision were not imported within {LIMIT_S:g} s: make setup")
    return seconds


@dataclass(frozen=True)
class Start:
    """Starts of a server by a Python, of a model by its source, or of the embedded one."""

    python: str
    source: str | None

    def first(self) -> float:
        """Seconds from the start of ``layertap serve`` until ``/readyz`` is 200, with an empty folder of caches."""
        with TemporaryDirectory() as folder:
            return self._serve("GET", "/readyz", cache=folder)

    def ready(self) -> float:
        """Seconds from the start of ``layertap serve`` until ``/readyz`` is 200."""
        return self._serve("GET", "/readyz")

    def answered(self) -> float:
        """Seconds from the start of ``layertap serve`` until the first answer of ``POST /extract``."""
        query = "layers=avgpool" if self.source else "layers=pool&pool=flatten"
        return self._serve("POST", f"/extract?{query}", PICTURE.read_bytes(), {"Content-Type": "image/png"})

    def _serve(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        cache: str | None = None,
    ) -> float:
        """Seconds from the start of a server until it answers a request with 200; it is tried till then."""
        port = free_port()
        with TemporaryDirectory() as folder:
            command = [self.python, *LAYERTAP[1:], "serve", "--port", str(port)]
            if self.source:
                model = {"name": "model", "source": self.source, "weights": "random:0"}
                config = Path(folder, "layertap.json")
                config.write_text(json.dumps({"models": [model]}))
                command += ["--config", str(config)]
            begun = time.perf_counter()
            with server(command, cache) as process:
                while time.perf_counter() - begun < LIMIT_S:
                    if process.poll() is not None:
                        raise SystemExit(f"the server ended while starting, with status {process.returncode}")
                    if status(port, method, path, body, headers or {}) == 200:
                        return time.perf_counter() - begun
                    time.sleep(TRY_S)
        raise SystemExit(f"the server did not answer within {LIMIT_S:g} s")


@contextmanager
def server(command: Sequence[str], cache: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process that ends with the block."""
    variables = {"LAYERTAP_DRAIN_DELAY_S": "0", **os.environ}  # no balancer looks
    if cache is not None:
        variables["LAYERTAP_CACHE_DIR"] = cache
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> int | None:
    """The status of one try; None where nobody listens yet."""
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        reply.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return reply.status


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def measured(kinds: Mapping[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind, a figure a round; a round before the first brings files into memory and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in track(range(rounds + 1), "starting", console=Console(stderr=True), transient=True):
        for name, measure in kinds.items():
            figure = measure()
            if number:
                seconds[name].append(figure)
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Medians and ranges, of the seconds and of the ratios to the import in the same round."""
    base = seconds["import"]
    found = {}
    for name, figures in seconds.items():
        ratios = [figure / first for figure, first in zip(figures, base, strict=True)]
        found[name] = {
            "seconds": spread(figures),
            "ratio": spread(ratios),
            "rounds": [round(each, 3) for each in figures],
        }
    return found


def spread(figures: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": round(median(figures), 3), "min": round(min(figures), 3), "max": round(max(figures), 3)}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """For people: medians, with ranges in brackets."""
    shown = Table("from exec until", "seconds", "ratio", title="Start-up: median (range)")
    for name, result in results.items():
        shown.add_row(name, text(result["seconds"]), text(result["ratio"]))
    return shown


def text(figures: dict[str, float]) -> str:
    """A median and its range."""
    return f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description="How long a start takes.")
    parser.add_argument("--source", help="that of the model, with random weights; without one it is the embedded one")
    parser.add_argument("--beside", help="the Python of another checkout, of which servers start in the same rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error("--rounds is 1 or more")
    kinds: dict[str, Measure] = {"import": importing}
    for prefix, python in (("beside_", chosen.beside), ("", sys.executable)):
        if python:
            start = Start(python, chosen.source)
            own = {"first_ready": start.first, "ready": start.ready, "first_answer": start.answered}
            kinds |= {f"{prefix}{name}": measure for name, measure in own.items()}
    machine = described()
    results = summary(measured(kinds, chosen.rounds))
    load = [round(each, 2) for each in os.getloadavg()]
    Console().print(table(results))
    if chosen.json:
        command = f"python -m bench.startup --rounds {chosen.rounds}"
        command += f" --source {chosen.source}" if chosen.source else ""
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(
            json.dumps({"command": command, "machine": machine, "load": load, "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
