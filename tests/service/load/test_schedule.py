"""What is sent when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from layertap.service.load.run import make_schedule
from tests.service.load.entries import BAD, LOOPS, OPTIONS, ROWS, VECTOR, of
from tests.service.support import Json

KINDS = of(VECTOR, BAD, ROWS)  # of weights 3, 2, 1


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_same_seed_same_schedule(loop: Json) -> None:
    options = replace(OPTIONS, **loop)
    first, again = (list(make_schedule(KINDS, options)) for _ in range(2))
    assert first == again
    assert len(first) == 100
    assert first != list(make_schedule(KINDS, replace(options, seed=1)))


def test_loops_draw_the_same_requests() -> None:
    """Runs with one seed can be compared: only the moments differ."""
    drawn = [[kind.name for _, kind in make_schedule(KINDS, replace(OPTIONS, **loop))] for loop in LOOPS.values()]
    assert drawn[0] == drawn[1]


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and standard deviation are both one over the rate."""
    moments = [moment for moment, _ in make_schedule(KINDS, replace(OPTIONS, rate=50.0, requests=20_000))]
    gaps = np.diff([0.0, *moments])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)
