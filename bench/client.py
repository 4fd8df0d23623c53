"""What the client itself costs per call, beside raw httpx, and how fast ``embed`` is beside loops of one's own.

``python -m bench.client`` starts a server of its own, with the embedded model; contenders take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load

from bench.machine import described
from layertap_client import AsyncClient, Client
from layertap_client.arrays import write_npy

ROW = np.zeros((1, 3, 32, 32), np.float32)
LAYER = {"small": "head", "large": "block1"}  # replies of 10 numbers, and of 16 × 32 × 32
TRIES, TRY_S = 300, 0.1
Calls = Callable[[str, int], list[float]]  # so many calls for a layer, one after another, and the seconds of each


def start_server(*options: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server process that is ready, and its address; ``options`` are those of ``layertap serve``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "layertap", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(TRIES):
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        time.sleep(TRY_S)
    process.terminate()
    raise SystemExit("the server did not start")


def build_arguments(layer: str) -> dict[str, Any]:
    """The request as httpx takes it."""
    params = {"layers": layer, "format": "safetensors"}
    return {"params": params, "headers": {"content-type": "application/x-npy"}, "content": write_npy(ROW)}


def repeat(call: Callable[[str], Any]) -> Calls:
    """Blocking calls."""

    def calls(layer: str, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            call(layer)
            taken.append(time.perf_counter() - start)
        return taken

    return calls


def repeat_awaited(runner: asyncio.Runner, call: Callable[[str], Awaitable[Any]]) -> Calls:
    """Calls that are awaited, in one event loop."""

    async def run(layer: str, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            await call(layer)
            taken.append(time.perf_counter() - start)
        return taken

    return lambda layer, count: runner.run(run(layer, count))


def main() -> None:
    """Rounds in turn, and the medians of what each call took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100, help="of each contender in a round")
    parser.add_argument("--pictures", type=int, default=2000, help="that are embedded in a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    process, url = start_server()
    try:
        with httpx.Client(base_url=url, timeout=60) as plain, Client(url) as blocking, asyncio.Runner() as runner:
            plain_async, awaited = httpx.AsyncClient(base_url=url, timeout=60), AsyncClient(url)

            async def post(layer: str) -> Any:
                reply = await plain_async.post("/extract", **build_arguments(layer))
                return load(reply.raise_for_status().content)[layer]

            def post_blocking(layer: str) -> Any:
                reply = plain.post("/extract", **build_arguments(layer))
                return load(reply.raise_for_status().content)[layer]

            contenders = {
                "httpx.Client": repeat(post_blocking),
                "Client": repeat(lambda layer: blocking.extract(ROW, layer)[layer]),
                "httpx.AsyncClient": repeat_awaited(runner, post),
                "AsyncClient": repeat_awaited(runner, lambda layer: awaited.extract(ROW, layer)),
            }
            times = measure(contenders, options.rounds, options.calls)
            rates = measure_embedding(blocking, max(1, options.rounds // 4), options.pictures)
            runner.run(awaited.aclose())
            runner.run(plain_async.aclose())
    finally:
        process.terminate()
        process.wait()
    report(times, rates)
    if options.json is not None:
        document = {"machine": described(), "milliseconds": times, "pictures_per_s": rates}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def measure(contenders: dict[str, Calls], rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds that the median call of each round took, by size of reply and contender, but for the first round."""
    times: dict[str, dict[str, list[float]]] = {size: {name: [] for name in contenders} for size in LAYER}
    for number in range(rounds + 1):
        for size, layer in LAYER.items():
            for name, calls in contenders.items():
                taken = calls(layer, count)
                if number:
                    times[size][name].append(1000 * statistics.median(taken))
    return times


def measure_embedding(client: Client, rounds: int, count: int) -> dict[str, list[float]]:
    """Pictures a second of each way to embed many, by round; the first round is left out.

    All have the priority of ``embed``, "bulk": beside requests without it the server would keep batches short.
    """
    pictures = [make_picture(seed) for seed in range(64)]
    inputs = [pictures[number % len(pictures)] for number in range(count)]
    ways: dict[str, Callable[[], object]] = {
        "extract, one by one": lambda: [client.extract(each, priority="bulk") for each in inputs],
        "extract, 64 in a request": lambda: [
            client.extract(inputs[at : at + 64], priority="bulk") for at in range(0, count, 64)
        ],
        "embed": lambda: client.embed(inputs).collect(),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, embed in ways.items():
            start = time.perf_counter()
            embed()
            if number:
                rates[name].append(count / (time.perf_counter() - start))
    return rates


def make_picture(seed: int) -> bytes:
    """A small picture as PNG."""
    stream = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def report(times: dict[str, dict[str, list[float]]], rates: dict[str, list[float]]) -> None:
    """Two tables."""
    table = Table("reply", "by", "ms a call", "range of rounds", "more than httpx, ms")
    for size, contenders in times.items():
        for name, rounds in contenders.items():
            plain = contenders["httpx.AsyncClient" if "Async" in name else "httpx.Client"]
            beyond = statistics.median(a - b for a, b in zip(rounds, plain, strict=True))
            table.add_row(
                size,
                name,
                f"{statistics.median(rounds):.2f}",
                f"{min(rounds):.2f} to {max(rounds):.2f}",
                f"{beyond:+.2f}",
            )
    Console().print(table)
    table = Table("many pictures by", "pictures/s", "range of rounds")
    for name, values in rates.items():
        table.add_row(name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
