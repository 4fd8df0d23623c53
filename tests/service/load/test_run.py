"""Runs against a server: what is sent is what the seed says, and what is counted is what the server has answered."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from layertap.service.load.options import Options
from layertap.service.load.report import Report
from layertap.service.load.run import Now, make_schedule, run
from layertap.service.load.scenario import find_scenario
from tests.server import Live, serving
from tests.service.gated_server import admitted_rows, hold_model, wait_until
from tests.service.load.entries import BAD, BLOCKS, GATED, LOOPS, NOWHERE, ROWS, UNKNOWN, VECTOR, of, weights
from tests.service.support import Json, configured, net

PAUSE_S = 0.3


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
        report = run(chosen, options)
        wait_until(lambda: served(caplog).total() >= options.requests)  # a request is logged after its reply
    total = report.total
    sent = Counter(chosen[number].name for _, number in make_schedule(weights(chosen), options))
    assert {name: each.requests for name, each in report.kinds.items()} == sent
    assert (total.requests, total.not_sent, total.left, total.errors) == (100, 0, 0, {})
    assert total.statuses == served(caplog)
    assert total.statuses == {200: sent["vector"] + sent["blocks"] + sent["rows"], 422: sent["bad"] + sent["unknown"]}
    assert total.unexpected == report.kinds["unknown"].unexpected == sent["unknown"] > 0
    assert not report.ok
    rows = sent["vector"] + 3 * sent["blocks"] + 4 * sent["rows"]
    assert total.rows_per_second * report.elapsed_s == pytest.approx(rows, rel=0.01)
    assert total.goodput * report.elapsed_s == pytest.approx(100 - sent["unknown"], rel=0.01)
    assert {"parse", "decode", "queue", "forward", "total"} <= total.steps.keys()
    assert total.steps["total"].answers == 100
    assert total.steps["forward"].answers == total.statuses[200]
    assert (report.late_ms is None) == ("rate" not in loop)


def test_warmup_is_not_counted(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "layertap.access"):
        report = run(of(VECTOR), Options(live.url, requests=10, warmup=7))
        wait_until(lambda: served(caplog).total() >= 17)
    assert report.total.statuses == {200: 10}
    assert served(caplog) == {200: 17}


def test_clients_that_leave(live: Live) -> None:
    """They are counted as such, not as errors, and the connection is closed: the server hears of it."""
    with hold_model(live):
        report = run(of({**GATED, "leave_after": 0.05}), Options(live.url, requests=8, connections=4))
    assert (report.total.left, report.total.statuses, report.total.errors) == (8, {}, {})
    assert report.ok


@contextmanager
def running(entry: Json, options: Options) -> Iterator[tuple[list[Now], Callable[[], Report]]]:
    """A run in a thread: what it has told so far, and its report, to be asked for after the block."""
    told: list[Now] = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, of(entry), options, told.append)
        yield told, future.result


def test_refusals(clean: None) -> None:
    """Refusals have figures of their own; allowed ones are no fault, nor do they count as good."""
    with serving(configured(net("gated", "Gated")), max_queue_rows=64) as limited:
        options = Options(limited.url, requests=12, rate=500.0, allow=frozenset({429}))
        with running({**GATED, "inputs": 20}, options) as (told, report):
            with hold_model(limited):
                wait_until(lambda: bool(told) and told[-1].done + (admitted_rows(limited) - 1) // 20 == 12)
            found = report()
    total = found.total
    assert total.statuses.keys() == {200, 429}
    assert sum(total.statuses.values()) == 12
    assert total.refused == total.refused_with_retry_after == total.statuses[429]
    assert total.refusal_ms is not None
    assert total.latency_ms is not None
    assert found.ok
    assert total.goodput < total.per_second
    assert total.steps["total"].answers == total.statuses[200]


def test_max_in_flight(live: Live) -> None:
    """In open loop, what exceeds the bound is not sent, and is counted."""
    options = Options(live.url, requests=30, rate=1000.0, max_in_flight=3)
    with running(GATED, options) as (told, report):
        with hold_model(live):
            wait_until(lambda: bool(told) and told[-1].not_sent == 27)
        found = report()
    assert (found.total.requests, found.total.not_sent, found.total.statuses) == (3, 27, {200: 3})


def test_server_that_stalls(live: Live) -> None:
    """It delays none of the following requests: all are under way while it stalls, and its pause is in each latency."""
    options = Options(live.url, requests=20, rate=1000.0, arrivals="constant")
    with running(GATED, options) as (_, report):
        with hold_model(live):
            wait_until(lambda: admitted_rows(live) == 21)
            begun = time.perf_counter()
            wait_until(lambda: time.perf_counter() - begun > PAUSE_S)
            stalled_ms = 1000 * (time.perf_counter() - begun)
        found = report()
    assert found.total.statuses == {200: 20}
    assert found.total.latency_ms is not None
    assert found.total.latency_ms.p50 >= stalled_ms
    assert found.late_ms is not None
    assert sum(each.due for each in found.timeline) == 20
    assert found.timeline[0].due == 20  # one each millisecond


@pytest.mark.parametrize("respect", [True, False])
def test_retry_after(clean: None, respect: bool) -> None:
    """A connection that was told to wait for long sends nothing more where it respects that, and goes on where not."""
    with serving(configured(), api_keys=("key",), key_rate=0.001, key_burst=2) as limited:
        options = Options(
            limited.url,
            connections=2,
            requests=20,
            duration=2.0 if respect else None,
            respect_retry_after=respect,
            headers={"Authorization": "Bearer key"},
        )
        total = run(of(VECTOR), options).total
    assert total.refused == total.refused_with_retry_after == total.statuses.get(429, 0)
    if respect:
        assert total.refused <= 2
        assert total.requests <= 4
    else:
        assert total.statuses == {200: 2, 429: 18}


def test_dialects(live: Live) -> None:
    """Every route of the built-in scenario answers."""
    report = run(find_scenario("digits"), Options(live.url, requests=200, connections=8))
    assert report.total.failed == 0
    assert [name for name, each in report.kinds.items() if not each.requests] == []


def test_nobody_listens() -> None:
    report = run(of(VECTOR), Options(NOWHERE, requests=3, connections=3))
    assert (report.total.requests, report.total.errors, report.total.statuses) == (3, {"ConnectError": 3}, {})
    assert not report.ok


def test_connections_that_break() -> None:
    """A server that hangs up is counted, by kind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(4):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1)

        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = run(of(VECTOR), Options(url, requests=4, connections=2))
        thread.join()
    assert sum(report.total.errors.values()) == report.total.requests == 4
    assert not report.ok
