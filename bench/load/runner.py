"""Sends requests, in closed or open loop."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx

from bench.load.connection_pool import ConnectionPool
from bench.load.options import Options
from bench.load.report import Figuring, Report, Sample, Spread, by_scenario, spread
from bench.load.scenario import Scenario
from bench.load.schedule import Entry, schedule

PAUSE_S = 0.1  # of a connection in closed loop after an error, so that a server that is gone isn't hammered
TICK_S = 1.0  # between two looks at the figures, and so what "now" means


class Now(NamedTuple):
    """The figures of a run that goes on; ``per_second`` and ``latency_ms`` are of the time since the last look."""

    elapsed_s: float
    done: int
    not_sent: int
    bad: int
    per_second: float
    latency_ms: Spread | None


Watch = Callable[[Now], None]


@dataclass
class Record:
    """What has happened so far."""

    samples: list[Sample] = field(default_factory=list)
    not_sent: list[int] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    cpu_begun: float = field(default_factory=time.process_time)
    elapsed: float = 0.0
    cpu: float = 0.0

    def end(self) -> None:
        """Take the time."""
        self.elapsed = time.perf_counter() - self.begun
        self.cpu = time.process_time() - self.cpu_begun


@dataclass(frozen=True)
class Sender:
    """A client and its requests, which are built once and sent again and again."""

    client: httpx.AsyncClient
    scenarios: Sequence[Scenario]
    requests: Sequence[httpx.Request]

    async def send(self, number: int, due: float) -> Sample:
        """Send the request of a scenario and read all of the answer; ``due`` is when it should have been sent."""
        begun = time.perf_counter()
        status = error = None
        size, headers = 0, httpx.Headers()
        try:
            async with asyncio.timeout(self.scenarios[number].leave_after):
                async with aclosing(await self.client.send(self.requests[number], stream=True)) as response:
                    async for chunk in response.aiter_raw():
                        size += len(chunk)
                status, headers = response.status_code, response.headers
        except httpx.TransportError as found:
            error = type(found).__name__
        except TimeoutError:
            pass  # the client has left, and with it its connection
        return Sample(
            scenario=number,
            seconds=time.perf_counter() - due,
            late=begun - due,
            status=status,
            error=error,
            size=size,
            retry_after="retry-after" in headers,
            timing=headers.get("server-timing", ""),
        )


def run(scenarios: Sequence[Scenario], options: Options, watch: Watch | None = None) -> Report:
    """Warm up, send, and give the figures; interrupted, those of what was done. ``watch`` is told them every second."""
    records: list[Record] = []
    interrupted = False
    with asyncio.Runner(loop_factory=_loop()) as runner:
        try:
            runner.run(_run(scenarios, options, records.append, watch))
        except KeyboardInterrupt:
            interrupted = True
    return _report(scenarios, options, records[0] if records else Record(), interrupted)


async def _run(
    scenarios: Sequence[Scenario], options: Options, keep: Callable[[Record], None], watch: Watch | None
) -> None:
    weights = [each.weight for each in scenarios]
    loop = _closed if options.rate is None else _open
    async with _client(options) as client:
        sender = Sender(client, scenarios, [_request(client, each, options.url) for each in scenarios])
        if options.warmup:
            warmup = replace(options, requests=options.warmup, seconds=None)
            await loop(sender, warmup, schedule(weights, warmup, "warm-up"), Record())
        record = Record()
        keep(record)
        try:
            async with _watched(record, Figuring(scenarios, options, 0.0), watch):
                await loop(sender, options, schedule(weights, options), record)
        finally:
            record.end()


async def _closed(sender: Sender, options: Options, entries: Iterator[Entry], record: Record) -> None:
    """Each connection sends its next request once the last one is answered."""
    until = record.begun + (options.seconds or float("inf"))

    async def connection() -> None:
        while time.perf_counter() < until and (entry := next(entries, None)) is not None:
            sample = await sender.send(entry[1], time.perf_counter())
            record.samples.append(sample)
            if sample.error is not None:
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.connections):
            group.create_task(connection())


async def _open(sender: Sender, options: Options, entries: Iterator[Entry], record: Record) -> None:
    """Requests are sent at their moments, whatever became of those before; their time counts from these moments."""
    in_flight = 0

    async def one(number: int, due: float) -> None:
        nonlocal in_flight
        try:
            record.samples.append(await sender.send(number, due))
        finally:
            in_flight -= 1

    async with asyncio.TaskGroup() as group:
        for moment, number in entries:
            due = record.begun + moment
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if in_flight >= options.most_in_flight:
                record.not_sent.append(number)
                continue
            in_flight += 1
            group.create_task(one(number, due))


@asynccontextmanager
async def _watched(record: Record, figuring: Figuring, watch: Watch | None) -> Any:
    """While the block runs, tell a watcher the figures every now and then, and once more at its end."""
    if watch is None:
        yield
        return
    look = _looking(record, figuring)

    async def ticking() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            watch(look())

    ticks = asyncio.create_task(ticking())
    try:
        yield
    finally:
        ticks.cancel()
        with suppress(asyncio.CancelledError):
            await ticks
        watch(look())


def _looking(record: Record, figuring: Figuring) -> Callable[[], Now]:
    seen, bad, last = 0, 0, record.begun

    def look() -> Now:
        nonlocal seen, bad, last
        new, now = record.samples[seen:], time.perf_counter()
        seen += len(new)
        bad += sum(each.error is not None or figuring.unexpected(each) for each in new)
        rate, last = len(new) / max(now - last, 1e-9), now
        latency = spread(each.seconds for each in new if each.status is not None)
        return Now(now - record.begun, seen, len(record.not_sent), bad, rate, latency)

    return look


def _client(options: Options) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"Accept-Encoding": "identity", **options.headers},
        transport=ConnectionPool(),
        timeout=options.timeout,
        trust_env=False,  # a proxy would be measured too
    )


def _request(client: httpx.AsyncClient, scenario: Scenario, url: str) -> httpx.Request:
    address = f"{url.rstrip('/')}/extract?{scenario.query}"
    return client.build_request("POST", address, content=scenario.content, headers=dict(scenario.headers))


def _report(scenarios: Sequence[Scenario], options: Options, record: Record, interrupted: bool) -> Report:
    figuring = Figuring(scenarios, options, record.elapsed)
    return Report(
        total=figuring.figures(record.samples, len(record.not_sent)),
        scenarios=by_scenario(figuring, record.samples, record.not_sent),
        elapsed_s=round(record.elapsed, 3),
        client_cpu=round(record.cpu / record.elapsed, 3) if record.elapsed else 0.0,
        late_ms=spread(each.late for each in record.samples) if options.rate is not None else None,
        interrupted=interrupted,
    )


def _loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where there is one: the client takes less of the machine."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory
