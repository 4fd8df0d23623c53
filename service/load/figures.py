"""What became of requests, and figures of that."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layertap.service.load.options import Options
from layertap.service.load.scenario import RequestKind

REFUSALS = frozenset({429, 503})


class Sample(NamedTuple):
    """A ``status``, or an ``error``, or neither where the client left.

    ``at`` is the moment the request was due, in seconds after the run's start; ``seconds`` counts from there, ``late``
    is how much of that passed before it was sent. ``retry_after``: seconds that a refusal asks for, where it does.
    """

    kind: int
    seconds: float
    late: float = 0.0
    at: float = 0.0
    status: int | None = None
    error: str | None = None
    size: int = 0
    retry_after: float | None = None
    timing: str = ""


class NotSent(NamedTuple):
    """A request of an open loop that was due while too many were under way."""

    kind: int
    at: float


def parse_retry_after(header: str | None) -> float | None:
    """Seconds; None without the header, and where it is no number that one could wait for."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


# A step of ``Server-Timing`` that has a time (https://www.w3.org/TR/server-timing/); its name is a token of RFC 9110.
STEP = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+);dur=(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Spread:
    """Percentiles and the greatest, by nearest rank: each is a value that occurred. Milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Step:
    """A step in ``Server-Timing``: in how many answers, and milliseconds."""

    answers: int
    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class Figures:
    """Of one kind of request, or of all.

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

    @property
    def failed(self) -> int:
        """Requests that gave nothing good where something good was due: unexpected, without an answer, or not sent."""
        return self.unexpected + sum(self.errors.values()) + self.not_sent

    @property
    def error_rate(self) -> float:
        """Their share of all that were due, 0 to 1."""
        return self.failed / max(self.requests + self.not_sent, 1)


class Judge(NamedTuple):
    """What every sample is judged by."""

    kinds: Sequence[RequestKind]
    options: Options
    elapsed_s: float

    def is_good(self, sample: Sample) -> bool:
        """Whether an answer is an expected one."""
        return sample.status in self.kinds[sample.kind].expect

    def is_unexpected(self, sample: Sample) -> bool:
        """Whether there is an answer that is neither expected nor allowed."""
        return sample.status is not None and not self.is_good(sample) and sample.status not in self.options.allow

    def summarize(self, samples: Sequence[Sample], not_sent: int) -> Figures:
        """The figures of some samples."""
        answers = [each for each in samples if each.status is not None]
        refusals = [each for each in answers if each.status in REFUSALS]
        others = [each for each in answers if each.status not in REFUSALS]
        errors = Counter(each.error for each in samples if each.error is not None)
        rows = sum(self.kinds[each.kind].rows for each in answers if each.status == 200)
        return Figures(
            requests=len(samples),
            not_sent=not_sent,
            left=len(samples) - len(answers) - errors.total(),
            statuses=dict(sorted(Counter(each.status for each in answers if each.status).items())),
            errors=dict(sorted(errors.items())),
            unexpected=sum(map(self.is_unexpected, samples)),
            per_second=self._get_rate(len(samples)),
            goodput=self._get_rate(sum(map(self.is_good, samples))),
            rows_per_second=self._get_rate(rows),
            bytes_per_second=self._get_rate(sum(each.size for each in samples)),
            latency_ms=make_spread(each.seconds for each in others),
            refused=len(refusals),
            refused_with_retry_after=sum(each.retry_after is not None for each in refusals),
            refusal_ms=make_spread(each.seconds for each in refusals),
            steps=make_steps(each.timing for each in others),
        )

    def summarize_kinds(self, samples: Sequence[Sample], not_sent: Sequence[NotSent]) -> dict[str, Figures]:
        """The figures of each kind, by its name."""
        by_kind: dict[int, list[Sample]] = defaultdict(list)
        for each in samples:
            by_kind[each.kind].append(each)
        missed = Counter(each.kind for each in not_sent)
        return {kind.name: self.summarize(by_kind[number], missed[number]) for number, kind in enumerate(self.kinds)}

    def _get_rate(self, number: float) -> float:
        return round(number / self.elapsed_s, 3) if self.elapsed_s > 0 else 0.0


def make_steps(headers: Iterable[str]) -> dict[str, Step]:
    """The steps of the server by their names, in the order in which they first occur."""
    times: dict[str, list[float]] = {}
    for header in headers:
        for name, milliseconds in STEP.findall(header):
            times.setdefault(name, []).append(float(milliseconds))
    return {name: _make_step(sorted(values)) for name, values in times.items()}


def make_spread(seconds: Iterable[float]) -> Spread | None:
    """Milliseconds of some seconds; None where there are none."""
    ordered = sorted(each * 1000 for each in seconds)
    if not ordered:
        return None
    return Spread(*(round(get_percentile(ordered, percent), 3) for percent in (50, 90, 99, 100)))


def get_percentile(ordered: Sequence[float], percent: int) -> float:
    """The least value that ``percent`` of all values do not exceed; ``ordered`` ascends and is not empty."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _make_step(ordered: list[float]) -> Step:
    mean = round(sum(ordered) / len(ordered), 3)
    return Step(len(ordered), mean, get_percentile(ordered, 50), get_percentile(ordered, 99))
