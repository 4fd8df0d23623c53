"""A batch and the jobs whose rows it has: made ready for a forward, and counted once it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from layertap.service.engine.execute.forward_batch import BatchFailures, ForwardBatch, ForwardSlice
from layertap.service.engine.request import Job
from layertap.service.engine.schedule.batch import Batch, QueuedRequest
from layertap.service.metrics import Metrics

EARLY_S = 0.05  # an event loop counts from where its turn began, in milliseconds: its timers may end so much too soon
Jobs = Mapping[QueuedRequest, Job]


@dataclass
class RunningBatch:
    """A batch that has begun, and the jobs whose rows it has; both grow until its forward begins."""

    batch: Batch
    jobs: dict[QueuedRequest, Job]


def make_forward_batch(batch: Batch, jobs: Jobs, first: int = 0) -> ForwardBatch:
    """The batch as a forward takes it, from its ``first`` slice on; a place is that of a request among the jobs."""
    places = {request: place for place, request in enumerate(jobs)}
    slices = []
    for each in batch.slices[first:]:
        job = jobs[each.request]
        inputs = {name: value[each.start : each.stop] for name, value in job.inputs.items()}
        encoded = job.encoded[each.start : each.stop]
        place = places[each.request]
        slices.append(ForwardSlice(place, each.start, each.stop, inputs, job.spec, job.joined, encoded, job.first_row))
    unsplittable = batch.slices[0].request.unsplittable
    deadline = max(request.deadline for request in jobs)
    return ForwardBatch(tuple(slices), batch.slots, batch.slots_alone, batch.padded_rows, unsplittable, deadline)


def record_batch(metrics: Metrics, batch: Batch, failures: BatchFailures, seconds: float) -> None:
    """Count a batch, which took so long, and what went wrong in it."""
    model = batch.key.name
    requests = len({each.request for each in batch.slices})
    max_rows, depth = max(batch.key.max_rows, batch.rows), min(batch.depth, 1.0)
    metrics.observe_batch(model, batch.rows, max_rows, requests, depth, seconds, batch.reason)
    metrics.add_busy_seconds(model, batch.device, seconds * batch.slots)
    for _ in range(failures.out_of_memory):
        metrics.count_out_of_memory(model)
    for _ in range(failures.memory_splits):
        metrics.count_split(model, "memory")
    for _ in range(failures.error_splits):
        metrics.count_split(model, "error")


def record_unserved(metrics: Metrics, queued: QueuedRequest) -> None:
    """Count a request that never came to a forward."""
    late = time.monotonic() >= queued.deadline - EARLY_S
    (metrics.count_expired if late else metrics.count_cancelled)(queued.key.name)
