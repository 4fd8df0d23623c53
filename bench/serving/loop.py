"""The plain threaded loop, alone: ``python -m bench.serving.loop --model resnet50``.

A thread for each core, one torch thread each, one model between them. Each decodes a batch, preprocesses it, runs a
forward and keeps the features. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import torch

from bench.machine import CpuMeter
from bench.serving.plain import Plain, arguments, read

BATCHES = (1, 4, 8, 16)
PROBE_S = 0.5
WARM_S = 1.0
FEWEST = 2  # batches of a thread between its first stamp and its last


def rate(plain: Plain, pictures: Sequence[bytes], batch: int, warm_s: float, seconds: float) -> dict[str, float]:
    """Images per second of all threads after the warm-up, what an image costs in CPU time, and who else used cores."""
    begin = time.perf_counter() + warm_s
    threads = [_Thread(plain, pictures, batch, begin, begin + seconds) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    time.sleep(warm_s)
    cpu, wall, meter = time.process_time(), time.perf_counter(), CpuMeter(time.process_time)
    time.sleep(seconds)
    shares = meter.get_shares()
    cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
    for thread in threads:
        thread.join()
    per_s = sum(thread.per_s for thread in threads)
    return {"per_s": per_s, "cpu_ms": 1000 * cores / per_s, **shares}


class _Thread(threading.Thread):
    """Batches without a pause; a stamp after each that ends at or after ``begin``, until ``end`` or a little longer."""

    def __init__(self, plain: Plain, pictures: Sequence[bytes], batch: int, begin: float, end: float) -> None:
        super().__init__(daemon=True)
        self._plain, self._batch, self._begin, self._end = plain, batch, begin, end
        self._pictures = cycle(pictures)
        self._stamps: list[float] = []

    def run(self) -> None:
        torch.set_num_threads(1)  # of this thread's own
        while (now := time.perf_counter()) < self._end or len(self._stamps) <= FEWEST:
            if now >= self._begin:
                self._stamps.append(now)
            self._plain(islice(self._pictures, self._batch))

    @property
    def per_s(self) -> float:
        """From stamp to stamp, so that no batch is counted in part."""
        return self._batch * (len(self._stamps) - 1) / (self._stamps[-1] - self._stamps[0])


def best(plain: Plain, pictures: Sequence[bytes]) -> int:
    """The batch size with the most images per second."""
    plain(pictures)
    return max(BATCHES, key=lambda batch: rate(plain, pictures, batch, 0, PROBE_S)["per_s"])


def main() -> None:
    """Probe, measure, print."""
    chosen = arguments("The plain threaded loop.").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = read(chosen.pictures, Path(folder))
    torch.set_num_threads(1)
    plain = Plain(chosen.model, chosen.layers, cut=chosen.cut)
    batch = best(plain, pictures)
    figures = rate(plain, pictures, batch, WARM_S, chosen.seconds)
    print(json.dumps({**figures, "batch": batch}))


if __name__ == "__main__":
    main()
