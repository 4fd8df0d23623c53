"""A closed loop: each connection sends its next request once the last one is answered."""

from __future__ import annotations

import asyncio
import math
import time

from layertap.service.load.run import Figures, Sender, summarize
from layertap.service.load.scenario import RequestKind


def run_closed(
    kind: RequestKind, url: str, connections: int, *, requests: float = math.inf, seconds: float = math.inf
) -> Figures:
    """What came of so many requests, or of those of so many seconds."""
    sender, begun = Sender([kind], url), time.perf_counter()
    sent = 0

    async def use_connection() -> None:
        nonlocal sent
        while sent < requests and (now := time.perf_counter()) < begun + seconds:
            sent += 1
            await sender.send(kind, now)

    async def run() -> None:
        async with sender.client, asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(use_connection())

    asyncio.run(run())
    return summarize(sender.samples, time.perf_counter() - begun)
