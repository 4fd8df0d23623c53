"""Sends requests, in closed or open loop, by a schedule that the same options give again."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random
from typing import NamedTuple

from layertap.service.load.figures import Judge, NotSent, Sample, Spread, make_spread
from layertap.service.load.options import Options
from layertap.service.load.report import Report
from layertap.service.load.scenario import RequestKind
from layertap.service.load.sender import Sender
from layertap.service.load.timeline import make_timeline

Entry = tuple[float, int]


def make_schedule(weights: Sequence[float], options: Options, phase: str = "") -> Iterator[Entry]:
    """Entries of a moment, in seconds after the start, and the number of a kind of request.

    In closed loop every moment is 0: a request is due once a connection is free. ``phase`` gives another schedule.
    """
    numbers = draw_numbers(weights, f"{options.seed} kinds {phase}")
    moments = repeat(0.0) if options.rate is None else ARRIVALS[options.arrivals](options, f"{options.seed} {phase}")
    entries = islice(zip(moments, numbers, strict=False), options.requests)
    if options.duration is None:
        return entries
    limit = options.duration
    return takewhile(lambda entry: entry[0] < limit, entries)


def draw_numbers(weights: Sequence[float], seed: str) -> Iterator[int]:
    """Numbers of kinds of requests without end, each as often as its weight says."""
    random = Random(seed)  # noqa: S311 - a schedule is no secret
    cumulated = list(accumulate(weights))
    numbers = range(len(weights))
    while True:
        yield random.choices(numbers, cum_weights=cumulated)[0]


def _poisson(options: Options, seed: str) -> Iterator[float]:
    random = Random(seed)  # noqa: S311 - a schedule is no secret
    return accumulate(random.expovariate(options.rate or 1) for _ in count())


def _constant(options: Options, _: str) -> Iterator[float]:
    return (number / (options.rate or 1) for number in count())


ARRIVALS = {"poisson": _poisson, "constant": _constant}


PAUSE_S = 0.1  # of a connection in closed loop after an error, so that a server that is gone isn't hammered
TICK_S = 1.0  # between two looks at the figures, and so what "now" means


class Now(NamedTuple):
    """The figures of a run that goes on; ``per_second`` and ``latency_ms`` are of the time since the last look."""

    elapsed_s: float
    done: int
    not_sent: int
    failed: int
    per_second: float
    latency_ms: Spread | None


Watch = Callable[[Now], None]


@dataclass
class Record:
    """What has happened so far."""

    samples: list[Sample] = field(default_factory=list)
    not_sent: list[NotSent] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    cpu_begun: float = field(default_factory=time.process_time)
    elapsed: float = 0.0
    cpu: float = 0.0

    def end(self) -> None:
        """Take the time."""
        self.elapsed = time.perf_counter() - self.begun
        self.cpu = time.process_time() - self.cpu_begun


def run(kinds: Sequence[RequestKind], options: Options, watch: Watch | None = None) -> Report:
    """Warm up, send, and give the figures; interrupted, those of what was done. ``watch`` is told them every second."""
    records: list[Record] = []
    interrupted = False
    with asyncio.Runner(loop_factory=_find_loop()) as runner:
        try:
            runner.run(_run(kinds, options, records.append, watch))
        except KeyboardInterrupt:
            interrupted = True
    return _make_report(kinds, options, records[0] if records else Record(), interrupted)


async def _run(
    kinds: Sequence[RequestKind], options: Options, keep: Callable[[Record], None], watch: Watch | None
) -> None:
    weights = [each.weight for each in kinds]
    loop = _run_closed if options.rate is None else _run_open
    async with aclosing(Sender(kinds, options)) as sender:
        if options.warmup:
            warmup = replace(options, requests=options.warmup, duration=None)
            await loop(sender, warmup, make_schedule(weights, warmup, "warm-up"), Record())
        record = Record()
        keep(record)
        try:
            async with _watch(record, Judge(kinds, options, 0.0), watch):
                await loop(sender, options, make_schedule(weights, options), record)
        finally:
            record.end()


async def _run_closed(sender: Sender, options: Options, entries: Iterator[Entry], record: Record) -> None:
    """Each connection sends its next request once the last one is answered."""
    until = record.begun + (options.duration or float("inf"))

    async def use_connection() -> None:
        while (now := time.perf_counter()) < until and (entry := next(entries, None)) is not None:
            sample = await sender.send(entry[1], now, record.begun)
            record.samples.append(sample)
            if pause := _choose_pause(sample, options):
                await asyncio.sleep(min(pause, max(until - time.perf_counter(), 0.0)))

    async with asyncio.TaskGroup() as group:
        for _ in range(options.connections):
            group.create_task(use_connection())


def _choose_pause(sample: Sample, options: Options) -> float:
    if sample.error is not None:
        return PAUSE_S
    return (sample.retry_after or 0.0) if options.respect_retry_after else 0.0


async def _run_open(sender: Sender, options: Options, entries: Iterator[Entry], record: Record) -> None:
    """Requests are sent at their moments, whatever became of those before; their time counts from these moments."""
    in_flight = 0

    async def send(number: int, due: float) -> None:
        nonlocal in_flight
        try:
            record.samples.append(await sender.send(number, due, record.begun))
        finally:
            in_flight -= 1

    async with asyncio.TaskGroup() as group:
        for moment, number in entries:
            due = record.begun + moment
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if in_flight >= options.max_in_flight:
                record.not_sent.append(NotSent(number, moment))
                continue
            in_flight += 1
            group.create_task(send(number, due))


@asynccontextmanager
async def _watch(record: Record, judge: Judge, watch: Watch | None) -> AsyncIterator[None]:
    """While the block runs, tell a watcher the figures every now and then, and once more at its end."""
    if watch is None:
        yield
        return
    look = _make_look(record, judge)

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            watch(look())

    ticks = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticks.cancel()
        with suppress(asyncio.CancelledError):
            await ticks
        watch(look())


def _make_look(record: Record, judge: Judge) -> Callable[[], Now]:
    seen, failed, last = 0, 0, record.begun

    def look() -> Now:
        nonlocal seen, failed, last
        new, now = record.samples[seen:], time.perf_counter()
        seen += len(new)
        failed += sum(each.error is not None or judge.is_unexpected(each) for each in new)
        rate, last = len(new) / max(now - last, 1e-9), now
        latency = make_spread(each.seconds for each in new if each.status is not None)
        return Now(now - record.begun, seen, len(record.not_sent), failed, rate, latency)

    return look


def _make_report(kinds: Sequence[RequestKind], options: Options, record: Record, interrupted: bool) -> Report:
    judge = Judge(kinds, options, record.elapsed)
    return Report(
        total=judge.summarize(record.samples, len(record.not_sent)),
        kinds=judge.summarize_kinds(record.samples, record.not_sent),
        elapsed_s=round(record.elapsed, 3),
        client_cpu=round(record.cpu / record.elapsed, 3) if record.elapsed else 0.0,
        late_ms=make_spread(each.late for each in record.samples) if options.rate is not None else None,
        interrupted=interrupted,
        timeline=make_timeline(judge, record.samples, record.not_sent),
    )


def _find_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where there is one: the client takes less of the machine."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory
