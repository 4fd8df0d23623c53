"""What the steps of a request take, whose parts are decoded and computed side by side."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from layertap.service.timings import Span, count_seconds

MOMENTS = st.integers(0, 12)
SPAN = st.tuples(MOMENTS, MOMENTS).map(lambda ends: Span("forward", min(ends), max(ends)))
STEP = st.lists(SPAN, max_size=4)


def test_side_by_side() -> None:
    """While one part is decoded another is computed: that counts as computing, and as nothing else."""
    forwards, copies = [Span("forward", 1.0, 2.0), Span("forward", 3.0, 4.0)], [Span("copy", 2.0, 2.5)]
    decodes = [Span("decode", 0.0, 1.0), Span("decode", 1.5, 3.0)]
    assert count_seconds(forwards, copies, decodes) == [2.0, 0.5, 1.5]


@given(st.lists(STEP, min_size=1, max_size=3))
def test_each_second_once(steps: list[list[Span]]) -> None:
    """Every second belongs to the first step that has it."""
    expected = [0] * len(steps)
    for second in range(12):
        having = [any(span.started <= second < span.ended for span in step) for step in steps]
        if any(having):
            expected[having.index(True)] += 1
    assert [Fraction(seconds) for seconds in count_seconds(*steps)] == expected
