"""The plain loop, alone: ``python -m bench.serving.loop --model resnet50``.

A thread for each core, one torch thread each, one model between them. Each decodes a batch, preprocesses it, runs a
forward and keeps the features. With ``--graph`` the forward is a compiled one, and processes are tried in place of
threads too. Prints one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch

from bench.machine import CpuMeter
from bench.serving.plain import Plain, arguments, read
from bench.serving.server import get_cpu_seconds

Forward = Callable[[Iterable[bytes]], object]
BATCHES = (1, 4, 8, 16)
PROBE_S = 0.5
WARM_S = 1.0
FEWEST = 2  # batches of a thread between its first stamp and its last
FORK = multiprocessing.get_context("fork")  # what has a graph or a hook can't be pickled
WAYS: Mapping[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "threads": (threading.Thread, queue.SimpleQueue),
    "processes": (FORK.Process, FORK.SimpleQueue),
}


@dataclass(frozen=True)
class Stamps:
    """What one thread or process did between its first stamp and its last, so that no batch is counted in part."""

    images: int
    seconds: float
    cpu_seconds: float


def rate(
    plain: Forward, pictures: Sequence[bytes], batch: int, way: str, warm_s: float, seconds: float
) -> dict[str, float]:
    """Images per second of all cores after the warm-up, what an image costs in CPU time, and who else used cores."""
    begin = time.perf_counter() + warm_s
    start, make_queue = WAYS[way]
    results = make_queue()
    run = partial(_run, plain, pictures, batch, begin, begin + seconds)
    workers = [start(target=lambda: results.put(run()), daemon=True) for _ in range(os.cpu_count() or 1)]
    for worker in workers:
        worker.start()
    time.sleep(warm_s)
    meter = CpuMeter(partial(get_cpu_seconds, os.getpid()))
    time.sleep(seconds)
    shares = meter.get_shares()
    found: list[Stamps] = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    images, cpu_seconds = sum(each.images for each in found), sum(each.cpu_seconds for each in found)
    return {
        "per_s": sum(each.images / each.seconds for each in found),
        "cpu_ms": 1000 * cpu_seconds / images,
        **shares,
    }


def _run(plain: Forward, pictures: Sequence[bytes], batch: int, begin: float, end: float) -> Stamps:
    """Batches without a pause; a stamp after each that ends at or after ``begin``, until ``end`` or a little longer."""
    torch.set_num_threads(1)  # of this thread's own
    turn, stamps = cycle(pictures), []
    while (now := time.perf_counter()) < end or len(stamps) <= FEWEST:
        if now >= begin:
            stamps.append((now, time.thread_time()))
        plain(islice(turn, batch))
    (first, first_cpu), (last, last_cpu) = stamps[0], stamps[-1]
    return Stamps(batch * (len(stamps) - 1), last - first, last_cpu - first_cpu)


def best(plain: Forward, pictures: Sequence[bytes], ways: Sequence[str]) -> tuple[int, str]:
    """The batch size, and the one of some ways, with the most images per second."""
    plain(pictures)
    return max(product(BATCHES, ways), key=lambda each: rate(plain, pictures, *each, 0, PROBE_S)["per_s"])


def main() -> None:
    """Probe, measure, print."""
    chosen = arguments("The plain loop.").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = read(chosen.pictures, Path(folder))
    torch.set_num_threads(1)
    plain = Plain(chosen.model, chosen.layers, cut=chosen.cut, graph=chosen.graph)
    batch, way = best(plain, pictures, tuple(WAYS) if chosen.graph else ("threads",))
    figures = rate(plain, pictures, batch, way, WARM_S, chosen.seconds)
    print(json.dumps({**figures, "batch": batch, "way": way}))


if __name__ == "__main__":
    main()
