"""What is sent when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from layertap.service.load.options import Arrivals, Options
from layertap.service.load.run import draw_numbers, make_schedule
from tests.service.load.entries import LOOPS, NOWHERE, OPTIONS
from tests.service.support import Json


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_same_seed_same_schedule(loop: Json) -> None:
    options = replace(OPTIONS, **loop)
    first, again = (list(make_schedule([3, 2, 1], options)) for _ in range(2))
    assert first == again
    assert len(first) == 100
    assert first != list(make_schedule([3, 2, 1], replace(options, seed=1)))
    assert [number for _, number in first] != [number for _, number in make_schedule([3, 2, 1], options, "warm-up")]


def test_loops_draw_the_same_make_scenario() -> None:
    """Runs with one seed can be compared: only the moments differ."""
    drawn_by = [[number for _, number in make_schedule([3, 2], replace(OPTIONS, **loop))] for loop in LOOPS.values()]
    assert drawn_by[0] == drawn_by[1] == drawn_by[2]


def test_weights() -> None:
    counted = Counter(islice(draw_numbers([6, 3, 1], "0"), 10_000))
    assert [round(counted[number] / 10_000, 1) for number in range(3)] == [0.6, 0.3, 0.1]


def test_uniform_arrivals() -> None:
    entries = list(make_schedule([1], replace(OPTIONS, rate=4.0, arrivals="constant", requests=5)))
    assert entries == [(0.0, 0), (0.25, 0), (0.5, 0), (0.75, 0), (1.0, 0)]


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and standard deviation are both one over the rate."""
    moments = [moment for moment, _ in make_schedule([1], replace(OPTIONS, rate=50.0, requests=20_000))]
    gaps = np.diff([0.0, *moments])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_seconds_bound_an_open_loop(arrivals: Arrivals) -> None:
    options = replace(OPTIONS, rate=100.0, arrivals=arrivals, requests=1000, duration=2.0)
    moments = [moment for moment, _ in make_schedule([1], options)]
    assert max(moments) < 2.0
    assert 150 < len(moments) < 250


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"duration": -1.0}, "duration is -1.0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"duration": float("nan")}, "duration is nan"),
        ({"requests": 1, "connections": 0}, "connections is 0"),
        ({"requests": 1, "warmup": -1}, "warmup is -1"),
        ({"requests": 1, "url": "127.0.0.1:8000"}, "should begin with http://"),
        ({"url": "http://name:secret@127.0.0.1"}, "holds a name or a password"),
        ({"connections": 10_001}, "connections is 10001, and should be at most 10000"),
        ({"requests": 10**7}, "requests is 1e.07, and should be at most 1000000"),
        ({"rate": 1.0, "respect_retry_after": True}, "an open loop sends at its moments"),
    ],
)
def test_senseless_options(options: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**{"url": NOWHERE, **options})
