"""Which requests come first: by arrival, by priority, and none after its deadline."""

from __future__ import annotations

from layertap.service.engine.schedule.batch_formation import DeviceSlots
from tests.service.engine.batcher_harness import GPU_LIKE, BatcherHarness, make_key


def test_oldest_first_and_rows_counted() -> None:
    harness, key = BatcherHarness(), make_key()
    for name, rows in (("x", 2), ("y", 3), ("z", 4)):
        harness.add(key, rows, name)
    assert [harness.describe(batch) for batch in harness.run_in_turn()] == [
        [("x", 0, 2), ("y", 0, 2)],
        [("y", 2, 3), ("z", 0, 3)],
        [("z", 3, 4)],
    ]


def test_nothing_waits_for_more() -> None:
    """One row starts at once though a hundred would be cheaper for each of them."""
    harness = BatcherHarness()
    harness.add(make_key(costs=GPU_LIKE, max_rows=100))
    assert harness.start_batch().rows == 1


def test_no_batch_without_an_idle_replica() -> None:
    harness = BatcherHarness()
    harness.add(make_key())
    harness.add(make_key(model="b"))
    assert harness.start_batch(a=0, b=1).key.model == "b"
    assert harness.start(a=0, b=0) is None
    assert harness.start(b=1) is None


def test_rows_that_wait_are_counted() -> None:
    harness, key = BatcherHarness(), make_key()
    harness.add(key, 6)
    removed = harness.add(make_key(), 3)
    assert (harness.batcher.count_waiting_rows("a"), harness.batcher.count_waiting_rows("b")) == (9, 0)
    harness.start_batch()
    assert harness.batcher.count_waiting_rows("a") == 5
    harness.batcher.remove(removed)
    assert harness.batcher.count_waiting_rows("a") == 2


def test_never_in_a_later_batch() -> None:
    """What is removed, and what is past its deadline, does not run, with rows in a batch already or without."""
    harness, key = BatcherHarness(), make_key()
    harness.add(key, 6, "x", deadline=4.0)
    removed = harness.add(key, 6, "y")
    harness.add(key, 1, "z", deadline=4.5)
    first = harness.start_batch()
    assert harness.describe(first) == [("x", 0, 4)]
    harness.batcher.remove(removed)
    harness.finish(first)
    harness.now = 4.0
    assert [harness.describe(batch) for batch in harness.run_in_turn()] == [[("z", 0, 1)]]
    harness.add(key, 1, "x", deadline=harness.now)
    assert harness.start() is None
    assert harness.batcher.count_waiting_rows("a") == 0


def test_forgotten_model_comes_again() -> None:
    harness = BatcherHarness()
    harness.add(make_key(), deadline=1.0)
    harness.now = 2.0
    harness.batcher.remove_model("a")
    assert harness.batcher.count_waiting_rows("a") == 0
    harness.add(make_key(), 3)
    assert harness.start_batch().rows == 3


# Priorities


def test_interactive_before_bulk() -> None:
    """In a key and across keys, however many rows of bulk wait; bulk shares no forward with it before its time."""
    harness = BatcherHarness(cpu=DeviceSlots(1))
    ready_key, key = make_key("cpu", model="b"), make_key("cpu")
    harness.add(ready_key, 100, "bulk", priority="bulk")
    harness.add(key, 1, "bulk", priority="bulk")
    harness.add(key, 1, "x")
    assert harness.describe(harness.start_batch()) == [("x", 0, 1)]


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


def test_bulk_of_another_model_is_bypassed_for_a_bounded_time() -> None:
    harness = BatcherHarness()
    harness.add(make_key(model="b"), 1, "bulk", priority="bulk")
    key, order = make_key(), []
    for _ in range(20):
        harness.add(key, 4, "x")
        batch = harness.start_batch()
        order.append(harness.describe(batch)[0][0])
        harness.now += batch.seconds
        harness.finish(batch)
    assert order.index("bulk") == 2
