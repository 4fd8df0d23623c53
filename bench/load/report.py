"""From samples to figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.load.options import Options
from bench.load.scenario import Scenario
from bench.load.timing import parse

REFUSALS = frozenset({429, 503})


class Sample(NamedTuple):
    """What became of one request: a ``status``, or an ``error``, or neither where the client left.

    ``seconds`` counts from the moment the request was due, ``late`` is how much of that passed before it was sent.
    """

    scenario: int
    seconds: float
    late: float = 0.0
    status: int | None = None
    error: str | None = None
    size: int = 0
    retry_after: bool = False
    timing: str = ""


@dataclass(frozen=True)
class Spread:
    """Percentiles and the greatest, by nearest rank: each is a value that occurred. Milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Step:
    """A step in ``Server-Timing``: in how many answers, and milliseconds where it has a time."""

    answers: int
    median: float | None
    p99: float | None


@dataclass(frozen=True)
class Figures:
    """Of one scenario, or of all.

    ``requests`` were sent and ended; each is in ``statuses``, in ``errors`` (no answer) or in ``left`` (the client
    went). ``unexpected`` answers had a status that is neither expected nor allowed. ``goodput`` counts expected
    answers, ``rows_per_second`` their inputs where the status is 200. ``latency_ms`` is of all answers but refusals
    (429, 503), which have their own.
    """

    requests: int
    not_sent: int
    left: int
    statuses: dict[int, int]
    errors: dict[str, int]
    unexpected: int
    per_second: float
    goodput: float
    rows_per_second: float
    bytes_per_second: float
    latency_ms: Spread | None
    refused: int
    refused_with_retry_after: int
    refusal_ms: Spread | None
    steps: dict[str, Step]


@dataclass(frozen=True)
class Report:
    """What a run gave; ``client_cpu`` is CPU-seconds a second of the client's own process: near 1, it was the limit.

    ``late_ms``: in open loop, how long after their moment requests were sent.
    """

    total: Figures
    scenarios: dict[str, Figures]
    elapsed_s: float
    client_cpu: float
    late_ms: Spread | None
    interrupted: bool

    @property
    def ok(self) -> bool:
        """Whether every request that the client waited for was answered, and as expected or allowed."""
        return not self.total.unexpected and not self.total.errors


class Figuring(NamedTuple):
    """What every sample is judged by."""

    scenarios: Sequence[Scenario]
    options: Options
    elapsed_s: float

    def good(self, sample: Sample) -> bool:
        """Whether an answer is an expected one."""
        return sample.status in self.scenarios[sample.scenario].expect

    def unexpected(self, sample: Sample) -> bool:
        """Whether there is an answer that is neither expected nor allowed."""
        return sample.status is not None and not self.good(sample) and sample.status not in self.options.allow

    def figures(self, samples: Sequence[Sample], not_sent: int) -> Figures:
        """The figures of some samples."""
        answers = [each for each in samples if each.status is not None]
        refusals = [each for each in answers if each.status in REFUSALS]
        others = [each for each in answers if each.status not in REFUSALS]
        errors = Counter(each.error for each in samples if each.error is not None)
        rows = sum(self.scenarios[each.scenario].rows for each in answers if each.status == 200)
        return Figures(
            requests=len(samples),
            not_sent=not_sent,
            left=len(samples) - len(answers) - errors.total(),
            statuses=dict(sorted(Counter(each.status for each in answers if each.status).items())),
            errors=dict(sorted(errors.items())),
            unexpected=sum(map(self.unexpected, samples)),
            per_second=self._rate(len(samples)),
            goodput=self._rate(sum(map(self.good, samples))),
            rows_per_second=self._rate(rows),
            bytes_per_second=self._rate(sum(each.size for each in samples)),
            latency_ms=spread(each.seconds for each in others),
            refused=len(refusals),
            refused_with_retry_after=sum(each.retry_after for each in refusals),
            refusal_ms=spread(each.seconds for each in refusals),
            steps=steps(each.timing for each in others),
        )

    def _rate(self, number: float) -> float:
        return round(number / self.elapsed_s, 3) if self.elapsed_s > 0 else 0.0


def by_scenario(figuring: Figuring, samples: Sequence[Sample], not_sent: Sequence[int]) -> dict[str, Figures]:
    """The figures of each scenario, by its name; ``not_sent`` has the scenario's number for each request not sent."""
    found: dict[int, list[Sample]] = defaultdict(list)
    for each in samples:
        found[each.scenario].append(each)
    missed = Counter(not_sent)
    return {
        scenario.name: figuring.figures(found[number], missed[number])
        for number, scenario in enumerate(figuring.scenarios)
    }


def steps(headers: Iterable[str]) -> dict[str, Step]:
    """The steps of the server by their names, in the order in which they first occur."""
    times: dict[str, list[float]] = {}
    answers: Counter[str] = Counter()
    for header in headers:
        for entry in parse(header):
            answers[entry.label] += 1
            times.setdefault(entry.label, []).extend([] if entry.dur is None else [entry.dur])
    return {name: Step(answers[name], *_median_and_p99(sorted(times[name]))) for name in times}


def spread(seconds: Iterable[float]) -> Spread | None:
    """Milliseconds of some seconds; None where there are none."""
    ordered = sorted(each * 1000 for each in seconds)
    if not ordered:
        return None
    return Spread(*(round(percentile(ordered, percent), 3) for percent in (50, 90, 99, 100)))


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The least value that ``percent`` of all values do not exceed; ``ordered`` ascends and is not empty."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _median_and_p99(ordered: list[float]) -> tuple[float | None, float | None]:
    return (percentile(ordered, 50), percentile(ordered, 99)) if ordered else (None, None)
