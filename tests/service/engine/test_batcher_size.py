"""How many rows a batch has: what pays, what settings and memory allow, and what free slots share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.schedule.batcher import MAX_QUEUES
from layertap.service.engine.schedule.waiting import FIRST_PAUSE_S, MAX_PAUSE_S, DeviceSlots
from tests.service.engine.batcher_harness import BULK_DELAY, GPU_LIKE, BatcherHarness, make_key
from tests.service.engine.batcher_reference import ExpectedRequest, cheapest_cuts


def test_no_larger_than_pays() -> None:
    """Where the fixed part is a tenth of a row's time for each row, more rows gain nothing; a few always do."""
    for base, rows in ((0.0, 4), (1.0, 10), (2.5, 25), (100.0, 64)):
        harness = BatcherHarness()
        harness.add(make_key(costs=Costs(base=base, per_row=1.0), max_rows=64), 200)
        assert harness.start_batch().rows == rows


# Memory


def find_rows(harness: BatcherHarness, key: BatchKey, seconds: float) -> int:
    """Rows of a batch so much later, whatever waits."""
    harness.now += seconds
    request = harness.add(key, 64)
    batch = harness.start_batch()
    harness.finish(batch)
    harness.batcher.remove(request)
    assert batch.padded_rows in (None, batch.rows)
    return batch.rows


def test_max_bytes() -> None:
    """A forward's values and what is kept of each row fit into the key's memory, or it is one of a single row."""
    harness, key = (
        BatcherHarness(),
        make_key(costs=Costs(base=1.0, per_row=1.0, row_bytes=10), max_rows=9, max_bytes=70),
    )
    for rows, name, row_bytes in ((3, "x", 0), (3, "y", 10), (2, "z", 90)):
        harness.add(key, rows, name, row_bytes=row_bytes)
    slices = [harness.describe(batch) for batch in harness.run_in_turn()]
    assert slices == [[("x", 0, 3), ("y", 0, 2)], [("y", 2, 3)], [("z", 0, 1)], [("z", 1, 2)]]


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("rows", "fitting_rows"), [(4, 2), (5, 2), (16, 8), (2, 1)])
def test_out_of_memory(rows: int, fitting_rows: int, pads: bool) -> None:
    """Half of the rows that did not fit, never more than before."""
    harness, key = BatcherHarness(), make_key(max_rows=8, pads=pads, costs=GPU_LIKE)
    harness.batcher.reduce_max_rows(key, rows)
    assert find_rows(harness, key, 0.0) == fitting_rows


@pytest.mark.parametrize("pads", [False, True])
def test_memory_is_free_again(pads: bool) -> None:
    """After a pause twice as many rows are tried, and so on up to as many as fitted when the model was loaded."""
    harness, key = BatcherHarness(), make_key(max_rows=12, pads=pads, costs=GPU_LIKE)
    harness.batcher.reduce_max_rows(key, 8)
    pauses = (0.0, FIRST_PAUSE_S - 1, 1.0, 0.0, FIRST_PAUSE_S, 10 * FIRST_PAUSE_S)
    assert [find_rows(harness, key, pause) for pause in pauses] == [4, 4, 8, 8, 12, 12]


def test_trials_that_fail_get_rarer() -> None:
    """Each lasts twice as long as the one before, up to a limit; a lack long after a trial is a new one."""
    harness, key = BatcherHarness(), make_key(max_rows=8, costs=GPU_LIKE)
    pauses = []
    for _ in range(9):
        harness.batcher.reduce_max_rows(key, 8)
        harness.batcher.reduce_max_rows(key, 8)  # beside the first: it began with as many rows
        began = harness.now
        while find_rows(harness, key, FIRST_PAUSE_S) == 4:
            pass
        pauses.append((harness.now - began) / FIRST_PAUSE_S)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert find_rows(harness, key, MAX_PAUSE_S) == 8
    harness.batcher.reduce_max_rows(key, 8)
    assert [find_rows(harness, key, FIRST_PAUSE_S - 1), find_rows(harness, key, 1.0)] == [4, 8]


@pytest.mark.parametrize("pads", [False, True])
def test_rows_turn_out_to_affect_each_other(pads: bool) -> None:
    """From then on each runs alone: those that wait, those of keys that come later, none of another model."""
    harness, key = BatcherHarness(), make_key(max_rows=8, pads=pads)
    harness.add(key, 2)
    harness.batcher.limit_to_one_row("a")
    harness.add(make_key(max_rows=8, pads=pads), 2)
    harness.add(make_key(max_rows=8, model="b"), 2)
    batches = list(harness.run_in_turn())
    assert sorted((batch.key.model, batch.rows) for batch in batches) == [("a", 1)] * 4 + [("b", 2)]
    assert [harness.batcher.get_max_rows(model) for model in "abc"] == [1, 8, 0]


def test_keys_are_forgotten() -> None:
    """However many keys come; those with rows that wait or run stay."""
    harness = BatcherHarness()
    running, waiting = make_key(), make_key()
    harness.batcher.reduce_max_rows(running, 4)
    harness.add(running, 2)
    batch = harness.start_batch()
    harness.add(waiting, 1)
    for _ in range(2 * MAX_QUEUES):
        harness.batcher.reduce_max_rows(make_key(), 2)
    assert harness.batcher.get_queue(running).fitting_rows == 2
    harness.finish(batch)
    assert harness.start_batch().key is waiting


# Split over slots


def test_split_over_free_slots() -> None:
    """Rows are spread over as many slots as have an idle replica."""
    for replicas, sizes in ((9, [5, 5, 4, 4]), (2, [9, 9])):
        harness = BatcherHarness()
        harness.add(make_key("cpu", Costs(base=2.0, per_row=1.0), 64), 18)
        batches = [harness.start_batch(a=replicas - started) for started in range(len(sizes))]
        assert [(batch.rows, batch.slots) for batch in batches] == [(rows, 1) for rows in sizes]


@pytest.mark.parametrize(("rows", "sizes"), [(10, [5, 5]), (32, [16, 16]), (40, [10] * 4), (50, [13, 13, 12, 12])])
def test_equal_shares_of_a_lone_request(rows: int, sizes: list[int]) -> None:
    """The last forward of a request that needs several leaves no core idle; nothing of it joins one that has begun."""
    harness, key = BatcherHarness(cpu=DeviceSlots(2)), make_key("cpu", Costs(base=1.2, per_row=1.0), 64)
    harness.add(key, rows)
    found = []
    while batches := harness.start_batches():
        found += batches
        assert not any(harness.batcher.extend(batch) for batch in batches)
        for batch in batches:
            harness.finish(batch)
    assert [batch.rows for batch in found] == sizes


def test_full_forwards_beside_others() -> None:
    """Where another request's rows follow, no core is idle beside the last ones."""
    harness, key = BatcherHarness(cpu=DeviceSlots(2)), make_key("cpu", Costs(base=1.2, per_row=1.0), 64)
    for _ in range(2):
        harness.add(key, 32)
    assert [batch.rows for batch in harness.start_batches()] == [12, 12]


# Which requests share a forward


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
    queue = harness.batcher.get_queue(key)
    requests = [ExpectedRequest(harness.add(key, rows, depth=depth / 16), queue) for rows, depth in sizes]
    depths = {part.job.prepared.depth for part in harness.start_batch().slices}
    pieces = [next(piece for piece in cut if requests[0].depth in piece) for cut in cheapest_cuts(queue, requests)]
    assert any(depths <= set(piece) for piece in pieces)
    if sum(rows for rows, _ in sizes) <= key.efficient_rows:
        assert depths in [set(piece) for piece in pieces]


@dataclass(frozen=True)
class CountingCosts(Costs):
    """Counts how often it is asked what a forward takes."""

    estimates: Counter[str] = field(default_factory=Counter)

    def estimate_seconds(self, rows: int, depth: float = 1.0) -> float:
        self.estimates["all"] += 1
        return super().estimate_seconds(rows, depth)


def test_any_number_of_depths_is_cut_in_bounded_time() -> None:
    """256 requests, each of a depth of its own: few steps find those of about the first's depth."""
    costs = CountingCosts(base=1.0, per_row=1.0)
    harness, key = BatcherHarness(), make_key(costs=costs, max_rows=999)
    for number in range(256):
        harness.add(key, depth=(256 - number) / 256, priority="interactive" if number % 2 else "bulk")
    harness.now = BULK_DELAY
    depths = {part.job.prepared.depth for part in harness.start_batch().slices}
    assert costs.estimates.total() < 1000
    assert min(depths) > max(depths) - 0.2
    assert len(depths) == key.efficient_rows
