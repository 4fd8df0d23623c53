"""What the steps of a request take, whose parts are decoded and computed side by side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layertap.service.timings import Span, Timings

MOMENTS = st.integers(1, 12)
SPAN = st.tuples(st.sampled_from(["decode", "forward", "copy"]), MOMENTS, MOMENTS).map(
    lambda each: (each[0], min(each[1:]), max(each[1:]), 0)
)


def test_side_by_side() -> None:
    """While one part is computed another is decoded: that counts as computing, and then as decoding."""
    timings = Timings()
    forwards = [("forward", 1.0, 2.0, 1), ("forward", 3.0, 4.0, 1)]
    timings.add_parts(0.5, [("decode", 1.5, 3.0, 0), *forwards, ("copy", 5.0, 5.5, 0)])
    assert timings.steps == {"queue": 1500, "forward": 2000, "decode": 1000, "copy": 500}


@given(st.lists(SPAN, min_size=1, max_size=8))
def test_each_second_once(spans: list[Span]) -> None:
    """Every second belongs to a part that has it, the one that began first, or to the queue until the last began."""
    expected: dict[str, float] = {step: 0 for step, *_ in spans}
    for second in range(1, 12):
        having = [(started, ended, step) for step, started, ended, _ in spans if started <= second < ended]
        if having:
            *_, step = min(having)
        elif any(second < started for _, started, *_ in spans):
            step = "queue"
        else:
            continue
        expected[step] = expected.get(step, 0) + 1000
    timings = Timings()
    timings.add_parts(1, spans)
    assert {step: spent for step, spent in timings.steps.items() if spent} == {k: v for k, v in expected.items() if v}
