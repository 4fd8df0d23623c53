"""Which requests share a forward: those of one key and of near depths, and why."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import BatchKey
from tests.service.engine.batcher_harness import BULK_DELAY, BatcherHarness, make_key
from tests.service.engine.batcher_reference import ExpectedRequest, cheapest_cuts


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 16)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0, 40.0]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_cheapest_cut(sizes: list[tuple[int, int]], base: float, pads: bool) -> None:
    """What runs with the first request is its piece of a cheapest cut of all depths, found by trying all of them."""
    costs = Costs(base=base, per_row=1.0)
    harness, key = BatcherHarness(), make_key(costs=costs, max_rows=4 if pads else 999, pads=pads)
    requests = [ExpectedRequest(harness.add(key, rows, depth=depth / 16)) for rows, depth in sizes]
    depths = {part.job.depth for part in harness.start_batch().slices}
    pieces = [next(piece for piece in cut if requests[0].depth in piece) for cut in cheapest_cuts(key, requests)]
    assert any(depths <= set(piece) for piece in pieces)
    if sum(rows for rows, _ in sizes) <= key.efficient_rows:
        assert depths in [set(piece) for piece in pieces]


@dataclass(eq=False)
class CountingKey(BatchKey):
    """Counts how often it is asked what a forward takes."""

    estimates: int = 0

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        self.estimates += 1
        return super().estimate_seconds(rows, depth)


def test_any_number_of_depths_is_cut_in_bounded_time() -> None:
    """256 requests, each of a depth of its own: few steps find those of about the first's depth."""
    harness, key = BatcherHarness(), CountingKey("a", ("gpu",), Costs(base=1.0, per_row=1.0), 999)
    for number in range(256):
        harness.add(key, depth=(256 - number) / 256, priority="interactive" if number % 2 else "bulk")
    harness.now = BULK_DELAY
    depths = {part.job.depth for part in harness.start_batch().slices}
    assert key.estimates < 1000
    assert min(depths) > max(depths) - 0.2
    assert len(depths) == key.efficient_rows
