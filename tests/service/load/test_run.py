"""Runs against a server: what is sent is what the schedule says, what is counted is what the server has answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from layertap.service.load.run import Sample, Sender, find_breaches, make_schedule, summarize
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import admitted_rows, hold_model, wait_until
from tests.service.load.entries import BAD, BLOCKS, GATED, NOWHERE, UNKNOWN, VECTOR, of
from tests.service.support import configured, net

PAUSE_S = 0.3


def served(caplog: pytest.LogCaptureFixture) -> Counter[int]:
    """The statuses that the server says it has answered ``POST /extract`` with."""
    fields = [record.fields for record in caplog.records if record.name == "layertap.access"]  # type: ignore[attr-defined]
    return Counter(each["status"] for each in fields if each["path"] == "/extract")


def test_mix(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """What is counted is what the server has answered, and what the schedule says was sent."""
    sender = Sender(of(VECTOR, BLOCKS, BAD, UNKNOWN), live.url)
    sent = Counter(kind.name for _, kind in make_schedule(sender.kinds, 200.0, 0.5))
    with caplog.at_level(logging.INFO, "layertap.access"):
        asyncio.run(sender.send_at(200.0, 0.5))
        wait_until(lambda: served(caplog).total() >= sent.total())  # a request is logged after its reply
    total = summarize(sender.samples, 1.0)
    assert Counter(each.kind.name for each in sender.samples) == sent
    assert total.requests == sent.total() > 50
    assert total.outcomes == served(caplog)
    assert total.outcomes == {200: sent["vector"] + sent["blocks"], 422: sent["bad"] + sent["unknown"]}
    assert total.failed == sent["unknown"] > 0
    assert total.goodput == sent.total() - sent["unknown"]


def test_refusals(serve: Serve) -> None:
    """Allowed refusals are no failures, nor do they count as good."""
    with serve(configured(net("gated", "Gated")), max_queue_rows=64) as limited:
        sender = Sender(of(GATED), limited.url, allow=(429,))
        due = sum(1 for _ in make_schedule(sender.kinds, 200.0, 0.1))
        with ThreadPoolExecutor(1) as pool:
            with hold_model(limited):
                sending = pool.submit(asyncio.run, sender.send_at(200.0, 0.1))
                wait_until(lambda: len(sender.samples) + admitted_rows(limited) // 20 == due)
            sending.result()
    total = summarize(sender.samples, 1.0)
    assert total.outcomes == {200: 3, 429: due - 3}
    assert (total.failed, total.goodput) == (0, 3)


def test_nobody_answers() -> None:
    """A request without an answer has failed, by the name of the error."""
    sender = Sender(of(VECTOR), NOWHERE)
    asyncio.run(sender.send_at(100.0, 0.1))
    total = summarize(sender.samples, 1.0)
    assert total.outcomes == {"ConnectError": total.failed}
    assert (total.failed, total.latency_ms) == (total.requests, {})


def test_latency_counts_from_the_due_moment(live: Live) -> None:
    """What holds the tester itself up is in its latencies, and it says how late it was."""
    sender = Sender(of(VECTOR), live.url)

    async def hold_up() -> None:
        begun = time.perf_counter()
        while time.perf_counter() - begun < PAUSE_S:
            pass  # so that nothing else runs on this loop

    async def run_both() -> None:
        await asyncio.gather(sender.send_at(1000.0, 0.005), hold_up())

    asyncio.run(run_both())
    assert sender.samples
    assert all(each.seconds >= each.late >= PAUSE_S - 0.005 for each in sender.samples)


# What is sent when


KINDS = of(VECTOR, BAD, BLOCKS)  # of weights 3, 2, 2


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and standard deviation are both one over the rate; each time they are the same."""
    schedule = list(make_schedule(KINDS, 50.0, 400.0))
    assert schedule == list(make_schedule(KINDS, 50.0, 400.0))
    gaps = np.diff([0.0, *(moment for moment, _ in schedule)])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)
    assert sum(kind.name == "vector" for _, kind in schedule) / len(schedule) == pytest.approx(3 / 7, rel=0.03)


# From samples to figures


ONE, THREE = of(VECTOR, BLOCKS)
SAMPLES = [  # an allowed refusal, a failed one, and what else may happen
    *(Sample(ONE, 200, failed=False, seconds=number / 1000, late=0.0) for number in range(1, 5)),
    Sample(THREE, 200, failed=False, seconds=0.1, late=0.0),
    Sample(ONE, 500, failed=True, seconds=0.5, late=0.0),
    Sample(ONE, 429, failed=False, seconds=0.01, late=0.0),
    Sample(ONE, 503, failed=True, seconds=0.03, late=0.0),
    Sample(THREE, "ReadError", failed=True, seconds=9.0, late=0.0),
]


def test_figures() -> None:
    """Every sample is counted once, as a status or as an error; refusals and errors are in no percentile."""
    found = summarize(SAMPLES, 2.0)
    assert (found.requests, found.failed, found.goodput) == (9, 3, 2.5)
    assert found.outcomes == {200: 5, 429: 1, 500: 1, 503: 1, "ReadError": 1}
    assert found.latency_ms == {"p50": 3, "p90": 500, "p99": 500, "max": 500}


@pytest.mark.parametrize(
    ("samples", "max_error_rate", "max_p99", "broken"),
    [
        (SAMPLES, 0.34, 500.0, []),
        (SAMPLES, 0.3, 500.0, ["3 of 9 requests failed"]),
        (SAMPLES, 0.3, 499.0, ["3 of 9 requests failed", "p99 is 500.0 ms"]),
        ([], 1.0, None, ["0 of 0 requests failed"]),
        (SAMPLES[-1:], 1.0, 1.0, ["p99 is inf ms"]),
    ],
)
def test_budget(samples: list[Sample], max_error_rate: float, max_p99: float | None, broken: list[str]) -> None:
    """Each part of the budget that is broken is named; no requests and no answers break it too."""
    found = find_breaches(summarize(samples, 1.0), max_error_rate, max_p99)
    assert [line.partition(";")[0] for line in found] == broken
