"""When pictures are decoded: before forwards on the CPU, but only until one of these is worth its start."""

from __future__ import annotations

import pytest

from layertap.service.engine.batch import Batch
from layertap.service.engine.schedule.waiting import DeviceSlots, SlotWait
from layertap.service.types import Priority
from tests.service.engine.batcher_harness import BatcherHarness, make_key


def test_decoding_first_until_rows_are_enough() -> None:
    harness, key = BatcherHarness(cpu=DeviceSlots(1)), make_key("cpu")
    for _ in range(5):
        harness.add_decode()
    order: list[int | str] = []
    while (task := harness.start()) is not None:
        order.append(task.rows if isinstance(task, Batch) else "decode")
        harness.finish(task)
        if isinstance(task, SlotWait):
            harness.add(key)
    assert order == ["decode", "decode", "decode", "decode", 4, "decode", 1]


def test_removed_picture_is_not_decoded() -> None:
    harness = BatcherHarness()
    removed, task = harness.add_decode(), harness.add_decode()
    harness.batcher.remove_wait(removed)
    assert (harness.start(), harness.start()) == (task, None)
    harness.batcher.remove_wait(task)
    harness.finish(task)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_picture_is_decoded_in_bounded_time(priority: Priority) -> None:
    """However many rows keep coming that need no decoding."""
    harness, key = BatcherHarness(cpu=DeviceSlots(1)), make_key("cpu")
    harness.add_decode(priority)
    for _ in range(20):
        harness.add(key, 4)
        task = harness.start()
        assert task is not None
        harness.now += 4.0
        harness.finish(task)
        if isinstance(task, SlotWait):
            break
    assert harness.now <= 20.0


def test_rows_run_in_bounded_time() -> None:
    """However many pictures keep coming."""
    harness, key = BatcherHarness(cpu=DeviceSlots(1)), make_key("cpu")
    for _ in range(50):
        harness.add_decode()
    harness.add(key)
    while isinstance(task := harness.start(), SlotWait):
        harness.add_decode()
        harness.now += 1.0
        harness.finish(task)
    assert task is not None
    assert harness.now <= 10.0
