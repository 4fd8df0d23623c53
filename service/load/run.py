"""Sends requests, in closed or open loop, by a schedule that the same options give again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

import httpx

from layertap.service.load.figures import NOT_SENT, Figures, Sample, summarize
from layertap.service.load.options import Options
from layertap.service.load.scenario import RequestKind

Schedule = Iterator[tuple[float, RequestKind]]
PAUSE_S = 0.1  # of a connection in closed loop after an error, so that a server that is gone isn't hammered
KEEP_S = 2.0  # less than servers keep an idle connection (uvicorn 5 s), so that none is used while it is closed
WATCH_S = 2.0  # between two looks at the figures


class LoadRun:
    """A load test, and what has become of each request so far.

    Each connection is a pool of its own: httpx's looks at every connection for every request, and with hundreds of them
    the client would be slower than the server that it measures. The one used last is used again first.
    """

    def __init__(self, kinds: Sequence[RequestKind], options: Options) -> None:
        self.kinds = kinds
        self.options = options
        self.samples: list[Sample] = []
        self.elapsed_s = 0.0
        self.client_cpu = 0.0  # CPU-seconds a second of this process: near 1, it was the limit
        self.interrupted = False
        self._begun = self._cpu_begun = 0.0
        self._requests = {kind.name: cycle(_make_requests(kind, options)) for kind in kinds}
        self._tls = httpx.create_ssl_context()
        self._free: list[httpx.AsyncHTTPTransport] = []

    @property
    def total(self) -> Figures:
        """The figures of all requests."""
        return summarize(self.samples, self.elapsed_s)

    @property
    def by_kind(self) -> dict[str, Figures]:
        """The figures of each kind of request, by its name."""
        samples = {kind.name: [each for each in self.samples if each.kind is kind] for kind in self.kinds}
        return {name: summarize(some, self.elapsed_s) for name, some in samples.items()}

    async def send_all(self, watch: Callable[[LoadRun], object]) -> None:
        """Warm up, then send what the options say; ``watch`` is called every now and then and at the end."""
        warm_up = replace(self.options, requests=self.options.warmup, duration=None, seed=self.options.seed + 1)
        try:
            try:
                await self._send(warm_up)
            finally:
                self.samples.clear()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(watch))
                await self._send(self.options)
                watching.cancel()
        finally:
            self._take_time()
            watch(self)
            for connection in self._free:
                await connection.aclose()

    async def _watch(self, watch: Callable[[LoadRun], object]) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._take_time()
            watch(self)

    def _take_time(self) -> None:
        self.elapsed_s = time.perf_counter() - self._begun
        self.client_cpu = (time.process_time() - self._cpu_begun) / self.elapsed_s

    async def _send(self, options: Options) -> None:
        """Send what these options say, and end when all is answered."""
        self._begun, self._cpu_begun = time.perf_counter(), time.process_time()
        schedule = make_schedule(self.kinds, options)
        async with asyncio.TaskGroup() as group:
            if options.rate is not None:
                await self._send_open(schedule, options.max_in_flight, group)
                return
            until = self._begun + (options.duration or math.inf)
            for _ in range(options.connections):
                group.create_task(self._use_connection(schedule, until))

    async def _send_open(self, schedule: Schedule, max_in_flight: int, group: asyncio.TaskGroup) -> None:
        """Send requests at their moments, whatever became of those before; their time counts from these moments."""
        in_flight: set[asyncio.Task[Sample]] = set()
        for moment, kind in schedule:
            due = self._begun + moment
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(in_flight) >= max_in_flight:
                self.samples.append(Sample(kind, moment, failed=True, error=NOT_SENT))
                continue
            task = group.create_task(self._send_request(kind, due))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)

    async def _use_connection(self, schedule: Schedule, until: float) -> None:
        """Closed loop: send the next request once the last one is answered."""
        while (now := time.perf_counter()) < until and (entry := next(schedule, None)) is not None:
            sample = await self._send_request(entry[1], now)
            if sample.error is not None:
                await asyncio.sleep(PAUSE_S)

    async def _send_request(self, kind: RequestKind, due: float) -> Sample:
        """Send the next request of a kind, read all of the answer, and keep what became of it."""
        sent, status, error = time.perf_counter(), None, None
        connection = self._free.pop() if self._free else self._connect()
        try:
            response = await connection.handle_async_request(next(self._requests[kind.name]))
            async for _ in response.aiter_raw():
                pass
            status = response.status_code
        except httpx.TransportError as failure:
            error = type(failure).__name__
        finally:
            ended = time.perf_counter()
            if status is not None:
                self._free.append(connection)
            else:  # httpcore may hold it as busy for ever
                await connection.aclose()
        failed = status != kind.expect and status not in self.options.allow
        sample = Sample(kind, due - self._begun, failed, status, error, ended - due, sent - due)
        self.samples.append(sample)
        return sample

    def _connect(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)


def run(
    kinds: Sequence[RequestKind], options: Options, watch: Callable[[LoadRun], object] = lambda record: None
) -> LoadRun:
    """A load test; interrupted by Ctrl+C, it has what was done."""
    test = LoadRun(kinds, options)
    try:
        asyncio.run(test.send_all(watch))
    except KeyboardInterrupt:
        test.interrupted = True
    return test


def make_schedule(kinds: Sequence[RequestKind], options: Options) -> Schedule:
    """Moments, in seconds after the start, and what is sent then.

    In open loop gaps are exponential. In closed loop every moment is 0: a request is due once a connection is free.
    """
    draws, gaps = Random(f"{options.seed} kinds"), Random(f"{options.seed}")  # noqa: S311 - no secrets
    weights = [each.weight for each in kinds]
    moment = 0.0
    for _ in range(options.requests):
        if options.rate is not None:
            moment += gaps.expovariate(options.rate)
        if options.duration is not None and moment >= options.duration:
            return
        yield moment, draws.choices(kinds, weights)[0]


def _make_requests(kind: RequestKind, options: Options) -> list[httpx.Request]:
    url = f"{options.url.rstrip('/')}{kind.path}"
    headers = {"Accept-Encoding": "identity", **options.headers, **kind.headers}
    timeout = {"timeout": httpx.Timeout(options.timeout).as_dict()}
    return [
        httpx.Request("POST", url, content=content, headers={"Content-Type": media_type, **headers}, extensions=timeout)
        for content, media_type in kind.bodies
    ]
