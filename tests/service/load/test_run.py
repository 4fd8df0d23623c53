"""Runs against a server: what is sent is what the seed says, and what is counted is what the server has answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from layertap.service.load.figures import NOT_SENT, Sample, summarize
from layertap.service.load.options import Options
from layertap.service.load.report import find_lateness, print_report
from layertap.service.load.run import LoadRun, make_schedule, run
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import admitted_rows, hold_model, wait_until
from tests.service.load.entries import BAD, BLOCKS, GATED, LOOPS, OPTIONS, ROWS, UNKNOWN, VECTOR, of
from tests.service.support import Json, configured, net

PAUSE_S = 0.3
ESCAPE = "\x1b"


def served(caplog: pytest.LogCaptureFixture) -> Counter[int]:
    """The statuses that the server says it has answered ``POST /extract`` with."""
    fields = [record.fields for record in caplog.records if record.name == "layertap.access"]  # type: ignore[attr-defined]
    return Counter(each["status"] for each in fields if each["path"] == "/extract")


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_hundred_requests(live: Live, caplog: pytest.LogCaptureFixture, loop: Json) -> None:
    """What is counted is what the server has answered, and what the seed says was sent."""
    chosen = of(VECTOR, BLOCKS, ROWS, BAD, UNKNOWN)
    options = Options(live.url, requests=100, duration=240.0, seed=4, **loop)
    with caplog.at_level(logging.INFO, "layertap.access"):
        done = run(chosen, options)
        wait_until(lambda: served(caplog).total() >= options.requests)  # a request is logged after its reply
    total, kinds = done.total, done.by_kind
    sent = Counter(kind.name for _, kind in make_schedule(chosen, options))
    assert {name: each.requests for name, each in kinds.items()} == sent
    assert (total.requests, total.errors) == (100, {})
    assert total.statuses == served(caplog)
    assert total.statuses == {200: sent["vector"] + sent["blocks"] + sent["rows"], 422: sent["bad"] + sent["unknown"]}
    assert total.failed == kinds["unknown"].failed == sent["unknown"] > 0
    rows = sent["vector"] + 3 * sent["blocks"] + 4 * sent["rows"]
    assert total.rows_per_second * done.elapsed_s == pytest.approx(rows, rel=0.01)
    assert total.goodput * done.elapsed_s == pytest.approx(100 - sent["unknown"], rel=0.01)
    assert find_lateness(done) is not None


@contextmanager
def running(entry: Json, options: Options) -> Iterator[tuple[LoadRun, Callable[[], None]]]:
    """A run in a thread, and what waits for its end after the block."""
    started = LoadRun(of(entry), options)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, started.send_all(lambda _: None))
        yield started, future.result


def test_refusals(serve: Serve) -> None:
    """Refusals have figures of their own; allowed ones are no fault, nor do they count as good."""
    with serve(configured(net("gated", "Gated")), max_queue_rows=64) as limited:
        options = Options(limited.url, requests=12, rate=500.0, allow=frozenset({429}))
        with running({**GATED, "inputs": 20}, options) as (started, wait):
            with hold_model(limited):
                wait_until(lambda: len(started.samples) + (admitted_rows(limited) - 1) // 20 == 12)
            wait()
    total = started.total
    assert total.statuses.keys() == {200, 429}
    assert (total.requests, total.failed) == (12, 0)
    assert total.refusal_ms is not None
    assert total.latency_ms is not None
    assert total.goodput * started.elapsed_s == pytest.approx(total.statuses[200], rel=0.01)


def test_max_in_flight(live: Live) -> None:
    """In open loop, what exceeds the bound is not sent, and has failed."""
    options = Options(live.url, requests=30, rate=1000.0, max_in_flight=3)
    with running(GATED, options) as (started, wait):
        with hold_model(live):
            wait_until(lambda: len(started.samples) == 27)
        wait()
    total = started.total
    assert (total.requests, total.failed) == (30, 27)
    assert (total.statuses, total.errors) == ({200: 3}, {"not sent": 27})


def test_latency_counts_from_the_due_moment(live: Live) -> None:
    """What holds the tester itself up is in its latencies, and it says how late it was."""
    held_up = LoadRun(of(VECTOR), Options(live.url, requests=5, rate=1000.0))

    async def hold_up() -> None:
        begun = time.perf_counter()
        while time.perf_counter() - begun < PAUSE_S:
            pass  # so that nothing else runs on this loop

    async def run_both() -> None:
        await asyncio.gather(held_up.send_all(lambda _: None), hold_up())

    asyncio.run(run_both())
    assert len(held_up.samples) == 5
    assert all(each.seconds >= PAUSE_S - each.at for each in held_up.samples)
    assert all(each.late is not None and each.late >= PAUSE_S - each.at for each in held_up.samples if each.at)


def test_hostile_names(live: Live) -> None:
    """A name reaches no terminal as what moves its cursor, and is no markup."""
    done = run(of({**VECTOR, "name": f"a{ESCAPE}]0;title\a[bold]b"}), Options(live.url, requests=4))
    shown = StringIO()
    print_report(done, Console(file=shown, width=300))
    assert "[bold]b" in shown.getvalue()
    assert not {ESCAPE, "\a"} & set(shown.getvalue())


# What is sent when


KINDS = of(VECTOR, BAD, ROWS)  # of weights 3, 2, 1


def test_schedules() -> None:
    """One seed gives one schedule, another one another; of the two loops only the moments differ."""
    drawn = []
    for loop in LOOPS.values():
        options = replace(OPTIONS, **loop)
        first, again = (list(make_schedule(KINDS, options)) for _ in range(2))
        assert first == again
        assert len(first) == 100
        assert first != list(make_schedule(KINDS, replace(options, seed=1)))
        drawn.append([kind.name for _, kind in first])
    assert drawn[0] == drawn[1]


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and standard deviation are both one over the rate."""
    moments = [moment for moment, _ in make_schedule(KINDS, replace(OPTIONS, rate=50.0, requests=20_000))]
    gaps = np.diff([0.0, *moments])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


# From samples to figures


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
