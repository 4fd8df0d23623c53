"""What is sent when: the same options give the same schedule, whatever the server does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random

from bench.load.options import Options

Entry = tuple[float, int]


def schedule(weights: Sequence[float], options: Options, phase: str = "") -> Iterator[Entry]:
    """Entries of a moment, in seconds after the start, and the number of a scenario.

    In closed loop every moment is 0: a request is due once a connection is free. ``phase`` gives another schedule.
    """
    numbers = drawn(weights, f"{options.seed} scenarios {phase}")
    moments = repeat(0.0) if options.rate is None else ARRIVALS[options.arrivals](options, f"{options.seed} {phase}")
    entries = islice(zip(moments, numbers, strict=False), options.requests)
    if options.seconds is None:
        return entries
    limit = options.seconds
    return takewhile(lambda entry: entry[0] < limit, entries)


def drawn(weights: Sequence[float], seed: str) -> Iterator[int]:
    """Numbers of scenarios without end, each as often as its weight says."""
    random = Random(seed)
    cumulated = list(accumulate(weights))
    numbers = range(len(weights))
    while True:
        yield random.choices(numbers, cum_weights=cumulated)[0]


def _poisson(options: Options, seed: str) -> Iterator[float]:
    random = Random(seed)
    return accumulate(random.expovariate(options.rate or 1) for _ in count())


def _uniform(options: Options, _: str) -> Iterator[float]:
    return (number / (options.rate or 1) for number in count())


ARRIVALS = {"poisson": _poisson, "uniform": _uniform}
