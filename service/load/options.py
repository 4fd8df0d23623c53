"""How load is made: closed or open loop, how much, how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Arrivals = Literal["poisson", "constant"]
MAX_REQUESTS = 1_000_000  # each takes some 500 bytes until the end


@dataclass(frozen=True)
class Options:
    """Open loop where ``rate`` is given, else closed loop; ``duration`` and ``requests`` both bound it.

    Rates are per second, times in seconds. With ``respect_retry_after`` a connection of a closed loop that was refused
    waits as long as the answer says. ``headers`` go with every request and into no file. ValueError says which option
    makes no sense.
    """

    url: str
    connections: int = 16
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    max_in_flight: int = 256
    requests: int = MAX_REQUESTS
    duration: float | None = None
    warmup: int = 0
    seed: int = 0
    timeout: float = 60.0
    allow: frozenset[int] = frozenset()
    respect_retry_after: bool = False
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, and should be greater than 0")
        for name, limit in LIMITS.items():
            if (value := getattr(self, name)) is not None and value > limit:
                raise ValueError(f"{name} is {value:g}, and should be at most {limit}")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}, and should be 0 or more requests")
        if self.respect_retry_after and self.rate is not None:
            raise ValueError("an open loop sends at its moments, whatever Retry-After says: leave one of both out")
        self._check_url()

    def _check_url(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the URL {self.url!r} should begin with http:// or https://")
        if "@" in urlsplit(self.url).netloc:
            raise ValueError("the URL holds a name or a password, which would stand in reports: leave it out")


POSITIVE = ("connections", "rate", "max_in_flight", "requests", "duration", "timeout")
LIMITS = {
    "connections": 10_000,
    "max_in_flight": 10_000,
    "requests": MAX_REQUESTS,
    "warmup": MAX_REQUESTS,
    "rate": 100_000,
    "duration": 7 * 86_400,
}
