"""How many slots of a device a batch takes, and what may run beside another."""

from __future__ import annotations

from layertap.service.engine.schedule.waiting import DeviceSlots
from tests.service.engine.batcher_harness import (
    CORES,
    CPU_LIKE,
    FASTER_ON_ALL_CORES,
    GPU_LIKE,
    BatcherHarness,
    make_key,
)


def test_parallel_batches_are_counted() -> None:
    """As many as slots allow, one where batches only overlap; a device that is known stays as it is."""
    harness = BatcherHarness(cpu=DeviceSlots(CORES), gpu=DeviceSlots(2, parallel=False))
    harness.batcher.add_device("cpu", DeviceSlots(1))
    harness.batcher.add_device("gpu:1", DeviceSlots(3))
    counts = [harness.batcher.count_parallel_batches((device,), 1) for device in ("cpu", "gpu", "gpu:1")]
    assert (counts, harness.batcher.count_parallel_batches(("cpu",), 3)) == ([CORES, 1, 3], 1)
    assert harness.batcher.count_parallel_batches(("gpu", "gpu:1"), 1) == 4


# Where batches only overlap


def test_beside_another_only_where_more_rows_gain_nothing() -> None:
    """Where forwards only overlap, a few rows wait for the one that runs, in company; many do not."""
    harness, key = BatcherHarness(gpu=DeviceSlots(2, parallel=False)), make_key(costs=CPU_LIKE, max_rows=64)
    harness.add(key, 1)
    first = harness.start_batch()
    harness.add(key, 3)
    assert harness.start() is None
    harness.add(key, 2)
    assert (harness.start_batch().rows, harness.start()) == (4, None)
    assert len(harness.running) == 2
    harness.finish(first)
    assert harness.start() is None  # the last row waits beside the four
    harness.finish(harness.running[0])
    assert harness.start_batch().rows == 1


# A model on several devices


def test_several_devices_take_turns() -> None:
    """Batches of a model on two devices start on both, each on the one with most free slots, and share one key."""
    harness = BatcherHarness(one=DeviceSlots(1, parallel=False), two=DeviceSlots(2, parallel=False))
    harness.add(make_key("one two", max_rows=4), 20)
    batches = harness.start_batches()
    assert [(batch.device, batch.rows) for batch in batches] == [("two", 4), ("one", 4), ("two", 4)]
    harness.finish(batches[1])
    assert harness.start_batch().device == "one"


def test_rows_are_shared_by_idle_devices() -> None:
    """Rows that one forward could hold are split where two devices end sooner, and not where they would not."""
    for costs, rows in ((CPU_LIKE, [4, 4]), (GPU_LIKE, [8])):
        harness = BatcherHarness(one=DeviceSlots(1, parallel=False), two=DeviceSlots(1, parallel=False))
        harness.add(make_key("one two", costs, max_rows=64), 8)
        assert [batch.rows for batch in harness.start_batches()] == rows


# A single row on all cores


def test_single_rows_on_all_cores() -> None:
    """Few rows of a model that gains by all cores run one after the other, each on all of them and so much quicker."""
    harness, key = BatcherHarness(), make_key("cpu", FASTER_ON_ALL_CORES)
    harness.add(key, 2)
    first = harness.start_batch()
    assert (first.rows, first.slots, first.seconds, harness.start()) == (1, CORES, 1 / 3, None)
    harness.finish(first)
    assert (harness.start_batch().slots, harness.batcher.count_waiting_rows("a")) == (CORES, 0)


def test_overdue_row_gets_all_cores() -> None:
    """Others pass a row that needs all slots until it is overdue; then they are kept free for it."""
    harness = BatcherHarness()
    short_key, single_row_key = make_key("cpu", max_rows=1, model="b"), make_key("cpu", FASTER_ON_ALL_CORES)
    harness.add(short_key, 9)
    first = harness.start_batch()
    harness.add(single_row_key, 1, "x")
    harness.now = 1.0
    second = harness.start_batch()
    harness.now = 1.1
    assert (second.key, harness.start()) == (short_key, None)
    harness.finish(first)
    assert harness.start() is None
    harness.finish(second)
    assert harness.start_batch().slots == CORES


def test_forgotten_model_comes_again() -> None:
    harness = BatcherHarness()
    harness.add(make_key(), deadline=1.0)
    harness.now = 2.0
    harness.batcher.remove_model("a")
    assert harness.batcher.count_waiting_rows("a") == 0
    harness.add(make_key(), 3)
    assert harness.start_batch().rows == 3


def test_slots_of_batches_that_hang() -> None:
    """They are lost until such a batch has ended after all, also where its model is gone by then."""
    harness, key = BatcherHarness(cpu=DeviceSlots(2)), make_key("cpu", max_rows=1)
    harness.add(key, 3)
    first, second = harness.start_batch(), harness.start_batch()
    assert harness.batcher.lose(first)
    assert not harness.batcher.lose(second)
    assert harness.start() is None
    harness.finish(second)
    third = harness.start_batch()
    assert harness.start() is None
    harness.finish(third)
    harness.batcher.remove_model(key.model)
    harness.finish(first)
    harness.add(key, 2)
    assert len(harness.start_batches()) == 2
