"""Bulk has short batches while interactive requests come now and then: nothing goes before a batch that runs."""

from __future__ import annotations

import pytest

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch
from layertap.service.engine.schedule.batch_formation import DeviceSlots
from tests.service.engine.batcher_harness import BULK_DELAY, BatcherHarness, make_key

COSTS = Costs(base=2.0, per_row=1.0)  # 3 seconds alone: 7 rows take 9


def start_bulk(harness: BatcherHarness, device: str = "cpu", rows: int = 32, **fields: object) -> Batch:
    harness.add(make_key(device, COSTS, max_rows=64, model="b", **fields), rows, priority="bulk")  # type: ignore[arg-type]
    return harness.start_batch()


def run_interactive(harness: BatcherHarness, device: str = "cpu") -> None:
    harness.add(make_key(device, COSTS))
    harness.finish(harness.start_batch())


def make_harness() -> BatcherHarness:
    return BatcherHarness(cpu=DeviceSlots(1), gpu=DeviceSlots(1, parallel=False))


def test_short_while_interactive_requests_come() -> None:
    """Three times what a row alone takes, for as long as bulk lets others go first; then as long as it pays."""
    harness = make_harness()
    run_interactive(harness)
    for passed, rows in ((0.0, 7), (BULK_DELAY - 0.1, 7), (BULK_DELAY, 20)):
        harness.now = passed
        batch = start_bulk(harness)
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
    assert key.estimate_seconds(1) == pytest.approx(3 + seconds, rel=1e-3)
