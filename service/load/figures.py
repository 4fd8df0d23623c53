"""What became of requests, and figures of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    size: int = 0

    @property
    def good(self) -> bool:
        """Whether the answer is an expected one."""
        return self.status == self.kind.expect


@dataclass(frozen=True)
class Spread:
    """Percentiles and the greatest, by nearest rank: each is a value that occurred. Milliseconds."""

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
    bytes_per_second: float
    latency_ms: Spread | None
    refusal_ms: Spread | None


def summarize(samples: Sequence[Sample], elapsed_s: float) -> Figures:
    """The figures of some samples."""
    answers = [each for each in samples if each.status is not None]

    def get_rate(number: int) -> float:
        return round(number / elapsed_s, 3) if elapsed_s else 0.0

    return Figures(
        requests=len(samples),
        failed=sum(each.failed for each in samples),
        statuses=dict(sorted(Counter(each.status for each in answers if each.status).items())),
        errors=dict(sorted(Counter(each.error for each in samples if each.error).items())),
        goodput=get_rate(sum(each.good for each in answers)),
        rows_per_second=get_rate(sum(each.kind.inputs for each in answers if each.status == 200)),
        bytes_per_second=get_rate(sum(each.size for each in answers)),
        latency_ms=make_spread(each.seconds for each in answers if each.status not in REFUSALS),
        refusal_ms=make_spread(each.seconds for each in answers if each.status in REFUSALS),
    )


def make_spread(seconds: Iterable[float]) -> Spread | None:
    """Milliseconds of some seconds; None where there are none."""
    ordered = sorted(each * 1000 for each in seconds)
    if not ordered:
        return None
    return Spread(*(round(get_percentile(ordered, percent), 3) for percent in (50, 90, 99, 100)))


def get_percentile(ordered: Sequence[float], percent: int) -> float:
    """The least value that ``percent`` of all values do not exceed; ``ordered`` ascends and is not empty."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


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
