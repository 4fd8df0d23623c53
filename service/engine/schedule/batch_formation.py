"""Which rows a batch has, and how many slots it takes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from layertap.service.engine.batch import Batch, Job, RowSlice
from layertap.service.engine.batch_key import BatchKey
from layertap.service.types import BatchReason

MIN_SPLIT_SPEEDUP = 1.3  # to split rows: seconds of one forward of all, divided by those of forwards in parallel
DEPTH_LEVELS = 32  # depths are rounded up to such parts of a whole forward
MIN_PARALLEL_ROWS = 2  # of a forward that should not run as a single row, which may take all slots


@dataclass(frozen=True)
class DeviceSlots:
    """A device's slots for batches; ``parallel``: batches in different slots compute at the same time.

    If they only overlap, one's copies with another's forward, a second batch starts only with so many rows that more
    would not make it cheaper.
    """

    slots: int
    parallel: bool = True


@dataclass(frozen=True)
class DeviceState:
    """A device on which a batch may start now, with its free slots and the model's idle replicas.

    ``idle_devices``: how many of the model's devices could start a batch, this one included.
    """

    name: str
    device: DeviceSlots
    free_slots: int
    idle_replicas: int
    idle_devices: int = 1


def form_batch(candidates: Sequence[Job], state: DeviceState, yielding_rows: float = math.inf) -> Batch | None:
    """The next batch of a key on a device; None if it needs more slots than are free.

    ``candidates``: at least one job of one key, sorted; the first one is in the batch. ``yielding_rows``: the most
    rows of yielding jobs, by weight.
    """
    key, device = candidates[0].prepared.key, state.device
    shareable = [job for job in candidates if not job.prepared.isolated]
    if candidates[0].prepared.isolated:
        shareable = [candidates[0]]
    companions = choose_companions(shareable)
    rows = choose_rows(companions, state)
    slices = tuple(slice_rows(companions, rows, yielding_rows))
    rows = sum(row_slice.rows for row_slice in slices)
    slots = count_slots(key, rows, device)
    if slots > state.free_slots:
        return None
    depth, seconds = max(row_slice.job.prepared.depth for row_slice in slices), estimate_seconds(slices, slots)
    reason = find_batch_reason(slices, left_out=len(shareable) - len(companions))
    padded_rows = None if candidates[0].prepared.unsplittable else key.padded_rows
    return Batch(key, state.name, slices, slots, count_slots(key, 1, device), depth, seconds, reason, padded_rows)


def choose_joining(
    batch: Batch, candidates: Sequence[Job], device: DeviceSlots, running_rows: int, yielding_rows: float
) -> tuple[RowSlice, ...]:
    """Rows of the candidates that a batch would have had, had they arrived earlier.

    They do not make its forward deeper. It gets no more rows than an efficient batch has, and no more than its share of
    the waiting rows and the ``running_rows`` of its key: the other replicas of the device need rows too.
    """
    key, first = batch.key, batch.slices[0].job
    lowest = min(row_slice.job.prepared.depth for row_slice in batch.slices)
    interactive = any(row_slice.job.priority == "interactive" for row_slice in batch.slices)
    joining = [
        job
        for job in candidates
        if not job.prepared.isolated
        and lowest <= job.prepared.depth <= batch.depth
        and not (interactive and job.priority == "bulk")
    ]
    rows = sum(job.waiting_rows for job in joining)
    few = is_single_row(key, batch.rows) and are_few_rows(key, batch.rows + rows)
    share = math.ceil((running_rows + rows) / count_parallel(key, device))
    limit = limit_rows([first, *joining], device)
    rows = min(limit, share, batch.padded_rows or limit)
    if first.prepared.isolated or not joining or few:
        return ()
    return tuple(slice_rows(joining, rows, yielding_rows, batch.slices))


def choose_companions(shareable: Sequence[Job]) -> list[Job]:
    """The jobs that run with the first one, itself included: those of similar depth."""
    levels = [math.ceil(job.prepared.depth * DEPTH_LEVELS) for job in shareable]
    rows_by_level = dict.fromkeys(sorted(set(levels)), 0)
    for job, level in zip(shareable, levels, strict=True):
        rows_by_level[level] += job.waiting_rows
    lowest, highest = find_level_range(shareable[0].prepared.key, rows_by_level, levels[0])
    return [job for job, level in zip(shareable, levels, strict=True) if lowest <= level <= highest]


def find_level_range(key: BatchKey, rows_by_level: Mapping[int, int], level: int) -> tuple[int, int]:
    """The lowest and the highest level of depth that run together with one level.

    A shared forward runs all its rows up to the deepest layer, but pays its fixed cost once. The sorted levels are cut
    into the ranges whose forwards take least time in all.
    """
    levels = list(rows_by_level)
    rows_before = list(accumulate(rows_by_level.values(), initial=0))
    cuts: list[tuple[float, int]] = [(0.0, 0)]  # for the first n levels: seconds, and the start of the last range
    for stop, highest in enumerate(levels, 1):
        seconds = [
            cuts[start][0] + key.estimate_seconds(rows_before[stop] - rows_before[start], highest / DEPTH_LEVELS)
            for start in range(stop)
        ]
        cuts.append(min(zip(seconds, range(stop), strict=True)))
    stop = len(levels)
    while levels[cuts[stop][1]] > level:
        stop = cuts[stop][1]
    return levels[cuts[stop][1]], levels[stop - 1]


def choose_rows(companions: Sequence[Job], state: DeviceState) -> int:
    """How many rows the next forward should have, apart from the memory of captures."""
    key, device = companions[0].prepared.key, state.device
    waiting_rows = sum(job.waiting_rows for job in companions)
    if companions[0].prepared.isolated:
        return min(waiting_rows, key.fitting_rows)
    single_row = is_single_row(key, 1)
    all_free = state.free_slots == device.slots > 1
    if all_free and are_few_rows(key, waiting_rows):
        return 1  # one after the other on all slots is quicker than in parallel
    parallel = min(state.free_slots // key.slots, state.idle_replicas) if device.parallel else 1
    rows = max(split_rows(key, waiting_rows, parallel * state.idle_devices), MIN_PARALLEL_ROWS if single_row else 1)
    return min(rows, limit_rows(companions, device))


def limit_rows(jobs: Sequence[Job], device: DeviceSlots) -> int:
    """The most rows that a forward of these jobs should have.

    A single job is split evenly over the forwards that it needs: on two slots, with 12 rows in an efficient
    forward, 32 rows run as four times 8. As 12, 12 and 8 they would leave one slot idle at the end.
    """
    key = jobs[0].prepared.key
    limit = key.efficient_rows
    total, parallel = jobs[0].rows, count_parallel(key, device)
    if parallel == 1 or total <= limit or key.pads or any(each is not jobs[0] for each in jobs):
        return limit
    rounds = math.ceil(total / (limit * parallel))
    return max(math.ceil(total / (rounds * parallel)), math.ceil(limit / 2))


def count_parallel(key: BatchKey, device: DeviceSlots) -> int:
    """How many forwards of a key run in parallel on its devices, which are alike."""
    on_each = min(max(device.slots // key.slots, 1), key.replicas) if device.parallel else 1
    return on_each * len(key.devices)


def split_rows(key: BatchKey, rows: int, parallel: int) -> int:
    """Rows of each parallel forward; all rows if the fixed cost of more forwards outweighs the gain."""
    share = math.ceil(rows / max(parallel, 1))
    return rows if key.estimate_seconds(rows) < MIN_SPLIT_SPEEDUP * key.estimate_seconds(share) else share


def slice_rows(
    companions: Sequence[Job], rows: int, yielding_rows: float, taken: Sequence[RowSlice] = ()
) -> Iterator[RowSlice]:
    """Slices of the jobs, in order, for a batch of so many rows that has ``taken`` some already.

    They fit into ``max_bytes``. A new batch has at least one row of the first job, all rows of an unsplittable one.
    Yielding jobs get at most ``yielding_rows`` by weight, unless the batch would have a single row.
    """
    key = companions[0].prepared.key
    free_rows, free_bytes, least = rows, key.max_bytes, MIN_PARALLEL_ROWS
    for each in taken:
        free_rows -= each.rows
        free_bytes -= each.rows * (key.costs.row_bytes + each.job.prepared.row_bytes)
        yielding_rows -= each.rows * each.job.weight
        least -= each.rows
    for job in companions:
        row_bytes = key.costs.row_bytes + job.prepared.row_bytes
        count = min(job.waiting_rows, free_rows, free_bytes // max(row_bytes, 1))
        if job.yields:
            count = int(min(count, max(yielding_rows / job.weight, least)))
        if job is companions[0] and not taken:
            count = job.waiting_rows if job.prepared.unsplittable else max(count, 1)
        if count <= 0:
            return
        yield RowSlice(job, job.taken_rows, job.taken_rows + count)
        if count < job.waiting_rows:
            return  # later jobs do not pass the rest of this one
        free_rows -= count
        free_bytes -= count * row_bytes
        yielding_rows -= count * job.weight
        least -= count


def estimate_seconds(slices: Sequence[RowSlice], slots: int = 1) -> float:
    """The expected seconds of a batch: decoding, forward and captures."""
    key, rows = slices[0].job.prepared.key, sum(row_slice.rows for row_slice in slices)
    seconds = key.estimate_seconds(rows, max(row_slice.job.prepared.depth for row_slice in slices))
    if slots > 1 and is_single_row(key, rows):
        seconds /= key.costs.speedup
    return seconds + sum(row_slice.rows * row_slice.job.prepared.captured_seconds for row_slice in slices)


def count_slots(key: BatchKey, rows: int, device: DeviceSlots) -> int:
    """The slots of a batch: all of them for a single row that gains by it, else the key's.

    They depend on the number of rows only: another number of threads gives other bits.
    """
    return device.slots if is_single_row(key, rows) else min(key.slots, device.slots)


def is_single_row(key: BatchKey, rows: int) -> bool:
    """Whether a forward of so many rows has a single row, and is quicker on all slots."""
    return (key.padded_rows or rows) == 1 and key.costs.speedup > 1


def are_few_rows(key: BatchKey, rows: int) -> bool:
    """Whether so many rows are quicker one after the other, each on all slots, than in parallel."""
    return is_single_row(key, 1) and rows <= MIN_PARALLEL_ROWS * key.costs.speedup


def find_batch_reason(slices: Sequence[RowSlice], left_out: int) -> BatchReason:
    """Why a batch has these rows; ``left_out``: how many jobs it leaves out because of their depth."""
    if slices[0].job.prepared.isolated:
        return "isolated"
    if left_out:
        return "sharing_costs"
    if len(slices) == 1:
        return "single"
    return "same_depth" if len({row_slice.job.prepared.depth for row_slice in slices}) == 1 else "sharing_pays"
