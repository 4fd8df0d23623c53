"""How load is made: closed or open loop, how much, how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Arrivals = Literal["poisson", "uniform"]


@dataclass(frozen=True)
class Options:
    """Open loop where ``rate`` is given, else closed loop; ``requests`` or ``seconds`` or both bound it.

    Rates are per second, times in seconds. ``headers`` go with every request and into no file. ValueError says which
    option makes no sense.
    """

    url: str
    connections: int = 16
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    most_in_flight: int = 256
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 0
    seed: int = 0
    timeout: float = 60.0
    allow: frozenset[int] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.requests is None and self.seconds is None:
            raise ValueError("give requests or seconds, or both: load without a bound is not made")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, and should be greater than 0")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}, and should be 0 or more requests")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the URL {self.url!r} should begin with http:// or https://")


POSITIVE = ("connections", "rate", "most_in_flight", "requests", "seconds", "timeout")
