"""Inputs whose interventions take tensors of other inputs of the request: their order, and the tensors to pass on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from math import prod

import torch

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import Fault, RequestError, SelectorError, escape
from layertap.models.plan.operations import compute_part_shape, take_part
from layertap.models.plan.plan import Capture, ResolvedIntervention, find_tensor
from layertap.models.run import fingerprint
from layertap.service.engine.batch import Job, Results


def plan_stages(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs of a request in stages: each stage runs together, after the jobs whose tensors it takes.

    RequestError if a source is left out, or sources form a cycle.
    """
    by_input = {job.input_index: job for job in jobs}
    sorter = TopologicalSorter[int | None]()
    for job in jobs:
        sources = _list_sources(job)
        for index in sources:
            if index not in by_input:
                raise _refuse(job, f"input {index}, which 'from' names, is not there, or was left out", "name another")
        sorter.add(job.input_index, *sources)
    stages = []
    try:
        sorter.prepare()
    except CycleError as error:
        job = by_input[error.args[1][0]]
        raise _refuse(job, "an input takes values 'from' itself, in the end", "take them from another input") from None
    while sorter.is_active():
        ready = sorter.get_ready()
        stages.append([job for index, job in by_input.items() if index in ready])
        sorter.done(*ready)
    return stages


def prepare_sources(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with extra captures for other jobs, and with digests that cover their sources' interventions."""
    in_order = [job for stage in plan_stages(jobs) for job in stage]
    by_input = {job.input_index: job for job in jobs}
    extra: dict[int | None, set[Capture]] = defaultdict(set)
    for job in jobs:
        for _, source, index in _list_taken(job):
            _check_shape(job, source, by_input[index])
            extra[index].add(source)
    changes: dict[int | None, str | None] = {}
    prepared: dict[int | None, Job] = {}
    for job in in_order:
        of_sources = [digest for index in _list_sources(job) if (digest := changes[index]) is not None]
        taken = extra[job.input_index]
        if taken:  # a tensor takes long to digest
            own = fingerprint.digest_changes(job.plan.resolved_interventions)
            of_changes = fingerprint.digest_variant(own or "", "sources", *of_sources) if of_sources else own
            changes[job.input_index] = of_changes
            job = job.with_plan(extra=frozenset(taken))
        if of_sources:
            fingerprints, spaces = (
                {key: fingerprint.digest_variant(each, "sources", *of_sources) for key, each in digests.items()}
                for digests in (job.prepared.fingerprints, job.prepared.spaces)
            )
            job = replace(job, prepared=replace(job.prepared, fingerprints=fingerprints, spaces=spaces))
        prepared[job.input_index] = job
    return [prepared[job.input_index] for job in jobs]


def count_taken_bytes(job: Job) -> int:
    """Bytes of the tensors that a job takes of other inputs, at least."""
    return sum(4 * prod(compute_part_shape(change.info, change.operation)) for change, _, _ in _list_taken(job))


def fill_tensors(job: Job, answers: Iterable[tuple[Job, Results]]) -> Job:
    """A job with the tensors it takes of others; RequestError if the numbers of tokens of two texts differ."""
    if not _list_sources(job):
        return job
    by_input = {source.input_index: (source, results) for source, results in answers}
    mask = job.token_mask

    def fill(change: ResolvedIntervention) -> ResolvedIntervention:
        if change.source is None or change.operation.source is None:
            return change
        source, results = by_input[change.operation.source.input]
        value = torch.tensor(results[change.source].values)
        changed = change.info if mask is None else change.info.with_length(int(mask.sum()))
        try:
            tensor = take_part(RowTensor(value, change.source.info, source.token_mask), change.operation, changed)
        except SelectorError as error:
            fault = error.to_fault(f"/inputs/{job.input_index}/interventions", job.input_index)
            raise RequestError.from_faults([fault]) from None
        return replace(change, operation=replace(change.operation, tensor=tensor, source=None), source=None)

    changes = tuple(tuple(fill(change) for change in each) for each in job.plan.interventions)
    return job.with_plan(interventions=changes)


def _check_shape(job: Job, source: Capture, taken: Job) -> None:
    """RequestError if two inputs of different shapes also differ in shape at the source's point."""
    if taken.prepared.catalog is job.prepared.catalog or not taken.prepared.catalog.sizes_known:
        return
    there, here = find_tensor(source.point, taken.prepared.catalog), source.info
    there = there.with_heads() if there is not None and here.heads_unfolded else there
    if there is None or there.shape != here.shape:
        shape = "nothing" if there is None else str(list(there.shape[1:]))
        name = escape(source.point.format_name())
        detail = (
            f"what {name} has of the input in 'from' is {shape}, and {list(here.shape[1:])} with this input's shape"
        )
        raise _refuse(job, detail, "take it from an input of the same shape")


def _list_taken(job: Job) -> list[tuple[ResolvedIntervention, Capture, int]]:
    """The changes that take a tensor of another input, with its capture there and the index of that input."""
    plan = job.prepared.spec.plan
    if not plan.interventions:
        return []
    return [
        (change, change.source, change.operation.source.input)
        for change in plan.resolved_interventions
        if change.source is not None and change.operation.source is not None
    ]


def _list_sources(job: Job) -> list[int]:
    """The indexes of the inputs whose tensors a job takes."""
    return sorted({index for _, _, index in _list_taken(job)})


def _refuse(job: Job, detail: str, hint: str) -> RequestError:
    return RequestError.from_faults([Fault(detail, hint, f"/inputs/{job.input_index}/interventions", job.input_index)])
