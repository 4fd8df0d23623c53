"""What the steps of a request take, whose parts are decoded and computed side by side."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from layertap.service.engine.schedule.in_flight import count_seconds

MOMENTS = st.integers(0, 12)
STEP = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda ends: (min(ends), max(ends))), max_size=4)


def test_side_by_side() -> None:
    """While one part is decoded another is computed: that counts as computing, and as nothing else."""
    forwards, copies, decodes = [(1.0, 2.0), (3.0, 4.0)], [(2.0, 2.5)], [(0.0, 1.0), (1.5, 3.0)]
    assert count_seconds(forwards, copies, decodes) == [2.0, 0.5, 1.5]


@given(st.lists(STEP, min_size=1, max_size=3))
def test_each_second_once(steps: list[list[tuple[int, int]]]) -> None:
    """Every second belongs to the first step that has it."""
    expected = [0] * len(steps)
    for second in range(12):
        having = [any(begin <= second < end for begin, end in step) for step in steps]
        if any(having):
            expected[having.index(True)] += 1
    assert [Fraction(seconds) for seconds in count_seconds(*steps)] == expected
