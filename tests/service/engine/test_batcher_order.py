"""Which requests come first: by arrival, by priority, and none after its deadline."""

from __future__ import annotations

from tests.service.engine.batcher_harness import GPU_LIKE, BatcherHarness, make_key


def test_nothing_waits_for_more() -> None:
    """One row starts at once though a hundred would be cheaper for each of them."""
    harness = BatcherHarness()
    harness.add(make_key(costs=GPU_LIKE, max_rows=100))
    assert harness.start_batch().rows == 1


def test_forgotten_model_comes_again() -> None:
    harness = BatcherHarness()
    harness.add(make_key(), deadline=1.0)
    harness.now = 2.0
    harness.batcher.remove_model("a")
    assert harness.batcher.count_waiting_rows("a") == 0
    harness.add(make_key(), 3)
    assert harness.start_batch().rows == 3


# Priorities


def test_bulk_ages() -> None:
    """After its delay a bulk request is before what comes later, and after what came before."""
    harness, key = BatcherHarness(), make_key(max_rows=1)
    harness.add(key, 1, "bulk", priority="bulk")
    order = []
    for second in range(8):
        harness.now = float(second)
        for _ in range(2):
            harness.add(key, 1, str(second))
        batch = harness.start_batch()
        order.append(harness.describe(batch)[0][0])
        harness.finish(batch)
    order += [harness.describe(batch)[0][0] for batch in harness.run_in_turn()]
    assert order == [*"001122334455", "bulk", *"6677"]


def test_bulk_of_any_age_shares() -> None:
    """Without anything interactive, bulk requests of before and after their delay are one batch."""
    harness, key = BatcherHarness(), make_key(costs=GPU_LIKE, max_rows=64)
    for second in range(8):
        harness.now = float(second)
        harness.add(key, priority="bulk")
    assert harness.start_batch().rows == 8
