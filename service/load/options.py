"""How load is made: closed or open loop, how much, how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_REQUESTS = 1_000_000  # each takes some 500 bytes until the end


@dataclass(frozen=True)
class Options:
    """Open loop where ``rate`` is given, else closed loop; ``duration`` and ``requests`` both bound it.

    Rates are per second, times in seconds. Answers with a status in ``allow`` are no failures. ``headers`` go with
    every request and into no file.
    """

    url: str
    connections: int = 16
    rate: float | None = None
    max_in_flight: int = 256
    requests: int = MAX_REQUESTS
    duration: float | None = None
    warmup: int = 0
    seed: int = 0
    timeout: float = 60.0
    allow: frozenset[int] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
