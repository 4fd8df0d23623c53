"""Requests: many at once by wrk, or one after another over a connection that stays open."""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.server import Server
from bench.startup import HOST, LIMIT_S

SCRIPT = Path(__file__).with_name("load.lua")
WARM_S = 2
PATIENCE_S = 40  # longer than the server's own deadline; wrk keeps a counter for each microsecond of it
FEWEST = 3  # answers on each connection: of fewer, most are of the quick beginning
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


def loaded(server: Server, paths: Sequence[str], pictures: Sequence[Path], connections: int, seconds: int) -> Figures:
    """Answers per second with that many connections, their latency, and what the server used for them."""
    _wrk(server, paths, pictures, connections, WARM_S)
    server.settle()
    server.forget_peak()
    cpu = server.cpu_s()
    told = _wrk(server, paths, pictures, connections, seconds)
    cpu = server.cpu_s() - cpu
    peak = server.peak_mib()
    server.settle()
    good = told["answers"] - told["refused"]
    if good <= 0:
        raise SystemExit(f"no answer to {paths[0]} within {seconds} s at {connections} connections: {told}")
    if told["answers"] < FEWEST * connections:
        note = f"{told['answers']} answers on {connections} connections in {seconds} s are too few for a true latency"
        print(f"{paths[0]}: {note}: take more --seconds", file=sys.stderr)
    return {
        "per_s": good / told["seconds"],
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
        "cpu_ms": 1000 * cpu / good,
        "peak_mib": peak,
        "answers": told["answers"],
        "refused": told["refused"],
        "failed": told["refused"] + told["broken"],
    }


def _wrk(server: Server, paths: Sequence[str], pictures: Sequence[Path], connections: int, seconds: int) -> Figures:
    """What load.lua says at the end; one thread of wrk is plenty for hundreds of requests per second."""
    sent = [f"path={path}" for path in paths] + [f"picture={picture}" for picture in pictures]
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", f"{PATIENCE_S}s", "--latency"]
    command += ["-s", str(SCRIPT), f"http://{HOST}:{server.port}", "--", *sent]
    told = subprocess.run(command, capture_output=True, text=True, timeout=seconds + LIMIT_S, check=False)
    if told.returncode:
        raise SystemExit(f"wrk ended with status {told.returncode}: {told.stdout}{told.stderr}")
    found: Figures = json.loads(told.stdout.splitlines()[-1])
    return found


class Line:
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
