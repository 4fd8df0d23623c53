"""Answers a second of one replica and of two on Ray, beside one server: ``python -m bench.replicas [--json FILE]``.

Each is asked alone, in turn, by so many threads for so many seconds: a JPEG a request, a vector of ``digits``. All are
on this machine, and so is who asks: what two replicas gain where there are cores or cards for both, it does not tell.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.client import start_server
from bench.machine import described

TRIES, TRY_S = 600, 0.1
WARM_S = 2.0


@contextmanager
def run_server() -> Iterator[str]:
    """One server."""
    process, url = start_server()
    try:
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def run_replicas(count: int) -> Iterator[str]:
    """So many replicas of one CPU each, on a cluster of their own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    from layertap.service.ray_app import build_app

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ray.init("local", num_cpus=count, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app({"min_replicas": count, "max_replicas": count}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


CONTENDERS = {
    "layertap serve": run_server,
    "one replica": lambda: run_replicas(1),
    "two replicas": lambda: run_replicas(2),
}


def measure(url: str, threads: int, seconds: float) -> float:
    """Answers a second."""
    stream = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)).save(stream, "JPEG")
    request = {"params": {"layers": "pool", "format": "npy"}, "headers": {"content-type": "image/jpeg"}}

    def ask(_: int) -> int:
        answers = 0
        with httpx.Client(base_url=url, timeout=60) as client:
            while time.monotonic() < end:
                client.post("/extract", content=stream.getvalue(), **request).raise_for_status()
                answers += time.monotonic() > begin
        return answers

    begin = time.monotonic() + WARM_S
    end = begin + seconds
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(ask, range(threads))) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, run in CONTENDERS.items():
            with run() as url:
                rates[name].append(measure(url, options.threads, options.seconds))
    table = Table("", "answers a second", title=f"{options.threads} connections, {os.cpu_count()} cores")
    for name, values in rates.items():
        table.add_row(name, f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": described(), "rates": rates}, indent=1))


if __name__ == "__main__":
    main()
