"""Which requests share a forward: those of one key and of near depths, and why."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import BatchKey
from tests.service.engine.batcher_harness import BULK_DELAY, CPU_LIKE, GPU_LIKE, BatcherHarness, make_key
from tests.service.engine.batcher_reference import ExpectedRequest, cheapest_cuts

# Costs, rows and depth of each request, which of them are in each batch, and why.
DEPTHS = [
    pytest.param(GPU_LIKE, [(1, 0.5), (1, 1.0)], [[0, 1]], ["sharing_pays"], id="a large fixed part is shared"),
    pytest.param(CPU_LIKE, [(1, 0.5), (1, 1.0)], [[0], [1]], ["sharing_costs", "single"], id="none is not"),
    pytest.param(CPU_LIKE, [(1, 1.0), (1, 0.5)], [[0], [1]], ["sharing_costs", "single"], id="the oldest first"),
    pytest.param(CPU_LIKE, [(1, 0.5), (2, 0.5)], [[0, 1]], ["same_depth"], id="one depth"),
    pytest.param(CPU_LIKE, [(3, 0.5)], [[0]], ["single"], id="one request"),
    pytest.param(CPU_LIKE, [(2, 0.5), (2, 0.5)], [[0, 1]], ["same_depth"], id="just as many as fit"),
    pytest.param(CPU_LIKE, [(4, 0.5), (2, 0.5)], [[0], [1]], ["single", "single"], id="room for the first only"),
    pytest.param(
        Costs(base=2.0, per_row=1.0),
        [(1, 0.1), (1, 0.9), (1, 0.2), (1, 1.0)],
        [[0, 2], [1, 3]],
        ["sharing_costs", "sharing_pays"],
        id="near ones",
    ),
    pytest.param(
        Costs(base=30.0, per_row=1.0),
        [(4, 0.5), (3, 0.5), (1, 1.0)],
        [[0], [1, 2]],
        ["single", "sharing_pays"],
        id="the reason is of what fits",
    ),
]


@pytest.mark.parametrize(("costs", "sizes", "places", "reasons"), DEPTHS)
def test_depths(costs: Costs, sizes: list[tuple[int, float]], places: list[list[int]], reasons: list[str]) -> None:
    harness, key = BatcherHarness(), make_key(costs=costs)
    requests = [harness.add(key, rows, depth=depth) for rows, depth in sizes]
    batches = list(harness.run_in_turn())
    assert [[requests.index(part.job) for part in batch.slices] for batch in batches] == places
    assert [batch.reason for batch in batches] == reasons
    assert [batch.depth for batch in batches] == [max(sizes[place][1] for place in batch) for batch in places]


def test_padding_is_shared_by_all_depths() -> None:
    """Rows that only fill up a padded forward cost nothing: other depths are welcome as far as it has room."""
    harness, key = BatcherHarness(), make_key(pads=True)
    for depth in (0.5, 1.0):
        harness.add(key, depth=depth)
    assert (harness.start_batch().reason, harness.batcher.count_waiting_rows("a")) == ("sharing_pays", 0)


def test_rows_of_one_key_only() -> None:
    harness, first, second = BatcherHarness(), make_key(), make_key()
    for key in (first, second, first, second):
        harness.add(key)
    keys = [[part.job.key for part in batch.slices] for batch in harness.run_in_turn()]
    assert keys == [[first, first], [second, second]]


@pytest.mark.parametrize("flag", ["isolated", "unsplittable"])
def test_shares_with_nobody(flag: str) -> None:
    harness, key = BatcherHarness(), make_key()
    harness.add(key, 1, "x")
    harness.add(key, 2, "y", **{flag: True})
    harness.add(key, 1, "z")
    batches = list(harness.run_in_turn())
    assert [harness.describe(batch) for batch in batches] == [[("x", 0, 1), ("z", 0, 1)], [("y", 0, 2)]]
    assert [batch.reason for batch in batches] == ["same_depth", "isolated"]


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
