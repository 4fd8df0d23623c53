"""The event loop is free: of no request, as large as the limits allow, does it compute for long."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live, serving
from tests.service.support import Json, configured, image, npy, picture, raw

pytestmark = pytest.mark.slow
LONGEST_S = 0.05
TRIES = 4  # a processor that others use, too, takes longer
TICK_S = 0.002
LAYERS, ROWS = 1000, 256
CHANCE = np.random.default_rng(5)


class Deep(nn.Module):
    """Has as many layers as a request may have results, which take rows of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Hardtanh(-9, 9) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LoopWatch:
    """For how long a loop's thread computed without a turn: by its own processor time, which no other work adds to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._before = self._longest = 0.0
        loop.call_soon_threadsafe(self._tick)

    def take_longest(self) -> float:
        """The longest time since the last call, in seconds."""
        return asyncio.run_coroutine_threadsafe(self._take(), self._loop).result()

    async def _take(self) -> float:
        self._note()
        longest, self._longest = self._longest, 0.0
        return longest

    def _tick(self) -> None:
        self._note()
        self._loop.call_later(TICK_S, self._tick)

    def _note(self) -> None:
        now = time.thread_time()
        self._longest = max(self._longest, now - self._before)
        self._before = now


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[Live, LoopWatch]]:
    """A server and what watches its event loop."""
    deep = ModelSpec("deep", f"python:{__name__}:Deep", "random:0", "cpu", inputs=(InputSpec("x", (1, 2, 2)),))
    with serving(configured(deep), deadline_s=120) as live:
        gc.collect()
        gc.freeze()  # as the command does: what is imported is not looked through again
        yield live, LoopWatch(next(iter(live.engine.manager._tasks)).get_loop())
        gc.unfreeze()


def many(rows: int = ROWS, **query: Any) -> Json:
    """A request for very many results."""
    body = CHANCE.random((rows, 1, 2, 2), np.float32)
    query = {"model": "deep", "layers": "layers.*", **query}
    return {"method": "POST", "url": "/extract", **raw(npy(body), "application/x-npy", **query)}


PICTURES = [image(picture(seed, (200, 200))) for seed in range(16)]
MAPS: Json = {"method": ["grad_cam", "occlusion", "saliency"], "top_classes": 5, "inputs": PICTURES}
REQUESTS: dict[str, Json] = {
    "many results as json": many(format="json"),
    "a dry run": many(dry_run="true"),
    "pictures": {"method": "POST", "url": "/extract", "json": {"layers": ["*"], "pool": "mean", "inputs": PICTURES}},
    "explanations": {"method": "POST", "url": "/explain", "json": MAPS},
}
GETS = ("/models/deep/layers?functions=true", "/models/deep/probe?layers=layers.*", "/metrics", "/openapi.json")
REQUESTS |= {path: {"method": "GET", "url": path} for path in GETS}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_pause(watched: tuple[Live, LoopWatch], name: str) -> None:
    """The loop takes other turns while a request is read, planned, collected, written and forgotten."""
    live, watch = watched
    pauses: list[float] = []
    while not pauses or (min(pauses) > LONGEST_S and len(pauses) < TRIES):
        watch.take_longest()
        reply = live.client.request(**REQUESTS[name])
        assert reply.status_code == 200, reply.text[:1000]
        pauses.append(watch.take_longest())
    assert min(pauses) <= LONGEST_S
