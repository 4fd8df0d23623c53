"""What is sent when: the same options give the same schedule, whatever the server does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random

from layertap.service.load.options import Options

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
