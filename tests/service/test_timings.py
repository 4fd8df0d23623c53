"""What the steps of a request take, whose parts are decoded and computed side by side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layertap.service.timings import Span, Timings

MOMENTS = st.integers(1, 12)
SPAN = st.tuples(st.sampled_from(["decode", "forward", "copy"]), MOMENTS, MOMENTS).map(
    lambda each: Span(each[0], min(each[1:]), max(each[1:]))
)


def test_side_by_side() -> None:
    """While one part is computed another is decoded: that counts as computing, and then as decoding."""
    timings = Timings()
    forwards = [Span("forward", 1.0, 2.0), Span("forward", 3.0, 4.0)]
    timings.add_parts(0.5, [Span("decode", 1.5, 3.0), *forwards, Span("copy", 5.0, 5.5)])
    assert timings.steps == {"queue": 1500, "forward": 2000, "decode": 1000, "copy": 500}


@given(st.lists(SPAN, min_size=1, max_size=8))
def test_each_second_once(spans: list[Span]) -> None:
    """Every second belongs to a part that has it, the one that began first, or to the queue until the last began."""
    expected: dict[str, float] = {span.step: 0 for span in spans}
    for second in range(1, 12):
        having = [span for span in spans if span.started <= second < span.ended]
        if having:
            step = min(having, key=lambda span: (span.started, span.ended, span.step)).step
        elif any(second < span.started for span in spans):
            step = "queue"
        else:
            continue
        expected[step] = expected.get(step, 0) + 1000
    timings = Timings()
    timings.add_parts(1, spans)
    assert {step: spent for step, spent in timings.steps.items() if spent} == {k: v for k, v in expected.items() if v}
