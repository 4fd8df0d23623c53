"""Requests: many at once by wrk, or one after another over a connection that stays open."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import CpuMeter
from bench.serving.metrics import BatchRows, get_rows_per_forward
from bench.serving.server import Server, memory_mib
from bench.startup import HOST, LIMIT_S

SCRIPT = Path(__file__).with_name("load.lua")
WARM_S = 2
PATIENCE_S = 40  # longer than the server's own deadline; wrk keeps a counter for each microsecond of it
FEWEST = 3  # answers on each connection: of fewer, most are of the quick beginning
PLENTY = 4  # aimed at
LONGEST = 3  # times as long as asked for, to come to that
SAMPLE_S = 0.5  # between two looks at the memory
RESTLESS = 1.25  # times what it used before
FORWARD = re.compile(r"\bforward;dur=([\d.]+)")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request to ``POST /extract``."""

    path: str
    body: bytes
    media_type: str = "image/jpeg"


@dataclass(frozen=True)
class Answer:
    """What came back, and the milliseconds it took: of the whole, and of the forward as the server says."""

    body: bytes
    wall_ms: float
    forward_ms: float

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(np.load(io.BytesIO(self.body), allow_pickle=False))


@dataclass(frozen=True)
class Sending:
    """A load of wrk: every picture to every path in turn, on so many connections, for so many seconds at least."""

    paths: Sequence[str]
    pictures: Sequence[Path]
    connections: int
    seconds: int
    media_type: str = "image/jpeg"


def loaded(
    server: Server,
    sending: Sending,
    idle_cores: float = 0.0,
    read_batch_rows: Callable[[int], BatchRows] | None = None,
) -> Figures:
    """Answers per second, their latency, and what the server and others used meanwhile.

    The server uses ``idle_cores`` when nobody asks; ``read_batch_rows`` is for those that count rows by forward.
    """
    rest = RESTLESS * idle_cores
    warm = send(server, sending, WARM_S)
    server.settle(rest)
    rows = read_batch_rows(server.port) if read_batch_rows else None
    cpu, meter = server.cpu_s(), CpuMeter(lambda: cpu_s(server))
    told, peak = _wrk(server, replace(sending, seconds=enough(sending, warm["answers"] / warm["seconds"])))
    cpu, shares = server.cpu_s() - cpu, meter.get_shares()
    server.settle(rest)
    good = told["answers"] - told["refused"]
    if good <= 0:
        raise SystemExit(f"no answer to {sending.paths[0]} at {sending.connections} connections: {told}")
    if told["answers"] < FEWEST * sending.connections:
        note = f"{told['answers']} answers on {sending.connections} connections are too few for a true latency"
        print(f"{sending.paths[0]}: {note}: take more --seconds", file=sys.stderr)
    return {
        "per_s": good / told["seconds"],
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
        "cpu_ms": 1000 * cpu / good,
        "peak_mib": peak,
        "answers": told["answers"],
        "refused": told["refused"],
        "failed": told["refused"] + told["broken"],
        **shares,
        **(get_rows_per_forward(rows, read_batch_rows(server.port)) if rows and read_batch_rows else {}),
    }


def cpu_s(server: Server) -> float:
    """CPU seconds so far of a server, of this process and of the load makers that it has ended."""
    return server.cpu_s() + sum(os.times()[:4])


def enough(sending: Sending, per_s: float) -> int:
    """Seconds in which each connection has a few answers at that rate; within bounds."""
    needed = math.ceil(PLENTY * sending.connections / per_s) if per_s else sending.seconds
    return max(sending.seconds, min(needed, LONGEST * sending.seconds))


def send(server: Server, sending: Sending, seconds: int | None = None) -> Figures:
    """What load.lua says at the end."""
    return _wrk(server, sending if seconds is None else replace(sending, seconds=seconds))[0]


def _wrk(server: Server, sending: Sending) -> tuple[Figures, float]:
    """What load.lua says at the end, and the most memory meanwhile; one thread of wrk is plenty for such loads."""
    sent = [f"path={path}" for path in sending.paths] + [f"picture={picture}" for picture in sending.pictures]
    sent.append(f"type={sending.media_type}")
    command = ["wrk", "-t1", f"-c{sending.connections}", f"-d{sending.seconds}s", "--timeout", f"{PATIENCE_S}s"]
    command += ["--latency", "-s", str(SCRIPT), f"http://{HOST}:{server.port}", "--", *sent]
    told, peak = watched(command, sending.seconds + LIMIT_S, lambda _: server.memory_mib())
    return json.loads(told), peak


def watched(
    command: Sequence[str],
    limit_s: float,
    held_mib: Callable[[int], float] = memory_mib,
    environment: Mapping[str, str] | None = None,
) -> tuple[str, float]:
    """The last line that a command prints, and the most memory meanwhile, by default of its own process."""
    end, peak = time.monotonic() + limit_s, 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {})) as process:
        try:
            while True:
                try:
                    told, _ = process.communicate(timeout=SAMPLE_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > end:
                        raise SystemExit(f"{command[0]} took longer than {limit_s:g} s") from None
                    peak = max(peak, held_mib(process.pid))
        finally:
            process.kill()
    if process.returncode or not told:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}: {told}")
    return told.splitlines()[-1], peak


class Connection:
    """A connection that stays open."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        self._connection.request("GET", path)
        return json.loads(self._answered(path)[1])

    def post(self, ask: Ask) -> Answer:
        """One request, timed from its first byte to the answer's last."""
        begun = time.perf_counter()
        self._connection.request("POST", ask.path, ask.body, {"Content-Type": ask.media_type})
        headers, body = self._answered(ask.path)
        wall_ms = 1000 * (time.perf_counter() - begun)
        forward = FORWARD.search(headers.get("Server-Timing", ""))
        return Answer(body, wall_ms, float(forward[1]) if forward else float("nan"))

    def sequence(self, asks: Sequence[Ask], seconds: float) -> list[list[Answer]]:
        """All requests in turn, again and again for some seconds: the answers to each."""
        found: list[list[Answer]] = [[] for _ in asks]
        end = time.perf_counter() + seconds
        while not found[-1] or time.perf_counter() < end:
            for ask, answers in zip(asks, found, strict=True):
                answers.append(self.post(ask))
        return found

    def close(self) -> None:
        self._connection.close()

    def _answered(self, path: str) -> tuple[Message, bytes]:
        reply = self._connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path} was answered with {reply.status}: {body[:1000]!r}")
        return reply.headers, body
