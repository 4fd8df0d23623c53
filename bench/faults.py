"""Decoders that crash, hang and take all memory, under load: ``python -m bench.faults [--count N] [--json FILE]``.

A closed loop of good pictures goes on all the time. One after the other pictures come in that end, hold up or fill the
worker that decodes them. What do the others notice, and how soon are they answered as quickly as before? A client of
another model asks all the time, too: how long does it wait while workers of the first one die?
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle
from pathlib import Path
from statistics import mean, median, quantiles
from threading import Event
from typing import Any

import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.fatal_decoder import FAULTS
from bench.machine import described
from bench.serving.pictures import written
from bench.serving.server import LAYERTAP, running
from bench.startup import HOST, free_port

PATH = "/extract?layers=avgpool&pool=flatten&format=npy&model={}"
WORKER_MIB = 512  # what a worker may take beside the weights that it shares
WARM_UP_S = 2.0
BIN_S = 0.1
BINS_BEFORE, BINS_AFTER = 10, 40
WINDOW_S = 0.5  # of throughput; with fewer answers chance alone makes a tenth
RECOVERED = 0.9  # of the median throughput of the time before the first fault
TIMEOUT_S = 60.0
OK = 200
FAULTY, OTHER = "mobilenet", "other"
MODEL: dict[str, Any] = {
    "name": FAULTY,
    "source": "python:bench.fatal_decoder:build",
    "weights": "random:0",
    "device": "cpu",
    "inputs": [{"name": "x", "shape": [3, 224, 224]}],
    "preprocess": {
        "resize": 256,
        "crop": 224,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
    },
}
OTHER_MODEL = {"name": OTHER, "source": "torchvision:mobilenet_v3_small", "weights": "random:0", "device": "cpu"}


@dataclass
class Load:
    """Clients that ask a model one after another until the end.

    ``answers``: when they were answered; ``waits``: how long each had waited; ``failed`` are other answers.
    """

    port: int
    pictures: Sequence[bytes]
    model: str = FAULTY
    ended: Event = field(default_factory=Event)
    answers: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def work(self) -> None:
        """One client."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        for picture in cycle(self.pictures):
            if self.ended.is_set():
                break
            sent = time.perf_counter()
            status, body = post(connection, self.model, picture, "image/jpeg")
            if status == OK:
                self.answers.append(time.perf_counter())
                self.waits.append(self.answers[-1] - sent)
            else:
                self.failed.append(f"{status}: {body[:300].decode(errors='replace')}")
        connection.close()

    def count(self, start: float, stop: float) -> int:
        """Good answers between two moments."""
        answers = sorted(self.answers)
        return bisect_left(answers, stop) - bisect_left(answers, start)


@dataclass(frozen=True)
class FaultRun:
    """A fault's picture: when it was sent, when it was answered, and how."""

    kind: str
    sent: float
    answered: float
    status: int


def post(connection: http.client.HTTPConnection, model: str, picture: bytes, media: str) -> tuple[int, bytes]:
    """The status and the body of an answer; 0 and an error's words where the connection broke."""
    try:
        connection.request("POST", PATH.format(model), picture, {"Content-Type": media})
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return 0, repr(error).encode()


def cause(port: int, kind: str) -> FaultRun:
    """Send a picture that does it, and wait for its answer."""
    stream = BytesIO()
    Image.new("RGB", FAULTS[kind][0]).save(stream, "PNG")
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    sent = time.perf_counter()
    status, _ = post(connection, FAULTY, stream.getvalue(), "image/png")
    answered = time.perf_counter()
    connection.close()
    return FaultRun(kind, sent, answered, status)


def measure(port: int, pictures: Sequence[bytes], chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of all kinds, in one load."""
    load, other = Load(port, pictures), Load(port, pictures, OTHER)
    runs: list[FaultRun] = []
    with ThreadPoolExecutor(chosen.connections + 1) as pool:
        clients = [pool.submit(each.work) for each in [load] * chosen.connections + [other]]
        try:
            time.sleep(WARM_UP_S)
            begun = time.perf_counter()
            time.sleep(chosen.seconds)
            quiet_end = time.perf_counter()
            for kind in FAULTS:
                for _ in range(chosen.count):
                    runs.append(cause(port, kind))
                    time.sleep(chosen.gap)
        finally:
            load.ended.set()
            other.ended.set()
        for client in clients:
            client.result()
    normal = median(
        load.count(begun + place * WINDOW_S, begun + (place + 1) * WINDOW_S)
        for place in range(int((quiet_end - begun) / WINDOW_S))
    )
    summaries = {
        kind: summarize(load, [run for run in runs if run.kind == kind], normal, chosen.gap) for kind in FAULTS
    }
    return {
        "answers_per_s_before": normal / WINDOW_S,
        "answers": len(load.answers),
        "failed_neighbours": len(load.failed),
        "failures": load.failed[:5],
        "other_model": summarize_other(other, begun, quiet_end, runs),
        "kinds": summaries,
    }


def summarize_other(other: Load, begun: float, quiet_end: float, runs: Sequence[FaultRun]) -> dict[str, float]:
    """How long requests to another model waited (99th percentile, s), before the faults and during each kind."""
    waits = list(zip(other.answers, other.waits, strict=True))
    bounds = {kind: [run for run in runs if run.kind == kind] for kind in FAULTS}
    spans = {kind: (of_kind[0].sent, of_kind[-1].answered) for kind, of_kind in bounds.items()}
    found = {
        f"p99_s_{name}": quantiles([wait for at, wait in waits if start <= at < stop], n=100)[-1]
        for name, (start, stop) in {"before": (begun, quiet_end), **spans}.items()
    }
    return {**found, "answers": len(waits), "failed": len(other.failed)}


def summarize(load: Load, runs: Sequence[FaultRun], normal: float, gap: float) -> dict[str, Any]:
    """What faults of one kind did; times in seconds, throughput as a ratio to ``normal`` answers in a window."""
    recoveries = [find_recovery(load, run.answered, normal, gap) for run in runs]
    known = [each for each in recoveries if each is not None]
    offsets = range(-BINS_BEFORE, BINS_AFTER)
    rates = [load.count(run.sent, run.answered) / (run.answered - run.sent) * WINDOW_S / normal for run in runs]
    return {
        "statuses": sorted({run.status for run in runs}),
        "answered_after_s": spread([run.answered - run.sent for run in runs]),
        "throughput_until_answered": spread(rates),
        "throughput_in_the_second_after": spread(
            [load.count(run.answered, run.answered + 1) * WINDOW_S / normal for run in runs]
        ),
        "recovered_s_after_the_answer": spread(known) if known else None,
        "not_recovered": len(runs) - len(known),
        "answers_per_100_ms_from_1_s_before": [
            round(mean(load.count(run.sent + each * BIN_S, run.sent + (each + 1) * BIN_S) for run in runs), 1)
            for each in offsets
        ],
    }


def find_recovery(load: Load, start: float, normal: float, seconds: float) -> float | None:
    """Seconds from a moment until a window begins that has as many answers as before; None where none does."""
    places = range(int((seconds - WINDOW_S) / BIN_S) + 1)
    starts = (place * BIN_S for place in places)
    return next((at for at in starts if load.count(start + at, start + at + WINDOW_S) >= RECOVERED * normal), None)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def make_table(results: dict[str, Any]) -> Table:
    """For people."""
    shown = Table("figure", *results["kinds"], title=f"{results['answers_per_s_before']:.0f} answers a second before")
    for name in next(iter(results["kinds"].values())):
        if not name.startswith("answers_per"):
            shown.add_row(name, *(format_value(each[name]) for each in results["kinds"].values()))
    other = ", ".join(f"{name} {value:.3g}" for name, value in results["other_model"].items())
    shown.caption = (
        f"{results['failed_neighbours']} of {results['answers']} other requests failed; another model: {other}"
    )
    return shown


def format_value(value: Any) -> str:
    """A median with its range, or whatever it is."""
    return "{median:g} ({min:g} to {max:g})".format(**value) if isinstance(value, dict) else str(value)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="Decoders that fail, under load.")
    parser.add_argument("--count", type=int, default=20, help="faults of each kind")
    parser.add_argument("--connections", type=int, default=16, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=10.0, help="before the first fault")
    parser.add_argument("--gap", type=float, default=1.2, help="seconds from a fault's answer to the next fault")
    parser.add_argument("--decode-timeout", type=float, default=2.0, help="seconds that an input may be decoded")
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args()
    machine = described()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        config = folder / "models.yaml"
        config.write_text(yaml.safe_dump({"models": [MODEL, OTHER_MODEL]}))
        variables = [
            f"LAYERTAP_DECODE_TIMEOUT_S={chosen.decode_timeout:g}",
            f"LAYERTAP_WORKER_MEMORY_BYTES={WORKER_MIB * 2**20}",
        ]
        words = ["serve", "--host", HOST, "--port", str(port), "--config", str(config)]
        pictures = [path.read_bytes() for path in written(folder)]
        with running(["env", *variables, *LAYERTAP, *words], port, folder) as server:
            server.until("GET", "/readyz")
            results = measure(port, pictures, chosen)
    Console().print(make_table(results))
    if chosen.json:
        given = {name.replace("_", "-"): value for name, value in vars(chosen).items() if name != "json"}
        command = "python -m bench.faults " + " ".join(f"--{name} {value:g}" for name, value in given.items())
        text = json.dumps({"command": command, "machine": machine, "results": results}, indent=2)
        chosen.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
