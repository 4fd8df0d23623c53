"""A model that is loaded and unloaded again and again leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from layertap.models.digits import spec as digits
from tests.service.gated_server import wait_until
from tests.service.load_server import END_S, Usage, process
from tests.service.support import net, npy, raw

FIRST, CYCLES = 6, 8  # until allocators, caches and pools of threads have what they need; after that
OUTPUTS = 400_000
SLACK_BYTES = 12 * 2**20  # a quarter of the weights for each cycle
SPEC = net("linear", "Linear", module="torch.nn", args={"in_features": 4, "out_features": OUTPUTS}, load="lazy")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.hard)])
def test_cycles(tmp_path: Path, workers: int) -> None:
    """After many loads, answers and unloads memory, threads, descriptors and processes are what they were."""
    with (
        # Pools of more than one thread may start another one at any time.
        process([digits(), SPEC], tmp_path, LAYERTAP_WORKERS=str(workers), LAYERTAP_CPU_THREADS="1") as server,
        httpx.Client(base_url=server.url, timeout=END_S) as client,
    ):
        _run(client, FIRST)
        before = server.usage()
        _run(client, CYCLES)
        # Once the last threads and processes of the model have ended, and memory is given back.
        wait_until(lambda: not _has_grown(before, server.usage()))
        wait_until(lambda: sum(server.usage().memory.values()) < sum(before.memory.values()) + SLACK_BYTES)


def _run(client: httpx.Client, cycles: int) -> None:
    request = raw(npy(np.ones((2, 4), np.float32)), "application/x-npy", layers=".", model="linear", format="npy")
    for _ in range(cycles):
        assert client.post("/models/linear/load").json()["state"] == "ready"
        reply = client.post("/extract", **request)
        assert (reply.status_code, len(reply.content) > 2 * 4 * OUTPUTS) == (200, True)
        assert client.post("/models/linear/unload").json()["state"] == "available"


def _has_grown(before: Usage, now: Usage) -> bool:
    """Whether there are more processes, or so many more threads or descriptors as if each other cycle left one.

    Pools of threads start and end some at any time.
    """
    more = max(now.threads - before.threads, now.descriptors - before.descriptors)
    return more >= CYCLES // 2 or len(now.memory) > len(before.memory)
