"""One request to a server in another process: what it answered, how soon, and how far its memory rose for that."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass(frozen=True)
class Answer:
    """What came back; ``megabytes`` is the highest of resident memory above what was held before."""

    status: int
    text: str
    seconds: float
    megabytes: float


def answer(client: httpx.Client, pid: int, kind: str, body: bytes) -> Answer:
    """Send a body to ``/extract`` on ``digits``; Linux only."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest mark starts anew
    before, begun = held_mb(pid, "VmRSS"), time.perf_counter()
    reply = client.post("/extract", content=body, headers={"content-type": kind}, params={"layers": "pool"})
    seconds = time.perf_counter() - begun
    return Answer(reply.status_code, reply.text, seconds, held_mb(pid, "VmHWM") - before)


def held_mb(pid: int | str, key: str) -> float:
    """What a process holds (``VmRSS``) or held at most (``VmHWM``)."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1000
