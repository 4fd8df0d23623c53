"""A large request gives way to small ones that come while it runs, and has its share of the device all the same."""

from __future__ import annotations

import pytest

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch, Job
from layertap.service.engine.schedule.batch_formation import estimate_seconds
from layertap.service.engine.schedule.waiting import DeviceSlots
from tests.service.engine.batcher_harness import BULK_DELAY, BatcherHarness, make_key

SECOND_OF_COPYING = 10**9  # bytes


def make_harness(slots: int = 1) -> BatcherHarness:
    return BatcherHarness(cpu=DeviceSlots(slots))


def run_batch(harness: BatcherHarness, slowdown: float = 1.0) -> Batch:
    batch = harness.start_batch()
    harness.now += slowdown * batch.seconds
    harness.finish(batch, slowdown * batch.seconds)
    return batch


def sum_seconds(harness: BatcherHarness, batches: list[Batch], request: Job) -> float:
    """What the parts of a request took."""
    queue = harness.batcher.get_queue(request.prepared.key)
    return sum(estimate_seconds(queue, [part]) for batch in batches for part in batch.slices if part.job is request)


@pytest.mark.parametrize("fields", [{}, {"isolated": True}, {"priority": "bulk"}])
def test_small_requests_do_not_wait_for_all_of_a_large_one(fields: dict[str, object]) -> None:
    """One that comes a little later is in the next batch, and so is one of another key, whatever is left of it."""
    harness, key, other = make_harness(), make_key("cpu"), make_key("cpu")
    harness.add(key, 64, "large", **fields)
    for small_key in (key, other, key):
        run_batch(harness)
        harness.now -= 0.1
        harness.add(small_key, 1, "small")
        harness.now += 0.1
        assert harness.describe(run_batch(harness))[0] == ("small", 0, 1)


def test_measured_cost_counts() -> None:
    """Where its parts take ten times as long as expected, it lets others pass for ten times as long."""
    harness, key = make_harness(), make_key("cpu")
    harness.add(key, 64, "large")
    for _ in range(2):
        run_batch(harness, slowdown=10.0)
    other, began = run_batch(harness, slowdown=10.0), harness.now
    harness.add(key, 1, "first", depth=0.5)
    run_batch(harness)
    harness.now = began + 3 * 10 * other.seconds - 0.1
    harness.add(key, 1, "second", depth=0.5)
    assert harness.describe(run_batch(harness)) == [("second", 0, 1)]


@pytest.mark.parametrize("head_start", [0.0, 40.0])
def test_large_request_is_not_held_up(head_start: float) -> None:
    """It has a fifth of a device that small ones fill, at once, though it had all of it before they came."""
    harness, key, batches = make_harness(), make_key("cpu"), list[Batch]()
    large = harness.add(key, 200, "large")
    while harness.now < head_start:
        run_batch(harness)
    for _ in range(200):
        for _ in range(2):
            harness.add(key, 1, depth=0.5)
        batches.append(run_batch(harness))
    assert 0.15 < sum_seconds(harness, batches, large) / sum(batch.seconds for batch in batches) < 0.4


# The size of its parts


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        pytest.param({}, 10, id="nothing captured"),
        pytest.param({"row_bytes": SECOND_OF_COPYING}, 5, id="twice the cost"),
        pytest.param({"row_bytes": 100 * SECOND_OF_COPYING}, 2, id="two rows at least"),
        pytest.param({"depth": 0.5, "row_bytes": SECOND_OF_COPYING}, 6, id="half the layers"),
        pytest.param({"isolated": True, "row_bytes": SECOND_OF_COPYING}, 40, id="isolated"),
    ],
)
def test_parts_are_as_short_as_a_plain_batch(fields: dict[str, object], rows: int) -> None:
    """While small requests come; where none does, as many rows as pay."""
    costs = Costs(base=1.0, per_row=1.0)
    for small, expected in ((True, rows), (False, 40 if "isolated" in fields else 10)):
        harness = make_harness()
        if small:
            harness.add(make_key("cpu", costs))
            run_batch(harness)
        harness.add(make_key("cpu", costs, 40), 80, **fields)
        assert harness.start_batch().rows == expected


# Bulk beside interactive requests


COSTS = Costs(base=2.0, per_row=1.0)  # 3 seconds alone: 7 rows take 9


def test_short_while_interactive_requests_come() -> None:
    """Three times what a row alone takes, for as long as bulk lets others go first; then as long as it pays."""
    harness = make_harness()
    harness.add(make_key("cpu", COSTS))
    run_batch(harness)
    for passed, rows in ((0.0, 7), (BULK_DELAY - 0.1, 7), (BULK_DELAY, 20)):
        harness.now = passed
        harness.add(make_key("cpu", COSTS, max_rows=64, model="b"), 32, priority="bulk")
        batch = harness.start_batch()
        assert batch.rows == rows
        harness.finish(batch)
        harness.batcher.remove(batch.slices[0].job)


@pytest.mark.parametrize(("seconds", "rows"), [(0.0, 7), (1.0, 5), (4.0, 3)])
def test_decoding_counts(seconds: float, rows: int) -> None:
    """What batches decode themselves makes them longer, as measured: 3, 4 and 7 seconds alone; 9, 12 and 21 of all."""
    harness = make_harness()
    key = make_key("cpu", COSTS, max_rows=64)
    for _ in range(60):
        harness.add(key)
        batch = harness.start_batch()
        harness.running.remove(batch)
        harness.batcher.finish(batch, batch.seconds, decode_seconds=seconds)
    harness.add(key, 32, priority="bulk")
    assert harness.start_batch().rows == rows
    assert harness.batcher.get_queue(key).estimate_seconds(1) == pytest.approx(3 + seconds, rel=1e-3)


def test_what_joins_a_short_batch() -> None:
    """More bulk up to its limit; an interactive request has room in it as in any other."""
    harness, key = make_harness(), make_key("cpu", COSTS, max_rows=64)
    harness.add(make_key("cpu", COSTS))
    run_batch(harness)
    harness.add(key, priority="bulk")
    batch = harness.start_batch()
    for rows, priority, whole in ((32, "bulk", 7), (2, "interactive", 9)):
        harness.add(key, rows, priority=priority)
        harness.batcher.extend(batch)
        assert batch.rows == whole
