"""Which rows a batch has, and how many slots it takes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter

from layertap.service.engine.batch import Batch, Job, RowSlice
from layertap.service.engine.batch_key import MIN_PARALLEL_ROWS, BatchKey
from layertap.service.engine.schedule.waiting import BatchQueue, DeviceSlots
from layertap.service.types import BatchReason

MIN_SPLIT_SPEEDUP = 1.3  # to split rows: seconds of one forward of all, divided by those of forwards in parallel
DEPTH_LEVELS = 32  # depths are rounded up to such parts of a whole forward
ROWS, WAITING_ROWS, JOB_DEPTH = attrgetter("rows"), attrgetter("waiting_rows"), attrgetter("job.prepared.depth")


def form_batch(
    queue: BatchQueue, candidates: Sequence[Job], device: DeviceSlots, parallel: int, yielding_rows: float = math.inf
) -> Batch | None:
    """The next batch of a queue on a device; None if it needs more slots than are free.

    ``candidates``: at least one job of the queue, sorted; the first one is in the batch. ``parallel``: so many batches
    could start side by side. ``yielding_rows``: the most rows of yielding jobs, by weight.
    """
    first, shareable = candidates[0], candidates
    if len(candidates) > 1:
        shareable = [first] if first.prepared.isolated else [job for job in candidates if not job.prepared.isolated]
    companions = choose_companions(queue, shareable) if len(shareable) > 1 else shareable
    slices = slice_rows(queue, companions, choose_rows(queue, companions, device, parallel), yielding_rows)
    rows = sum(map(ROWS, slices))
    slots = count_slots(queue, rows, device)
    if slots > device.free:
        return None
    single_row_slots = slots if rows == 1 else count_slots(queue, 1, device)
    depth, seconds = max(map(JOB_DEPTH, slices)), estimate_seconds(queue, slices, slots)
    reason = find_batch_reason(slices, left_out=len(shareable) - len(companions))
    padded_rows = None if first.prepared.unsplittable else queue.padded_rows
    return Batch(queue.key, device.name, tuple(slices), slots, single_row_slots, depth, seconds, reason, padded_rows)


def choose_joining(
    queue: BatchQueue, batch: Batch, candidates: Sequence[Job], device: DeviceSlots, yielding_rows: float
) -> list[RowSlice]:
    """Rows of the candidates that a batch would have had, had they arrived earlier.

    They do not make its forward deeper. It gets no more rows than an efficient batch has, and no more than its share of
    the queue's waiting and running rows: the other replicas of the device need rows too.
    """
    first, lowest = batch.slices[0].job, min(map(JOB_DEPTH, batch.slices))
    interactive = any(row_slice.job.priority == "interactive" for row_slice in batch.slices)
    joining = [
        job
        for job in candidates
        if not job.prepared.isolated
        and lowest <= job.prepared.depth <= batch.depth
        and not (interactive and job.priority == "bulk")
    ]
    rows = sum(map(WAITING_ROWS, joining))
    few = is_single_row(queue, batch.rows) and batch.rows + rows <= queue.few_rows
    if first.prepared.isolated or not joining or few:
        return []
    share = math.ceil((queue.running_rows + rows) / count_parallel(queue.key, device))
    limit = limit_rows(queue, [first, *joining], device)
    return slice_rows(queue, joining, min(limit, share, batch.padded_rows or limit), yielding_rows, batch.slices)


def choose_companions(queue: BatchQueue, shareable: Sequence[Job]) -> list[Job]:
    """The jobs that run with the first one, itself included: those of similar depth.

    A shared forward runs all its rows up to the deepest layer, but pays its fixed cost once. The sorted levels of depth
    are cut into the ranges whose forwards take least time in all.
    """
    job_levels = [math.ceil(job.prepared.depth * DEPTH_LEVELS) for job in shareable]
    levels = sorted(set(job_levels))
    rows = dict.fromkeys(levels, 0)
    for job, level in zip(shareable, job_levels, strict=True):
        rows[level] += job.waiting_rows
    rows_before = list(accumulate(rows.values(), initial=0))
    cuts: list[tuple[float, int]] = [(0.0, 0)]  # for the first n levels: seconds, and the start of the last range
    for stop, highest in enumerate(levels, 1):
        seconds = [
            cuts[start][0] + queue.estimate_seconds(rows_before[stop] - rows_before[start], highest / DEPTH_LEVELS)
            for start in range(stop)
        ]
        cuts.append(min(zip(seconds, range(stop), strict=True)))
    stop = len(levels)
    while levels[cuts[stop][1]] > job_levels[0]:
        stop = cuts[stop][1]
    lowest, highest = levels[cuts[stop][1]], levels[stop - 1]
    return [job for job, level in zip(shareable, job_levels, strict=True) if lowest <= level <= highest]


def choose_rows(queue: BatchQueue, companions: Sequence[Job], device: DeviceSlots, parallel: int) -> int:
    """How many rows the next forward should have, apart from the memory of captures."""
    rows: int = sum(map(WAITING_ROWS, companions))
    if rows == 1 or companions[0].prepared.isolated:
        return min(rows, queue.fitting_rows)
    if device.free == device.slots > 1 and rows <= queue.few_rows:
        return 1  # one after the other on all slots is quicker than in parallel
    share = math.ceil(rows / max(parallel, 1))
    if share < rows and queue.estimate_seconds(rows) < MIN_SPLIT_SPEEDUP * queue.estimate_seconds(share):
        share = rows  # the fixed cost of more forwards outweighs the gain
    share = max(share, MIN_PARALLEL_ROWS if queue.few_rows else 1)
    return min(share, limit_rows(queue, companions, device))


def limit_rows(queue: BatchQueue, jobs: Sequence[Job], device: DeviceSlots) -> int:
    """The most rows that a forward of these jobs should have.

    A single job is split evenly over as many forwards as keep all slots busy to the end, each of about as many rows as
    an efficient one: on two slots, with 4 rows in an efficient forward, 10 rows run as twice 5.
    """
    limit, total, parallel = queue.efficient_rows, jobs[0].rows, count_parallel(queue.key, device)
    if parallel == 1 or total <= limit or queue.padded_rows or len(set(jobs)) > 1:
        return limit
    forwards = parallel * max(round(total / (limit * parallel)), 1)
    waiting = jobs[0].waiting_rows
    left = max(forwards - round((total - waiting) * forwards / total), 1)
    return min(max(math.ceil(waiting / left), math.ceil(limit / 2)), queue.fitting_rows)


def count_parallel(key: BatchKey, device: DeviceSlots) -> int:
    """How many forwards of a key run in parallel on its devices, which are alike."""
    on_each = min(max(device.slots // key.slots, 1), key.replicas) if device.parallel else 1
    return on_each * len(key.devices)


def slice_rows(
    queue: BatchQueue, companions: Sequence[Job], rows: int, yielding_rows: float, taken: Sequence[RowSlice] = ()
) -> list[RowSlice]:
    """Slices of the jobs, in order, for a batch of so many rows that has ``taken`` some already.

    They fit into ``max_bytes``. A new batch has at least one row of the first job, all rows of an unsplittable one.
    Yielding jobs get at most ``yielding_rows`` by weight, unless the batch would have a single row.
    """
    slices: list[RowSlice] = []
    forward_bytes, free_bytes = queue.key.costs.row_bytes, queue.key.max_bytes
    free_rows, least = rows, MIN_PARALLEL_ROWS
    for each in taken:
        free_rows -= each.rows
        free_bytes -= each.rows * (forward_bytes + each.job.prepared.row_bytes)
        yielding_rows -= each.rows * queue.weigh(each.job)
        least -= each.rows
    for job in companions:
        count = min(job.waiting_rows, free_rows, free_bytes // max(forward_bytes + job.prepared.row_bytes, 1))
        if queue.yields(job):
            count = int(min(count, max(yielding_rows / queue.weigh(job), least)))
        if not taken and not slices:
            count = job.waiting_rows if job.prepared.unsplittable else max(count, 1)
        if count <= 0:
            break
        start = job.rows - job.waiting_rows
        slices.append(RowSlice(job, start, start + count))
        free_rows -= count
        if count < job.waiting_rows or free_rows <= 0:
            break  # later jobs do not pass the rest of this one
        free_bytes -= count * (forward_bytes + job.prepared.row_bytes)
        yielding_rows -= count * queue.weigh(job)
        least -= count
    return slices


def estimate_seconds(queue: BatchQueue, slices: Sequence[RowSlice], slots: int = 1) -> float:
    """The expected seconds of a batch: decoding, forward and captures."""
    rows, captured_seconds = sum(map(ROWS, slices)), 0.0
    for each in slices:
        captured_seconds += each.rows * each.job.prepared.captured_seconds
    seconds = queue.estimate_seconds(rows, max(map(JOB_DEPTH, slices)))
    if slots > 1 and is_single_row(queue, rows):
        seconds /= queue.key.costs.speedup
    return seconds + captured_seconds


def count_slots(queue: BatchQueue, rows: int, device: DeviceSlots) -> int:
    """The slots of a batch: all of them for a single row that gains by it, else the key's.

    They depend on the number of rows only: another number of threads gives other bits.
    """
    return device.slots if is_single_row(queue, rows) else min(queue.key.slots, device.slots)


def is_single_row(queue: BatchQueue, rows: int) -> bool:
    """Whether a forward of so many rows has a single row, and is quicker on all slots."""
    return queue.few_rows > 0 and (queue.padded_rows or rows) == 1


def find_batch_reason(slices: Sequence[RowSlice], left_out: int) -> BatchReason:
    """Why a batch has these rows; ``left_out``: how many jobs it leaves out because of their depth."""
    if slices[0].job.prepared.isolated:
        return "isolated"
    if left_out:
        return "sharing_costs"
    if len(slices) == 1:
        return "single"
    return "same_depth" if len(set(map(JOB_DEPTH, slices))) == 1 else "sharing_pays"
