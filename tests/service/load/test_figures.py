"""From samples to figures: each is counted once, percentiles are numpy's, and a budget says which part is broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layertap.service.load.figures import Judge, NotSent, Sample, Step, get_percentile, make_steps, parse_retry_after
from layertap.service.load.report import Budget
from layertap.service.load.timeline import make_timeline
from tests.service.load.entries import BLOCKS, OPTIONS, VECTOR, of


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    ordered = np.sort(np.random.default_rng(count).random(count))
    for percent in (0, 1, 50, 90, 99, 100):
        expected = np.percentile(ordered, percent, method="inverted_cdf")
        assert get_percentile(ordered.tolist(), percent) == expected


def test_figures() -> None:
    """Every sample is counted once: as a status, as an error, or as a client that left."""
    judge = Judge(of(VECTOR, BLOCKS), replace(OPTIONS, allow=frozenset({429})), 2.0)
    samples = [
        *(Sample(0, seconds=number / 1000, status=200, size=10, timing="a;dur=1, b;dur=4") for number in range(1, 5)),
        Sample(1, seconds=0.1, status=200, size=60, timing='a;dur=3, cache;desc="hit"'),
        Sample(0, seconds=0.5, status=500),
        Sample(0, seconds=0.01, status=429, retry_after=1.0, timing="a;dur=100"),
        Sample(0, seconds=0.03, status=503),
        Sample(1, seconds=9.0, error="ReadError"),
        Sample(1, seconds=9.0),
    ]
    found = judge.summarize(samples, not_sent=7)
    assert (found.requests, found.not_sent, found.left, found.unexpected) == (10, 7, 1, 2)
    assert found.statuses == {200: 5, 429: 1, 500: 1, 503: 1}
    assert found.errors == {"ReadError": 1}
    assert (found.per_second, found.goodput, found.rows_per_second, found.bytes_per_second) == (5, 2.5, 3.5, 50)
    assert found.latency_ms is not None
    assert (found.latency_ms.p50, found.latency_ms.p90, found.latency_ms.max) == (3, 500, 500)
    assert found.refusal_ms is not None
    assert (found.refused, found.refused_with_retry_after) == (2, 1)
    assert (found.refusal_ms.p50, found.refusal_ms.max) == (10, 30)
    assert [(name, step.answers, step.mean, step.median, step.p99) for name, step in found.steps.items()] == [
        ("a", 5, 1.4, 1, 3),
        ("b", 4, 4, 4, 4),
    ]


def test_figures_of_nothing() -> None:
    found = Judge(of(VECTOR), OPTIONS, 0.0).summarize([], 0)
    assert (found.requests, found.per_second, found.latency_ms, found.refusal_ms, found.steps) == (0, 0, None, None, {})


def test_server_timing() -> None:
    """Steps that have a time are taken from headers of whatever else."""
    headers = ["parse;dur=0.10, forward;dur=12", 'parse;dur=0.3, cache;desc="hit"', ";;;;, ;, a;;dur=1;", ""]
    assert make_steps(headers) == {"parse": Step(2, 0.2, 0.1, 0.3), "forward": Step(1, 12.0, 12.0, 12.0)}


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("0", 0.0), (None, None), ("", None), ("soon", None), ("-1", None), ("nan", None), ("inf", None)],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds


JUDGE = Judge(of(VECTOR), replace(OPTIONS, allow=frozenset({429})), 4.0)
MIXED = [
    *(Sample(0, seconds=0.1, at=moment, status=200) for moment in (0.0, 0.5, 1.0, 1.95)),
    Sample(0, seconds=2.5, at=1.2, status=200),
    Sample(0, seconds=0.1, at=2.0, status=500),
    Sample(0, seconds=0.1, at=2.0, error="ReadError"),
    Sample(0, seconds=0.1, at=3.0, status=429),
    Sample(0, seconds=0.1, at=3.0),
]


def test_timeline() -> None:
    """Outcomes are counted when they came, latencies by the moment they were due; a client that left is neither."""
    timeline = make_timeline(JUDGE, MIXED, [NotSent(0, 3.5)])
    assert [each.begin_s for each in timeline] == [0, 1, 2, 3]
    assert [each.due for each in timeline] == [2, 3, 2, 3]
    assert [each.good for each in timeline] == [2, 1, 1, 1]
    assert [each.failed for each in timeline] == [0, 0, 2, 0]
    assert [each.refused for each in timeline] == [0, 0, 0, 1]
    assert [each.not_sent for each in timeline] == [0, 0, 0, 1]
    assert [each.latency_ms and each.latency_ms.max for each in timeline] == [100, 2500, 100, None]


def test_timeline_is_bounded() -> None:
    """A week has as many intervals as a minute has at most."""
    samples = [Sample(0, seconds=0.1, at=3600.0 * hour, status=200) for hour in range(168)]
    timeline = make_timeline(JUDGE, samples, [])
    assert len(timeline) <= 60
    assert sum(each.good for each in timeline) == 168
    assert make_timeline(JUDGE, [], []) == []


@pytest.mark.parametrize(
    ("budget", "breaches"),
    [
        (Budget(0.5), []),
        (Budget(0.3, 2500.0), []),
        (Budget(), ["3 of 10 requests failed, a share of 0.3; --max-error-rate allows 0"]),
        (Budget(0.29, 3000), ["3 of 10 requests failed, a share of 0.3; --max-error-rate allows 0.29"]),
        (Budget(1.0, 99.5), ["p99 is 2500.0 ms; --max-p99 allows 99.5 ms"]),
    ],
)
def test_budget(budget: Budget, breaches: list[str]) -> None:
    """Unexpected answers, missing ones and requests that were not sent are failures; allowed refusals are none."""
    assert budget.find_breaches(JUDGE.summarize(MIXED, not_sent=1)) == breaches


def test_budget_of_nothing() -> None:
    """What was not measured keeps no budget."""
    assert Budget(1.0).find_breaches(JUDGE.summarize([], 0)) == ["no request was counted"]
    refused = JUDGE.summarize([Sample(0, 0.1, status=429)], 0)
    assert Budget(0.0, 5.0).find_breaches(refused) == ["there is no answer to take a p99 of; --max-p99 allows 5 ms"]


@pytest.mark.parametrize(("rate", "p99"), [(-0.1, None), (1.1, None), (float("nan"), None), (0, 0), (0, float("nan"))])
def test_senseless_budget(rate: float, p99: float | None) -> None:
    with pytest.raises(ValueError, match="and should be"):
        Budget(rate, p99)
