"""How figures move over a run: what a plot draws."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from layertap.service.load.figures import REFUSALS, Judge, NotSent, Sample, Spread, make_spread

MAX_INTERVALS = 60
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600)


@dataclass(frozen=True)
class Interval:
    """A part of a run, ``seconds`` long from ``begin_s`` on.

    ``due`` requests should have been sent in it, and ``latency_ms`` is of the answers to these; ``good``, ``refused``
    (allowed refusals), ``failed`` count what came in it, ``not_sent`` what was not sent in it.
    """

    begin_s: float
    seconds: float
    due: int
    good: int
    refused: int
    failed: int
    not_sent: int
    latency_ms: Spread | None


def make_timeline(judge: Judge, samples: Sequence[Sample], not_sent: Sequence[NotSent]) -> list[Interval]:
    """Up to sixty intervals of equal length, the last one as long as the run goes on."""
    ends = [each.at + each.seconds for each in samples] + [each.at for each in not_sent]
    if not ends:
        return []
    length = max(*ends, judge.elapsed_s)
    width = next((width for width in WIDTHS_S if length <= width * MAX_INTERVALS), length / MAX_INTERVALS)
    number = max(1, math.ceil(length / width))

    def find(moment: float) -> int:
        return min(int(moment / width), number - 1)

    missed = Counter(find(each.at) for each in not_sent)
    due = missed + Counter(find(each.at) for each in samples)
    outcomes = Counter((find(each.at + each.seconds), _name_outcome(judge, each)) for each in samples)
    latencies: dict[int, list[float]] = defaultdict(list)
    for each in samples:
        if each.status is not None and each.status not in REFUSALS:
            latencies[find(each.at)].append(each.seconds)
    return [
        Interval(
            begin_s=place * width,
            seconds=round(min(width, length - place * width), 6) or width,
            due=due[place],
            good=outcomes[place, "good"],
            refused=outcomes[place, "refused"],
            failed=outcomes[place, "failed"],
            not_sent=missed[place],
            latency_ms=make_spread(latencies[place]),
        )
        for place in range(number)
    ]


def _name_outcome(judge: Judge, sample: Sample) -> str:
    if sample.error is not None or judge.is_unexpected(sample):
        return "failed"
    if judge.is_good(sample):
        return "good"
    return "left" if sample.status is None else "refused"
