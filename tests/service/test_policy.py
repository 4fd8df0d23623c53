"""What shares a forward and when it starts: every sentence by example, and any order of events against plain lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, Literal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch, BatchQueue, DecodeTask, DeviceSlots, QueuedRequest, RowSlice
from layertap.service.engine.batcher import Batcher

PATIENCE = 5.0
CORES = 4
CPU_LIKE = Costs(base=0.0, per_row=1.0, row_bytes=1)
GPU_LIKE = Costs(base=10.0, per_row=1.0, row_bytes=1)
SOLO = Costs(base=0.0, per_row=1.0, row_bytes=1, speedup=3.0)
Started = Batch | DecodeTask
Given = list[tuple[str, int, int]]


class Desk:
    """A policy, its clock, what runs, and names for requests."""

    def __init__(self, **devices: DeviceSlots) -> None:
        self.now = 0.0
        self.policy = Batcher(
            devices or {"cpu": DeviceSlots(CORES), "gpu": DeviceSlots(1, parallel=False)}, lambda: self.now, PATIENCE
        )
        self.names: dict[QueuedRequest, str] = {}
        self.running: list[Started] = []

    def add(self, lane: BatchQueue, rows: int = 1, name: str = "", **fields: Any) -> QueuedRequest:
        work = QueuedRequest(lane, rows, **fields)
        self.names[work] = name
        self.policy.add(work)
        return work

    def prepare(self, priority: Literal["interactive", "bulk"] = "interactive") -> DecodeTask:
        found = DecodeTask(priority)
        self.policy.add_decode(found)
        return found

    def take(self, **idle: int) -> Started | None:
        found = self.policy.start_next(idle or dict.fromkeys("abcd", 99))
        if found is not None:
            self.running.append(found)
        return found

    def batch(self, **idle: int) -> Batch:
        found = self.take(**idle)
        assert isinstance(found, Batch)
        return found

    def batches(self) -> list[Batch]:
        """All that start now."""
        found = iter(self.take, None)
        return [each for each in found if isinstance(each, Batch)]

    def done(self, what: Started, seconds: float | None = None) -> None:
        """End something, after as long as it should have taken where nothing else is said."""
        expected = what.seconds if isinstance(what, Batch) else 0.0
        self.running.remove(what)
        self.policy.finish(what, expected if seconds is None else seconds)

    def given(self, batch: Batch) -> Given:
        return [(self.names[part.request], part.start, part.stop) for part in batch.slices]

    def one_by_one(self) -> Iterator[Batch]:
        """Batch after batch, each ended before the next one starts, the clock in step."""
        while (found := self.take()) is not None:
            assert isinstance(found, Batch)
            self.now += found.seconds
            self.done(found)
            yield found


def lane(
    device: str = "gpu", costs: Costs = CPU_LIKE, max_rows: int = 4, model: str = "a", **fields: Any
) -> BatchQueue:
    return BatchQueue(model, device, costs, max_rows, **fields)


def shares(batches: Sequence[Batch]) -> dict[str, float]:
    """Seconds of slots of each model."""
    found: dict[str, float] = {}
    for batch in batches:
        found[batch.queue.model] = found.get(batch.queue.model, 0.0) + batch.seconds * batch.slots
    return found


# Order and size


def test_oldest_first_and_rows_counted() -> None:
    desk, one = Desk(), lane()
    for name, rows in (("x", 2), ("y", 3), ("z", 4)):
        desk.add(one, rows, name)
    assert [desk.given(batch) for batch in desk.one_by_one()] == [
        [("x", 0, 2), ("y", 0, 2)],
        [("y", 2, 3), ("z", 0, 3)],
        [("z", 3, 4)],
    ]


def test_large_request_is_split() -> None:
    desk = Desk()
    desk.add(lane(), 10, "x")
    assert [desk.given(batch) for batch in desk.one_by_one()] == [[("x", 0, 4)], [("x", 4, 8)], [("x", 8, 10)]]


def test_nothing_waits_for_more() -> None:
    """One row starts at once though a hundred would be cheaper for each of them."""
    desk = Desk()
    desk.add(lane(costs=GPU_LIKE, max_rows=100))
    assert desk.batch().rows == 1


def test_rows_of_one_lane_only() -> None:
    desk, one, other = Desk(), lane(), lane()
    for each in (one, other, one, other):
        desk.add(each)
    assert [[part.request.queue for part in batch.slices] for batch in desk.one_by_one()] == [
        [one, one],
        [other, other],
    ]


def test_no_larger_than_pays() -> None:
    """Where the fixed part is a tenth of a row's time for each row, more rows gain nothing; a few always do."""
    for base, rows in ((0.0, 8), (1.0, 10), (2.5, 25), (100.0, 64)):
        desk = Desk()
        desk.add(lane(costs=Costs(base=base, per_row=1.0), max_rows=64), 200)
        assert desk.batch().rows == rows


def test_no_batch_without_an_idle_replica() -> None:
    desk = Desk()
    desk.add(lane())
    desk.add(lane(model="b"))
    assert desk.batch(a=0, b=1).queue.model == "b"
    assert desk.take(a=0, b=0) is None
    assert desk.take(b=1) is None


def test_rows_that_wait_are_counted() -> None:
    desk, one = Desk(), lane()
    desk.add(one, 6)
    gone = desk.add(lane(), 3)
    assert (desk.policy.count_waiting_rows("a"), desk.policy.count_waiting_rows("b")) == (9, 0)
    desk.batch()
    assert desk.policy.count_waiting_rows("a") == 5
    desk.policy.remove(gone)
    assert desk.policy.count_waiting_rows("a") == 2


# What bounds a batch


@pytest.mark.parametrize("alone", ["requires_isolation", "unsplittable"])
def test_shares_with_nobody(alone: str) -> None:
    desk, one = Desk(), lane()
    desk.add(one, 1, "x")
    desk.add(one, 2, "y", **{alone: True})
    desk.add(one, 1, "z")
    found = list(desk.one_by_one())
    assert [desk.given(batch) for batch in found] == [[("x", 0, 1), ("z", 0, 1)], [("y", 0, 2)]]
    assert [batch.reason for batch in found] == ["same_depth", "isolated"]


def test_alone_is_split_and_whole_is_not() -> None:
    desk, one = Desk(), lane(max_bytes=3)
    desk.add(one, 6, "x", requires_isolation=True)
    desk.add(one, 6, "y", unsplittable=True)
    assert [desk.given(batch) for batch in desk.one_by_one()] == [[("x", 0, 3)], [("x", 3, 6)], [("y", 0, 6)]]


@pytest.mark.parametrize("alone", [False, True])
def test_padded(alone: bool) -> None:
    """A padded forward holds no more rows than it is padded to, and takes as long with one row as with all."""
    desk = Desk()
    desk.add(lane(max_rows=16, padded_rows=4), 9, requires_isolation=alone)
    found = list(desk.one_by_one())
    assert [(batch.rows, batch.seconds) for batch in found] == [(4, 4.0), (4, 4.0), (1, 4.0)]


def test_budget() -> None:
    desk, one = Desk(), lane(costs=Costs(per_row=1.0, row_bytes=10), max_rows=9, max_bytes=70)
    desk.add(one, 3, "x")
    desk.add(one, 3, "y", row_bytes=10)
    desk.add(one, 2, "z", row_bytes=90)
    found = [desk.given(batch) for batch in desk.one_by_one()]
    assert found == [[("x", 0, 3), ("y", 0, 2)], [("y", 2, 3)], [("z", 0, 1)], [("z", 1, 2)]]


@pytest.mark.parametrize(("rows", "after"), [(4, 2), (5, 2), (16, 8), (1, 1)])
def test_lower(rows: int, after: int) -> None:
    desk, one = Desk(), lane(max_rows=8, padded_rows=8, costs=GPU_LIKE)
    Batcher.reduce_max_rows(one, rows)
    desk.add(one, 16)
    assert {batch.rows for batch in desk.one_by_one()} == {after}


def test_never_in_a_later_batch() -> None:
    desk, one = Desk(), lane()
    desk.add(one, 6, "x", deadline=4.0)
    gone = desk.add(one, 6, "y")
    desk.add(one, 1, "z", deadline=4.5)
    first = desk.batch()
    assert desk.given(first) == [("x", 0, 4)]
    desk.policy.remove(gone)
    desk.done(first)
    desk.now = 4.0
    assert [desk.given(batch) for batch in desk.one_by_one()] == [[("z", 0, 1)]]
    desk.add(one, 1, "x", deadline=desk.now)
    assert desk.take() is None
    assert desk.policy.count_waiting_rows("a") == 0


def test_budget_lets_nobody_pass() -> None:
    """Smaller rows that would just fit beside the first of a request wait until all of its rows are given."""
    desk, one = Desk(), lane(max_bytes=4)
    desk.add(one, 2, "x", row_bytes=2)
    desk.add(one, 2, "y")
    assert [desk.given(batch) for batch in desk.one_by_one()] == [
        [("x", 0, 1)],
        [("x", 1, 2), ("y", 0, 1)],
        [("y", 1, 2)],
    ]


# Slots


def test_split_over_free_slots() -> None:
    for idle, expected in ((9, [5, 5, 4, 4]), (2, [9, 9])):
        desk = Desk()
        desk.add(lane("cpu", Costs(base=2.0, per_row=1.0), 64), 18)
        found = [desk.batch(a=idle - started) for started in range(len(expected))]
        assert [(batch.rows, batch.slots) for batch in found] == [(rows, 1) for rows in expected]


def test_not_split_where_it_gains_little() -> None:
    """Two forwards side by side pay their fixed part twice."""
    desk = Desk()
    desk.add(lane("cpu", GPU_LIKE, 64), 4)
    assert [batch.rows for batch in desk.batches()] == [4]


def test_not_split_where_slots_take_turns() -> None:
    desk = Desk(gpu=DeviceSlots(2, parallel=False))
    desk.add(lane(costs=GPU_LIKE, max_rows=64), 18)
    assert [batch.rows for batch in desk.batches()] == [18]


def test_beside_another_only_where_more_rows_gain_nothing() -> None:
    """Where forwards only overlap, a few rows wait for the one that runs, in company; many do not."""
    desk, one = Desk(gpu=DeviceSlots(2, parallel=False)), lane(costs=CPU_LIKE, max_rows=64)
    desk.add(one, 1)
    first = desk.batch()
    desk.add(one, 7)
    assert desk.take() is None
    desk.add(one, 2)
    assert (desk.batch().rows, desk.take()) == (8, None)
    assert len(desk.running) == 2
    desk.done(first)
    assert desk.take() is None  # the last row waits beside the eight
    desk.done(desk.running[0])
    assert desk.batch().rows == 1


def test_beside_another_after_long() -> None:
    """Nor do few rows wait for ever: no longer than two good batches take."""
    desk, one = Desk(gpu=DeviceSlots(2, parallel=False)), lane(costs=CPU_LIKE, max_rows=64)
    desk.add(one, 1)
    desk.batch()
    desk.add(one, 1)
    desk.now = 15.9
    assert desk.take() is None
    desk.now = 16.0
    assert desk.batch().rows == 1


def test_single_rows_on_all_cores() -> None:
    """Few rows of a model that gains by all cores run one after the other, each on all of them and so much quicker."""
    desk, one = Desk(), lane("cpu", SOLO)
    desk.add(one, 2)
    first = desk.batch()
    assert (first.rows, first.slots, first.seconds, desk.take()) == (1, CORES, 1 / 3, None)
    desk.done(first)
    assert (desk.batch().slots, desk.policy.count_waiting_rows("a")) == (CORES, 0)


def test_many_rows_side_by_side() -> None:
    """Many rows of that model run in several slots, never a single row in one of them."""
    desk = Desk()
    desk.add(lane("cpu", SOLO), 8)
    assert [(batch.rows, batch.slots) for batch in desk.batches()] == [(2, 1)] * 4


def test_padded_rows_never_take_all_cores() -> None:
    """A forward padded to several rows is none of a single row, nor is it made for one where more wait."""
    desk = Desk(cpu=DeviceSlots(2))
    desk.add(lane("cpu", SOLO, padded_rows=4), 6)
    assert [(batch.rows, batch.slots) for batch in desk.batches()] == [(3, 1), (3, 1)]


def test_overdue_row_gets_all_cores() -> None:
    """Others pass a row that needs all slots until it is overdue; then they are kept free for it."""
    desk, quick, slow = Desk(), lane("cpu", max_rows=1, model="b"), lane("cpu", SOLO)
    desk.add(quick, 9)
    first = desk.batch()
    desk.add(slow, 1, "x")
    desk.now = 1.0
    second = desk.batch()
    desk.now = 1.1
    assert (second.queue, desk.take()) == (quick, None)
    desk.done(first)
    assert desk.take() is None
    desk.done(second)
    assert desk.batch().slots == CORES


def test_slots_are_free_again() -> None:
    """After batches, failed ones and preparations, whatever was removed or expired meanwhile."""
    desk, one = Desk(), lane("cpu", max_rows=8)
    cut = desk.add(one, 20)
    desk.add(one, 20, deadline=1.0)
    desk.prepare()
    started = [desk.take() for _ in range(CORES)]
    assert [isinstance(each, Batch) for each in started] == [True, True, True, True]
    desk.done(desk.running[0])
    desk.policy.remove(cut)
    desk.now = 2.0
    Batcher.reduce_max_rows(one, 8)
    assert isinstance(desk.take(), DecodeTask)
    assert desk.take() is None
    for what in list(desk.running):
        desk.done(what)
    desk.add(lane("cpu", SOLO))
    assert desk.batch().slots == CORES


# Priorities


def test_interactive_before_bulk() -> None:
    """In a lane and across lanes, however many rows of bulk wait; bulk shares no forward with it before its time."""
    desk = Desk(cpu=DeviceSlots(1))
    ripe, one = lane("cpu", model="b"), lane("cpu")
    desk.add(ripe, 100, "bulk", priority="bulk")
    desk.add(one, 1, "bulk", priority="bulk")
    desk.add(one, 1, "x")
    assert desk.given(desk.batch()) == [("x", 0, 1)]


def test_bulk_ages() -> None:
    """After its patience a bulk request is before what comes later, and after what came before."""
    desk, one = Desk(), lane(max_rows=1)
    desk.add(one, 1, "bulk", priority="bulk")
    order = []
    for second in range(8):
        desk.now = float(second)
        desk.add(one, 2, str(second))
        batch = desk.batch()
        order.append(desk.given(batch)[0][0])
        desk.done(batch)
    order += [desk.given(batch)[0][0] for batch in desk.one_by_one()]
    assert order == [*"001122334455", "bulk", *"6677"]


def test_bulk_of_any_age_shares() -> None:
    """Without anything interactive, bulk requests of before and after their patience are one batch."""
    desk, one = Desk(), lane(costs=GPU_LIKE, max_rows=64)
    for second in range(8):
        desk.now = float(second)
        desk.add(one, priority="bulk")
    assert desk.batch().rows == 8


def test_bulk_of_another_model_is_bypassed_for_a_bounded_time() -> None:
    desk = Desk()
    desk.add(lane(model="b"), 1, "bulk", priority="bulk")
    one, order = lane(), []
    for _ in range(20):
        desk.add(one, 4, "x")
        batch = desk.batch()
        order.append(desk.given(batch)[0][0])
        desk.now += batch.seconds
        desk.done(batch)
    assert order.index("bulk") == 2


# Models share a device


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("wrong", [1.0, 5.0], ids=["as expected", "five times as long"])
def test_models_share_fairly(device: str, wrong: float) -> None:
    """Two models, both with rows at all times, one with forwards three times as long, and wrongly estimated."""
    desk = Desk(cpu=DeviceSlots(CORES), gpu=DeviceSlots(1, parallel=False))
    desk.add(lane(device), 10_000)
    desk.add(lane(device, Costs(per_row=3.0), model="b"), 10_000)
    served, pending, longest = {"a": 0.0, "b": 0.0}, [], 12.0 * max(wrong, 1.0)
    for _ in range(200):
        pending += desk.batches()
        batch = pending.pop(0)
        seconds = batch.seconds * (wrong if batch.queue.model == "a" else 1.0)
        desk.done(batch, seconds)
        served[batch.queue.model] += seconds
        flight = {model: sum(each.seconds for each in pending if each.queue.model == model) for model in served}
        assert abs(served["a"] + flight["a"] - served["b"] - flight["b"]) <= (1 if device == "gpu" else CORES) * longest
    assert min(served.values()) > 50


def test_two_models_within_one_batch() -> None:
    """On one slot they never differ by more than a batch of either, whatever the sizes of their batches."""
    desk = Desk()
    desk.add(lane(max_rows=1), 10_000)
    desk.add(lane(costs=Costs(per_row=3.0), model="b"), 10_000)
    found: list[Batch] = []
    for _, batch in zip(range(200), desk.one_by_one(), strict=False):
        found.append(batch)
        had = shares(found)
        assert abs(had.get("a", 0.0) - had.get("b", 0.0)) <= 12.0
    assert min(shares(found).values()) > 100


def test_small_backlog_is_served_as_fairly() -> None:
    """A model of which one row waits at all times has its half beside one with enough rows for large batches."""
    desk = Desk(cpu=DeviceSlots(1))
    small, large = lane("cpu", Costs(per_row=4.0)), lane("cpu", model="b")
    desk.add(large, 10_000)
    desk.add(small, 1)
    found = []
    for _, batch in zip(range(200), desk.one_by_one(), strict=False):
        found.append(batch)
        if batch.queue is small:
            desk.add(small, 1)
    had = shares(found)
    assert abs(had["a"] - had["b"]) <= 8.0


def test_rows_on_all_cores_are_charged_for_all_of_them() -> None:
    """And for what they took, not for what was expected."""
    desk, found = Desk(), {"a": 0.0, "b": 0.0}
    desk.add(lane("cpu", SOLO, max_rows=1), 1000)
    desk.add(lane("cpu", SOLO, max_rows=1, model="b"), 1000)
    for _ in range(200):
        batch = desk.batch()
        seconds = batch.seconds * (6 if batch.queue.model == "a" else 1)
        desk.done(batch, seconds)
        found[batch.queue.model] += seconds * batch.slots
        assert abs(found["a"] - found["b"]) <= CORES * 2.1


def test_width() -> None:
    """A batch of several rows may need several slots, never more than there are."""
    desk, wide = Desk(), lane("cpu", slots=2)
    desk.add(wide, 16)
    assert [(batch.rows, batch.slots, batch.seconds) for batch in desk.batches()] == [(4, 2, 4.0)] * 2
    desk = Desk()
    desk.add(lane("cpu", slots=CORES + 1))
    assert desk.batch().slots == CORES


@pytest.mark.parametrize("pause", [0.0, 100.0])
def test_time_used_alone_is_not_held_against_a_model(pause: float) -> None:
    """Who had a device for itself shares it evenly from the moment on that another one wants it, after a pause too."""
    desk = Desk()
    desk.add(lane(), 400)
    assert len(list(desk.one_by_one())) == 100
    desk.now += pause
    desk.add(lane(model="b"), 400)
    desk.add(lane(), 400)
    found = [batch for _, batch in zip(range(10), desk.one_by_one(), strict=False)]
    assert abs(shares(found)["a"] - shares(found)["b"]) <= 8.0


def test_time_of_another_device_does_not_count() -> None:
    """A model that comes anew is level with those of its own device, not with what runs on another one."""
    desk = Desk(cpu=DeviceSlots(1), gpu=DeviceSlots(1, parallel=False))
    desk.add(lane("gpu", model="c"), 1)
    desk.add(lane("cpu"), 10_000)
    other = desk.batch(c=1)
    for _, _batch in zip(range(50), desk.one_by_one(), strict=False):
        pass
    desk.add(lane("cpu", model="b"), 10_000)
    found = [batch for _, batch in zip(range(10), desk.one_by_one(), strict=False)]
    assert abs(shares(found)["a"] - shares(found)["b"]) <= 8.0
    desk.done(other)


def test_newcomer_takes_no_more_than_its_share() -> None:
    """A model with one replica has had less than one with many: who comes then does not have to be waited for."""
    desk = Desk()
    first, second = lane("cpu"), lane("cpu", model="b")
    desk.add(first, 10_000)
    desk.add(second, 10_000)
    replicas = {"a": 9, "b": 1, "c": 9}
    found: list[str] = []
    for round_ in range(400):
        if round_ == 200:
            desk.add(lane("cpu", model="c"), 10_000)
        while True:
            busy = [each.queue.model for each in desk.running if isinstance(each, Batch)]
            taken = desk.take(**{model: most - busy.count(model) for model, most in replicas.items()})
            if taken is None:
                break
            assert isinstance(taken, Batch)
            found.append(taken.queue.model)
        desk.done(desk.running[0])
    assert abs(found[-60:].count("a") - found[-60:].count("c")) <= 2


def test_forgotten_model_comes_again() -> None:
    desk = Desk()
    desk.add(lane(), deadline=1.0)
    desk.now = 2.0
    desk.policy.remove_model("a")
    assert desk.policy.count_waiting_rows("a") == 0
    desk.add(lane(), 3)
    assert desk.batch().rows == 3


# Preparations


def test_decoding_first_until_rows_are_enough() -> None:
    desk, one = Desk(cpu=DeviceSlots(1)), lane("cpu")
    for _ in range(5):
        desk.prepare()
    order = []
    while (found := desk.take()) is not None:
        order.append(found.rows if isinstance(found, Batch) else "decode")
        desk.done(found)
        if isinstance(found, DecodeTask):
            desk.add(one)
    assert order == ["decode", "decode", "decode", "decode", 4, "decode", 1]


def test_decoding_first_until_rows_waited_long_enough() -> None:
    """Twice as long as a batch of enough rows takes; a forward on another device starts in any case."""
    desk, one = Desk(), lane("cpu")
    desk.add(one)
    desk.add(lane("gpu", model="b"))
    for _ in range(3):
        desk.prepare()
    assert desk.batch().queue.model == "b"
    desk.now = 7.9
    assert isinstance(desk.take(), DecodeTask)
    desk.now = 8.0
    assert desk.batch().queue is one
    assert isinstance(desk.take(), DecodeTask)


def test_decoding_fills_what_forwards_cannot_use() -> None:
    """While a row waits for all slots, pictures are decoded, unless the slots are kept for it."""
    desk, one = Desk(), lane("cpu", Costs(per_row=1.0, speedup=3.0), max_rows=1)
    desk.prepare()
    first = desk.take()
    desk.add(one, 1)
    desk.prepare()
    assert isinstance(desk.take(), DecodeTask)
    desk.now = 1.1
    desk.prepare()
    assert (first is not None, desk.take()) == (True, None)


def test_one_picture_beside_forwards() -> None:
    """Where forwards have all slots one picture is decoded at a time, so that a bad one is refused before they end."""
    desk, one = Desk(), lane("cpu")
    desk.add(one, 4 * CORES)
    batches = desk.batches()
    assert len(batches) == CORES
    desk.prepare()
    desk.prepare()
    first = desk.take()
    assert isinstance(first, DecodeTask)
    assert desk.take() is None
    desk.done(batches[0])
    assert desk.take() is None  # the slot that was lent
    desk.done(first)
    assert isinstance(desk.take(), DecodeTask)


def test_decoding_by_priority() -> None:
    """Interactive pictures first, bulk ones in their turn after their patience."""
    desk = Desk(cpu=DeviceSlots(1))
    bulk, order = desk.prepare("bulk"), []
    for _ in range(10):
        desk.prepare()
        found = desk.take()
        assert isinstance(found, DecodeTask)
        order.append(found is bulk)
        desk.now += 1.0
        desk.done(found)
    assert order.index(True) == 6


def test_interactive_picture_before_bulk_rows() -> None:
    """And bulk pictures after interactive rows, however few."""
    desk = Desk(cpu=DeviceSlots(1))
    desk.add(lane("cpu"), 100, priority="bulk")
    desk.prepare("bulk")
    desk.prepare()
    first = desk.take()
    assert isinstance(first, DecodeTask)
    assert first.priority == "interactive"
    desk.done(first)
    desk.add(lane("cpu"))
    assert desk.batch().slices[0].request.priority == "interactive"


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_picture_is_decoded_in_bounded_time(priority: Literal["interactive", "bulk"]) -> None:
    """However many rows keep coming that need no decoding."""
    desk, one = Desk(cpu=DeviceSlots(1)), lane("cpu")
    desk.prepare(priority)
    for _ in range(20):
        desk.add(one, 4)
        found = desk.take()
        assert found is not None
        desk.now += 4.0
        desk.done(found)
        if isinstance(found, DecodeTask):
            break
    assert desk.now <= 20.0


def test_rows_run_in_bounded_time() -> None:
    """However many pictures keep coming."""
    desk, one = Desk(cpu=DeviceSlots(1)), lane("cpu")
    for _ in range(50):
        desk.prepare()
    desk.add(one)
    while isinstance(found := desk.take(), DecodeTask):
        desk.prepare()
        desk.now += 1.0
        desk.done(found)
    assert found is not None
    assert desk.now <= 10.0


def test_no_processor_among_the_devices() -> None:
    desk = Desk(gpu=DeviceSlots(2, parallel=False))
    assert desk.take() is None
    desk.add(lane())
    assert desk.batch().rows == 1


# Depths

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
        id="told of what fits",
    ),
]


@pytest.mark.parametrize(("costs", "requests", "expected", "whys"), DEPTHS)
def test_depths(costs: Costs, requests: list[tuple[int, float]], expected: list[list[int]], whys: list[str]) -> None:
    desk, one = Desk(), lane(costs=costs)
    works = [desk.add(one, rows, depth=depth) for rows, depth in requests]
    found = list(desk.one_by_one())
    assert [[works.index(part.request) for part in batch.slices] for batch in found] == expected
    assert [batch.reason for batch in found] == whys
    assert [batch.depth for batch in found] == [max(requests[each][1] for each in places) for places in expected]


def test_padding_is_shared_by_all_depths() -> None:
    """Rows that only fill up a padded forward cost nothing: other depths are welcome as far as it has room."""
    desk, one = Desk(), lane(padded_rows=4)
    for depth in (0.5, 1.0):
        desk.add(one, depth=depth)
    assert (desk.batch().reason, desk.policy.count_waiting_rows("a")) == ("sharing_pays", 0)


def cuts(depths: Sequence[float]) -> Iterator[list[Sequence[float]]]:
    """All ways to cut a sequence into pieces."""
    for count in range(len(depths)):
        for places in combinations(range(1, len(depths)), count):
            bounds = [0, *places, len(depths)]
            yield [depths[start:stop] for start, stop in pairwise(bounds)]


def cheapest(lane: BatchQueue, works: Sequence[Waiting]) -> list[list[Sequence[float]]]:
    """The cuts of the depths of some requests that cost least, several where they cost the same."""

    def cost(piece: Sequence[float]) -> float:
        rows = sum(work.left for work in works if work.depth in piece)
        forwards, each = (1, rows) if lane.padded_rows is None else (-(-rows // lane.padded_rows), lane.padded_rows)
        return forwards * max(piece) * (lane.costs.base + each * lane.costs.per_row)

    prices = [(sum(map(cost, cut)), cut) for cut in cuts(sorted({work.depth for work in works}))]
    least = min(price for price, _ in prices)
    return [cut for price, cut in prices if price <= least + 1e-9 * max(least, 1.0)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0, 40.0]),
    st.sampled_from([None, 4]),
)
@settings(max_examples=150, deadline=None)
def test_cheapest_cut(requests: list[tuple[int, int]], base: float, padded: int | None) -> None:
    """What runs with the first request is its piece of a cheapest cut of all depths, found by trying all of them."""
    desk, one = Desk(), lane(costs=Costs(base=base, per_row=1.0), max_rows=999, padded_rows=padded)
    works = [Waiting(desk.add(one, rows, depth=depth / 12)) for rows, depth in requests]
    found = {part.request.depth for part in desk.batch().slices}
    pieces = [next(piece for piece in cut if works[0].depth in piece) for cut in cheapest(one, works)]
    assert any(found <= set(piece) for piece in pieces)
    if sum(rows for rows, _ in requests) <= min(one.efficient_rows, padded or 999):
        assert found in [set(piece) for piece in pieces]


# Any order of events


@dataclass(eq=False)
class Waiting:
    """A request as the oracle knows it: what it is, and the rows that were given of it."""

    work: QueuedRequest
    since: float = 0.0
    removed: bool = False
    rows: int = field(init=False)
    got: int = 0

    def __post_init__(self) -> None:
        self.rows = self.work.rows

    @property
    def lane(self) -> BatchQueue:
        return self.work.queue

    @property
    def depth(self) -> float:
        return self.work.depth

    @property
    def left(self) -> int:
        return self.rows - self.got

    @property
    def isolated(self) -> bool:
        return self.work.requires_isolation or self.work.unsplittable

    @property
    def bulk(self) -> bool:
        return self.work.priority == "bulk"

    @property
    def turn(self) -> float:
        """When it came, or seems to have come."""
        return self.since + PATIENCE * self.bulk

    def late(self, now: float) -> bool:
        return self.bulk and now < self.turn


@dataclass
class Limits:
    """What the oracle knows of a lane's size."""

    ceiling: int
    padded: int | None


DEVICES = {"cpu": DeviceSlots(3), "gpu": DeviceSlots(2, parallel=False)}
REPLICAS = {"a": 3, "b": 2, "c": 1, "d": 2}


def lanes() -> list[BatchQueue]:
    return [
        BatchQueue("a", "cpu", Costs(base=0.0, per_row=1.0, row_bytes=2), 6, max_bytes=20),
        BatchQueue("a", "cpu", Costs(base=0.5, per_row=0.25, row_bytes=1), 5, padded_rows=3),
        BatchQueue("b", "cpu", Costs(base=0.5, per_row=1.0, row_bytes=3, speedup=2.0), 8, max_bytes=24),
        BatchQueue("b", "cpu", Costs(base=0.0, per_row=0.5, row_bytes=1, speedup=2.5), 1),
        BatchQueue("c", "gpu", Costs(base=4.0, per_row=0.5, row_bytes=4), 12, max_bytes=40),
        BatchQueue("d", "gpu", Costs(base=1.0, per_row=1.0, row_bytes=1), 7),
        BatchQueue("d", "gpu", Costs(base=1.0, per_row=1.0, row_bytes=1), 7, padded_rows=4),
    ]


class Events(RuleBasedStateMachine):
    """Requests, pictures, ends and failures in any order; what is given is judged by lists of what was asked."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.policy = Batcher(DEVICES, lambda: self.now, PATIENCE)
        self.lanes = lanes()
        self.limits = {each: Limits(each.max_rows, each.padded_rows) for each in self.lanes}
        self.known: list[Waiting] = []
        self.pictures: list[tuple[DecodeTask, float]] = []
        self.running: list[Started] = []
        self.slots_of: dict[tuple[BatchQueue, int | None, int], int] = {}

    # What can happen

    @rule(
        number=st.integers(0, 6),
        rows=st.integers(1, 3) | st.integers(1, 14),
        depth=st.sampled_from([0.1, 0.4, 0.5, 0.9, 1.0]),
        row_bytes=st.sampled_from([0, 0, 1, 4, 30]),
        bulk=st.booleans(),
        wait=st.sampled_from([math.inf, math.inf, math.inf, 0.0, 0.5, 3.0, 9.0]),
        how=st.sampled_from(["", "", "", "requires_isolation", "unsplittable"]),
    )
    def add(self, number: int, rows: int, depth: float, row_bytes: int, bulk: bool, wait: float, how: str) -> None:
        options: dict[str, Any] = {how: True} if how else {}
        kind: Literal["bulk", "interactive"] = "bulk" if bulk else "interactive"
        work = QueuedRequest(self.lanes[number], rows, depth, row_bytes, kind, self.now + wait, **options)
        self.known.append(Waiting(work, self.now))
        self.policy.add(work)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.known))
        each.removed = True
        self.policy.remove(each.work)

    @rule(bulk=st.booleans())
    def prepare(self, bulk: bool) -> None:
        picture = DecodeTask("bulk" if bulk else "interactive")
        self.pictures.append((picture, self.now + PATIENCE * bulk))
        self.policy.add_decode(picture)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5, 5.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(busy=st.sets(st.sampled_from("abcd"), max_size=2), most=st.integers(1, 6))
    def take(self, busy: set[str], most: int) -> None:
        idle = {model: 0 if model in busy else count for model, count in self.idle().items()}
        for _ in range(most):
            if not self.taken(idle):
                break
            idle = {model: min(count, idle[model]) for model, count in self.idle().items()}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    def done(self, data: st.DataObject, seconds: float) -> None:
        what = data.draw(st.sampled_from(self.running))
        self.running.remove(what)
        self.policy.finish(what, seconds)

    @rule(number=st.integers(0, 6), rows=st.integers(1, 20))
    def lower(self, number: int, rows: int) -> None:
        each = self.lanes[number]
        known = self.limits[each]
        known.ceiling = max(min(known.ceiling, rows // 2), 1)
        known.padded = min(known.padded, known.ceiling) if known.padded else None
        Batcher.reduce_max_rows(each, rows)
        assert (each.max_rows, each.padded_rows) == (known.ceiling, known.padded)

    # What must hold

    @invariant()
    def counted(self) -> None:
        """Rows that wait: those that can still run at least, those that may have expired at most."""
        for model in REPLICAS:
            waits = [each for each in self.known if each.lane.model == model and not each.removed]
            can = sum(each.left for each in waits if each.work.deadline > self.now)
            assert can <= self.policy.count_waiting_rows(model) <= sum(each.left for each in waits)

    def idle(self) -> dict[str, int]:
        busy = [each.queue.model for each in self.running if isinstance(each, Batch)]
        return {model: count - busy.count(model) for model, count in REPLICAS.items()}

    def free(self, device: str) -> int:
        used = sum(each.slots for each in self.running if isinstance(each, Batch) and each.queue.device == device)
        pictures = sum(isinstance(each, DecodeTask) for each in self.running) if device == "cpu" else 0
        return DEVICES[device].slots - used - pictures

    def live(self, lane: BatchQueue) -> list[Waiting]:
        """What can still run of a lane, in the order in which it should."""
        found = [
            each
            for each in self.known
            if each.lane is lane and each.left and not each.removed and each.work.deadline > self.now
        ]
        if not all(each.bulk for each in found):
            found = [each for each in found if not each.late(self.now)]
        return sorted(found, key=lambda each: (each.turn, each.bulk))

    def groups(self, lane: BatchQueue) -> list[tuple[list[Waiting], str]]:
        """Who may run with the lane's first request, and why, should there be room; several answers where costs tie."""
        live = self.live(lane)
        if live[0].isolated:
            return [(live[:1], "isolated")]
        others = [each for each in live if not each.isolated]
        found = []
        for cut in cheapest(lane, others):
            piece = next(piece for piece in cut if live[0].depth in piece)
            mates = [each for each in others if each.depth in piece]
            found.append((mates, "shared" if len(mates) == len(others) else "sharing_costs"))
        return found

    def lone(self, lane: BatchQueue) -> bool:
        """Whether the lane's next forward is one of a single row that needs all slots, and some are busy."""
        known, device = self.limits[lane], DEVICES[lane.device]
        if lane.costs.speedup == 1 or known.padded not in (None, 1) or self.free(lane.device) == device.slots:
            return False
        sizes = []
        for mates, _ in self.groups(lane):
            first = mates[0]
            each = [lane.costs.row_bytes + mate.work.row_bytes for mate in mates for _ in range(mate.left)][:2]
            fits = known.ceiling > 1 and sum(each) <= lane.max_bytes and len(each) > 1
            sizes.append(first.rows if first.work.unsplittable else 1 + fits)
        return min(sizes) == 1

    def kept(self, device: str, idle: Mapping[str, int]) -> bool:
        """Whether a row that could have all slots of a device, had it waited for nothing else, is overdue."""
        return any(
            self.lone(lane) and self.now - self.live(lane)[0].since > lane.costs.base + lane.costs.per_row
            for lane in self.lanes
            if lane.device == device and idle[lane.model] > 0 and self.live(lane)
        )

    def could(self, idle: Mapping[str, int]) -> list[BatchQueue]:
        """Lanes of which something can start now, whatever it is."""
        ready = [lane for lane in self.lanes if idle[lane.model] > 0 and self.free(lane.device) > 0 and self.live(lane)]
        return [lane for lane in ready if not self.lone(lane) and (not self.beside(lane) or self.surely_ripe(lane))]

    def beside(self, lane: BatchQueue) -> bool:
        """Whether a forward of a lane would begin beside others, on a device where they only overlap."""
        device = DEVICES[lane.device]
        return not device.parallel and self.free(lane.device) < device.slots

    def surely_ripe(self, lane: BatchQueue) -> bool:
        """As ``ripe``, whether or not what is past its deadline still counts."""
        gone = [each for each in self.known if each.lane is lane and each.work.deadline <= self.now]
        return self.ripe(lane, self.live(lane)[0], sum(each.left for each in gone if not each.removed))

    def ripe(self, lane: BatchQueue, first: Waiting, expired: int = 0) -> bool:
        enough = self.limits[lane].padded or min(
            max(8, math.ceil(10 * lane.costs.base / lane.costs.per_row)), self.limits[lane].ceiling
        )
        waits = sum(each.left for each in self.known if each.lane is lane and not each.removed) - expired
        takes = 2 * first.depth * (lane.costs.base + enough * lane.costs.per_row)
        return waits >= enough or self.now - first.since >= takes

    def yields(self, turn: float, bulk: bool) -> bool:
        """Whether a picture lets a forward on the processor go first."""
        late = bulk and self.now < turn
        for lane in self.lanes:
            live = self.live(lane) if lane.device == "cpu" else []
            if live and live[0].late(self.now) < late:
                return True
            if live and live[0].late(self.now) == late and self.ripe(lane, live[0]) and live[0].turn <= turn + PATIENCE:
                return True
        return False

    def taken(self, idle: dict[str, int]) -> bool:
        """Take once and judge what came."""
        found = self.policy.start_next(idle)
        if isinstance(found, Batch):
            self.judge_choice(found, idle)
            self.judge_rows(found)
            for part in found.slices:
                self.record(part)
        elif found is None:
            assert all(self.kept(lane.device, idle) for lane in self.could(idle))
            assert not self.pictures or not self.room_to_decode() or self.kept("cpu", idle)
        else:
            self.judge_picture(found, idle)
        if found is not None:
            self.running.append(found)
        decoding = sum(isinstance(each, DecodeTask) for each in self.running)
        lent = {"cpu": 1 if decoding == 1 else 0}
        assert all(self.free(device) >= -lent.get(device, 0) for device in DEVICES)
        return found is not None

    def room_to_decode(self) -> bool:
        """Whether the processor has a slot, or lends one to the only picture that is decoded."""
        return self.free("cpu") > 0 or (
            self.free("cpu") == 0 and not any(isinstance(each, DecodeTask) for each in self.running)
        )

    def judge_choice(self, batch: Batch, idle: dict[str, int]) -> None:
        """The lane was allowed to run, had an idle replica, and nothing more urgent of its device could have run."""
        lane = batch.queue
        first = self.live(lane)[0]
        assert not self.beside(lane) or self.ripe(lane, first)
        assert idle[lane.model] > 0
        assert not self.lone(lane)
        if first.late(self.now):
            rivals = [each for each in self.could(idle) if each.device == lane.device]
            assert all(self.live(each)[0].late(self.now) for each in rivals)
        if lane.device == "cpu" and self.pictures:
            picture, turn = self.next_picture()
            ready = [each for each in self.lanes if idle[each.model] > 0]
            assert not ready or self.yields(turn, picture.priority == "bulk")

    def judge_rows(self, batch: Batch) -> None:
        """Whose rows these are: the oldest of those that may share, as many as are allowed, and why is told truly."""
        lane, known = batch.queue, self.limits[batch.queue]
        assert all(part.start < part.stop for part in batch.slices)
        assert batch.rows == sum(part.stop - part.start for part in batch.slices)
        answers = [self.answer(mates, why, batch) for mates, why in self.groups(lane)]
        given = ([(part.request, part.start, part.stop) for part in batch.slices], batch.reason)
        assert given in answers
        if not batch.slices[0].request.unsplittable:
            assert batch.rows <= min(known.ceiling, known.padded or known.ceiling)
            used = sum(
                (part.stop - part.start) * (lane.costs.row_bytes + part.request.row_bytes) for part in batch.slices
            )
            assert used <= lane.max_bytes or batch.rows == 1
        assert batch.depth == max(part.request.depth for part in batch.slices)
        solo = (known.padded or batch.rows) == 1 and lane.costs.speedup > 1
        assert batch.slots == (DEVICES[lane.device].slots if solo else 1)
        assert self.slots_of.setdefault((lane, known.padded, batch.rows), batch.slots) == batch.slots

    def answer(self, mates: list[Waiting], why: str, batch: Batch) -> tuple[list[tuple[QueuedRequest, int, int]], str]:
        """The batch that had to be formed of these requests, given how many rows it has."""
        parts, left = [], batch.rows
        if mates[0].work.unsplittable:
            left = mates[0].rows
        for each in mates:
            count = min(each.left, left)
            if count:
                parts.append((each.work, each.got, each.got + count))
            left -= count
        if why == "shared":
            several = len({work.depth for work, _, _ in parts}) > 1
            why = "single" if len(parts) == 1 else "sharing_pays" if several else "same_depth"
        return parts, why

    def next_picture(self) -> tuple[DecodeTask, float]:
        return min(
            self.pictures,
            key=lambda each: (each[0].priority == "bulk" and self.now < each[1], each[1], each[0].priority == "bulk"),
        )

    def judge_picture(self, picture: DecodeTask, idle: dict[str, int]) -> None:
        """It is the next one, and no forward had to go first that could."""
        expected, turn = self.next_picture()
        assert picture is expected
        assert self.room_to_decode()
        could = [lane for lane in self.could(idle) if lane.device == "cpu"]
        ripe_or_urgent = could and self.yields_to(could, turn, picture.priority == "bulk")
        assert not ripe_or_urgent
        self.pictures.remove((picture, turn))

    def yields_to(self, could: Sequence[BatchQueue], turn: float, bulk: bool) -> bool:
        late = bulk and self.now < turn
        for lane in could:
            first = self.live(lane)[0]
            live = sum(each.left for each in self.live(lane))
            rows = live >= (self.limits[lane].padded or lane.efficient_rows)
            if first.late(self.now) < late or (first.late(self.now) == late and rows and first.turn <= turn + PATIENCE):
                return True
        return False

    def record(self, part: RowSlice) -> None:
        each = next(each for each in self.known if each.work is part.request)
        assert not each.removed
        assert each.work.deadline > self.now
        assert part.start == each.got
        each.got = part.stop

    def teardown(self) -> None:
        """Run all that waits: it ends, every row was given that was neither removed nor expired, all slots are free."""
        if not hasattr(self, "policy"):
            return
        steps = sum(each.left for each in self.known) + len(self.pictures) + len(self.running)
        for _ in range(steps + 1):
            while self.taken(self.idle()):
                pass
            if not self.running:
                break
            self.now += 0.3
            self.policy.finish(self.running.pop(0), 1.0)
        assert not self.running
        assert not self.pictures
        late = [each for each in self.known if each.left and not each.removed]
        assert all(each.work.deadline <= self.now for each in late)
        assert [self.policy.count_waiting_rows(model) for model in REPLICAS] == [0] * len(REPLICAS)
        assert self.whole_device()

    def whole_device(self) -> bool:
        """Whether every device has all its slots again: as many batches start as there are, and not one more."""
        for device, model in (("cpu", "x"), ("gpu", "y")):
            for _ in range(DEVICES[device].slots + 1):
                self.policy.add(QueuedRequest(BatchQueue(model, device, CPU_LIKE, 1), 1, requires_isolation=True))
        found = [self.policy.start_next({"x": 9, "y": 9}) for _ in range(6)]
        models = [each.queue.model for each in found if isinstance(each, Batch)]
        return (models.count("x"), models.count("y")) == (3, 2)


TestEvents = Events.TestCase
# Without shrinking, which takes minutes here: what a failure says of a batch is short enough.
TestEvents.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, phases=[Phase.generate])
