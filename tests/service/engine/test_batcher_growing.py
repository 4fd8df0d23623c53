"""What may join a batch that has begun, and not its forward: as much as would have been in it from the start."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch
from layertap.service.engine.schedule.waiting import DeviceSlots
from tests.service.engine.batcher_harness import CPU_LIKE, FASTER_ON_ALL_CORES, BatcherHarness, make_key


def test_no_more_than_memory_holds() -> None:
    """A batch grows as far as its rows and bytes may; the rest of a request waits for the next one."""
    harness = BatcherHarness(cpu=DeviceSlots(1))
    for key, most in ((make_key("cpu", max_rows=3), 3), (make_key("cpu", max_rows=8, max_bytes=4), 4)):
        harness.add(key)
        batch = harness.start_batch()
        harness.add(key, 9, "later")
        harness.batcher.extend(batch)
        assert batch.rows == most
        assert harness.describe(batch)[-1] == ("later", 0, most - 1)
        harness.finish(batch)
        assert harness.describe(harness.start_batch())[0] == ("later", most - 1, 2 * most - 1)
        harness.finish(harness.running[0])
        list(harness.run_in_turn())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"depth": 1.0}, id="deeper"),
        pytest.param({"depth": 0.25}, id="less deep"),
        pytest.param({"priority": "bulk"}, id="bulk"),
        pytest.param({"isolated": True}, id="isolated"),
        pytest.param({"unsplittable": True}, id="unsplittable"),
    ],
)
def test_what_waits_all_the_same(fields: dict[str, object]) -> None:
    """Nobody's forward gets deeper, no bulk goes before who comes next, and who wants a forward alone has it."""
    harness, key = BatcherHarness(cpu=DeviceSlots(1)), make_key("cpu", max_rows=8)
    harness.add(key, depth=0.5)
    batch = harness.start_batch()
    harness.add(key, **({"depth": 0.5} | fields))
    assert not harness.batcher.extend(batch)
    assert harness.batcher.count_waiting_rows("a") == 1


def test_shares() -> None:
    """Of all that wait and run each slot has its part: one forward that took all would leave the others idle."""
    costs = Costs(base=1.0, per_row=1.0)
    harness, key = BatcherHarness(cpu=DeviceSlots(2)), make_key("cpu", costs, max_rows=32)
    harness.add(key)
    harness.add(key)
    first, second = harness.start_batches()
    for _ in range(14):
        harness.add(key)
    for batch in (first, second):
        harness.batcher.extend(batch)
        assert batch.rows == 8


def test_slots_of_a_single_row() -> None:
    """A single row has all slots; once it is a batch of several it gives back those that it does not need."""
    harness, key = BatcherHarness(), make_key("cpu", costs=FASTER_ON_ALL_CORES, max_rows=32)
    harness.add(key)
    batch = harness.start_batch()
    assert batch.slots == 4
    for _ in range(4):  # with these, one after the other on all slots still ends sooner
        harness.add(key)
    assert not harness.batcher.extend(batch)
    for _ in range(8):
        harness.add(key)
    harness.batcher.extend(batch)
    assert (batch.rows, batch.slots) == (4, 1)
    assert sum(each.slots for each in harness.start_batches()) == 3
    for each in list(harness.running):
        harness.finish(each)
    assert harness.batcher.count_parallel_batches(("cpu",), 1) == 4


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.5, 1.0]), st.booleans()), min_size=1, max_size=30))
def test_all_rows_run_once(arrivals: list[tuple[int, float, bool]]) -> None:
    """Whatever comes, whenever batches are asked to grow: each row is in one batch, in order."""
    harness, key = BatcherHarness(cpu=DeviceSlots(2)), make_key("cpu", costs=CPU_LIKE, max_rows=6)
    ended: list[Batch] = []
    requests = []
    for rows, depth, ends in arrivals:
        requests.append(harness.add(key, rows, depth=depth))
        harness.start_batches()
        for running in list(harness.running):
            assert isinstance(running, Batch)
            harness.batcher.extend(running)
        if ends and harness.running:
            batch = harness.running[0]
            assert isinstance(batch, Batch)
            harness.finish(batch)
            ended.append(batch)
    while harness.running:
        batch = harness.running[0]
        assert isinstance(batch, Batch)
        harness.finish(batch)
        ended.append(batch)
        harness.start_batches()
    for request in requests:
        parts = sorted((each.start, each.stop) for batch in ended for each in batch.slices if each.job is request)
        assert [row for start, stop in parts for row in range(start, stop)] == list(range(request.rows))
    assert all(batch.rows <= key.max_rows for batch in ended)
