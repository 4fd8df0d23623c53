"""Samples of requests and statistics over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from layertap.service.load.scenario import RequestKind

REFUSALS = frozenset({429, 503})
NOT_SENT = "not sent"  # the error of a request that was due while too many were under way


class Sample(NamedTuple):
    """A request, which has a ``status`` or an ``error``.

    It was due ``at`` seconds after the run's start. ``seconds`` count from there to the answer's end, ``late`` to the
    moment at which it was sent, where it was.
    """

    kind: RequestKind
    at: float
    failed: bool
    status: int | None = None
    error: str | None = None
    seconds: float = 0.0
    late: float | None = None


@dataclass(frozen=True)
class Spread:
    """Percentiles and the greatest; each is a value that occurred. Milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    def __str__(self) -> str:
        return f"p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms"


@dataclass(frozen=True)
class Figures:
    """Of one kind of request, or of all.

    ``requests`` were due; each is in ``statuses`` or in ``errors`` (no answer). ``failed`` had no answer, or one that
    is neither expected nor allowed. ``goodput`` is expected answers a second, ``rows_per_second`` the inputs of those
    with status 200. ``latency_ms`` is of all answers but refusals (429, 503), which have their own.
    """

    requests: int
    failed: int
    statuses: dict[int, int]
    errors: dict[str, int]
    goodput: float
    rows_per_second: float
    latency_ms: Spread | None
    refusal_ms: Spread | None


def summarize(samples: Sequence[Sample], elapsed_s: float) -> Figures:
    """The figures of some samples."""
    elapsed_s = elapsed_s or 1.0  # there is nothing then
    return Figures(
        requests=len(samples),
        failed=sum(each.failed for each in samples),
        statuses=dict(sorted(Counter(each.status for each in samples if each.status).items())),
        errors=dict(sorted(Counter(each.error for each in samples if each.error).items())),
        goodput=round(sum(each.status == each.kind.expect for each in samples) / elapsed_s, 3),
        rows_per_second=round(sum(each.kind.inputs for each in samples if each.status == 200) / elapsed_s, 3),
        latency_ms=make_spread(each.seconds for each in samples if each.status and each.status not in REFUSALS),
        refusal_ms=make_spread(each.seconds for each in samples if each.status in REFUSALS),
    )


def make_spread(seconds: Iterable[float]) -> Spread | None:
    """Milliseconds of some seconds; None where there are none."""
    if not (values := [each * 1000 for each in seconds]):
        return None
    return Spread(*np.percentile(values, (50, 90, 99, 100), method="inverted_cdf").round(3).tolist())


def find_breaches(total: Figures, max_error_rate: float, max_p99_ms: float | None) -> list[str]:
    """A line for each part of the error budget that is broken; none where all is kept."""
    if not total.requests:
        return ["no request was counted"]
    breaches = []
    rate = total.failed / total.requests
    if rate > max_error_rate:
        share = f"{total.failed} of {total.requests} requests failed, a share of {rate:.3g}"
        breaches.append(f"{share}; --max-error-rate allows {max_error_rate:g}")
    if max_p99_ms is not None and (total.latency_ms is None or total.latency_ms.p99 > max_p99_ms):
        found = f"p99 is {total.latency_ms.p99:.1f} ms" if total.latency_ms else "there is no answer to take a p99 of"
        breaches.append(f"{found}; --max-p99 allows {max_p99_ms:g} ms")
    return breaches
