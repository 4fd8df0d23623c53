"""From samples to figures: each is counted once, and a budget says which part is broken."""

from __future__ import annotations

import pytest

from layertap.service.load.figures import NOT_SENT, Sample, find_breaches, summarize
from tests.service.load.entries import BLOCKS, VECTOR, of

ONE, THREE = of(VECTOR, BLOCKS)
SAMPLES = [  # an allowed refusal, a failed one, and what else may happen
    *(Sample(ONE, 0.0, failed=False, status=200, seconds=number / 1000) for number in range(1, 5)),
    Sample(THREE, 0.0, failed=False, status=200, seconds=0.1),
    Sample(ONE, 0.0, failed=True, status=500, seconds=0.5),
    Sample(ONE, 0.0, failed=False, status=429, seconds=0.01),
    Sample(ONE, 0.0, failed=True, status=503, seconds=0.03),
    Sample(THREE, 0.0, failed=True, error="ReadError", seconds=9.0),
    Sample(THREE, 0.0, failed=True, error=NOT_SENT),
]


def test_figures() -> None:
    """Every sample is counted once, as a status or as an error; refusals and errors are in no percentile."""
    found = summarize(SAMPLES, 2.0)
    assert (found.requests, found.failed) == (10, 4)
    assert found.statuses == {200: 5, 429: 1, 500: 1, 503: 1}
    assert found.errors == {"ReadError": 1, "not sent": 1}
    assert (found.goodput, found.rows_per_second) == (2.5, 3.5)
    assert found.latency_ms is not None
    assert (found.latency_ms.p50, found.latency_ms.p90, found.latency_ms.max) == (3, 500, 500)
    assert found.refusal_ms is not None
    assert (found.refusal_ms.p50, found.refusal_ms.max) == (10, 30)


@pytest.mark.parametrize(
    ("max_error_rate", "max_p99", "breaches"),
    [
        (0.5, None, []),
        (0.4, 500.0, []),
        (0.0, None, ["4 of 10 requests failed, a share of 0.4; --max-error-rate allows 0"]),
        (0.39, 3000, ["4 of 10 requests failed, a share of 0.4; --max-error-rate allows 0.39"]),
        (1.0, 99.5, ["p99 is 500.0 ms; --max-p99 allows 99.5 ms"]),
    ],
)
def test_budget(max_error_rate: float, max_p99: float | None, breaches: list[str]) -> None:
    """Each part that is broken has a line."""
    assert find_breaches(summarize(SAMPLES, 2.0), max_error_rate, max_p99) == breaches
