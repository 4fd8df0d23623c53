"""Sends requests at a rate, without waiting for answers, and counts the outcomes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import httpx
import numpy as np

from layertap.service.load.scenario import RequestKind
from layertap_client.transport import make_options

REFUSALS = frozenset({429, 503})
# Less than servers keep an idle connection (uvicorn 5 s), so that none is used while it is closed.
LIMITS = httpx.Limits(max_connections=1000, keepalive_expiry=2.0)
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


class Sample(NamedTuple):
    """A request and its outcome."""

    kind: RequestKind
    outcome: int | str  # a status, or the name of an error
    failed: bool
    seconds: float  # from the moment it was due to the answer's end
    late: float  # seconds from the moment it was due until it was sent


@dataclass(frozen=True)
class Figures:
    """The figures of one kind of request, or of all."""

    requests: int
    failed: int  # without answer, or with one that is neither expected nor allowed
    outcomes: dict[int | str, int]
    goodput: float  # expected answers a second
    latency_ms: dict[str, float]  # percentiles of all answers but refusals (429, 503)


class Sender:
    """Sends requests to a server, and keeps ``samples``; statuses in ``allow`` are no failures. InputError."""

    def __init__(
        self, kinds: Sequence[RequestKind], url: str, timeout: float = 60.0, allow: Collection[int] = ()
    ) -> None:
        self.kinds = kinds
        self.samples: list[Sample] = []
        self._allow = allow
        self.client = httpx.AsyncClient(**make_options(url, None, {"trust_env": False}), timeout=timeout, limits=LIMITS)

    async def send_at(self, rate: float, duration: float) -> None:
        """Send so many requests a second for some seconds, and end when all are answered."""
        begun = time.perf_counter()
        async with self.client, asyncio.TaskGroup() as group:
            for moment, kind in make_schedule(self.kinds, rate, duration):
                await asyncio.sleep(max(0.0, begun + moment - time.perf_counter()))
                group.create_task(self.send(kind, begun + moment))

    async def send(self, kind: RequestKind, due: float) -> None:
        """Send the next request of a kind, due at a moment of ``perf_counter``, and read all of the answer."""
        sent, (content, media_type) = time.perf_counter(), kind.next_body()
        headers = {"Content-Type": media_type, **kind.headers}
        outcome: int | str
        try:
            outcome = (await self.client.post(kind.path, content=content, headers=headers)).status_code
        except httpx.TransportError as error:
            outcome = type(error).__name__
        failed = outcome != kind.expect and outcome not in self._allow
        self.samples.append(Sample(kind, outcome, failed, time.perf_counter() - due, sent - due))


def make_schedule(kinds: Sequence[RequestKind], rate: float, duration: float) -> Iterator[tuple[float, RequestKind]]:
    """Moments in seconds after the start, at exponential gaps, and what is sent then: the same each time."""
    random, weights, moment = Random(0), [each.weight for each in kinds], 0.0  # noqa: S311 - no secrets
    while (moment := moment + random.expovariate(rate)) < duration:
        yield moment, random.choices(kinds, weights)[0]


def summarize(samples: Sequence[Sample], elapsed_s: float) -> Figures:
    """The figures of some samples."""
    answers = [each for each in samples if isinstance(each.outcome, int) and each.outcome not in REFUSALS]
    return Figures(
        requests=len(samples),
        failed=sum(each.failed for each in samples),
        outcomes=dict(Counter(each.outcome for each in samples)),
        goodput=sum(each.outcome == each.kind.expect for each in samples) / elapsed_s,
        latency_ms=list_percentiles(each.seconds for each in answers),
    )


def list_percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Percentiles in milliseconds, each a value that occurred; none of nothing."""
    if not (values := [each * 1000 for each in seconds]):
        return {}
    found = np.percentile(values, list(PERCENTILES.values()), method="inverted_cdf").round(3)
    return dict(zip(PERCENTILES, found.tolist(), strict=True))


def find_breaches(total: Figures, max_error_rate: float, max_p99_ms: float | None) -> list[str]:
    """A line for each part of the error budget that is broken."""
    breaches = []
    rate, p99 = total.failed / max(total.requests, 1), total.latency_ms.get("p99", np.inf)
    if rate > max_error_rate or not total.requests:
        breaches.append(f"{total.failed} of {total.requests} requests failed; --max-error-rate is {max_error_rate:g}")
    if max_p99_ms is not None and p99 > max_p99_ms:
        breaches.append(f"p99 is {p99:.1f} ms; --max-p99 is {max_p99_ms:g} ms")
    return breaches
