"""Good and bad requests of all kinds, for an hour: ``python -m tests.soak [--seconds S]``.

Every answer is compared with what it must be, as ``tests/service/test_load.py`` does it. The server's memory is looked
at between the requests; its slope, in MB an hour over the second half, decides about the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.service.load_nets import SERVED
from tests.service.load_requests import asked
from tests.service.load_server import Process, process
from tests.service.test_load import answers, one_thread, wrong

SECONDS = 3600.0
AT_ONCE = 200
MOST = 1.0  # MB an hour
HOUR_S, MB = 3600.0, 1e6
Sample = tuple[float, float]  # seconds, bytes


def slope(samples: Sequence[Sample]) -> float:
    """MB an hour that a straight line through the later half of the samples rises by."""
    later = samples[len(samples) // 2 :]
    return statistics.linear_regression(*zip(*later, strict=True)).slope * HOUR_S / MB


def soaked(server: Process, seconds: float) -> tuple[int, list[Sample], list[str]]:
    """How many requests were sent in so much time, the memory after each lot of them, and what was wrong."""
    samples: list[Sample] = []
    faults: list[str] = []
    count, begun = 0, time.monotonic()
    while time.monotonic() < begun + seconds and not faults:
        requests = [asked(3, number) for number in range(count, count + AT_ONCE)]
        found = asyncio.run(answers(server.url, requests))
        with one_thread():
            faults += [each for each in map(wrong, requests, found) if each]
        count += AT_ONCE
        samples.append((time.monotonic() - begun, sum(server.usage().memory.values())))
        sys.stdout.write(f"{samples[-1][0]:7.0f} s  {count:8d} requests  {samples[-1][1] / MB:7.1f} MB\n")
        sys.stdout.flush()
    return count, samples, faults


def main() -> int:
    """0 where every answer was right and memory has settled."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with process([served.spec(place) for served in SERVED], place) as server:
            count, samples, faults = soaked(server, seconds)
            hooks, status = server.hooks(), server.end()
    rise = slope(samples)
    sys.stdout.write(f"{count} requests, {len(faults)} wrong, {rise:+.2f} MB an hour, exit status {status}\n")
    sys.stdout.write("".join(f"{fault}\n" for fault in faults[:5]))
    return int(bool(faults) or rise > MOST or any(hooks.values()) or status != 0)


if __name__ == "__main__":
    sys.exit(main())
