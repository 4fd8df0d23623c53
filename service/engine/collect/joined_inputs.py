"""The results of several jobs in one reply: one array where their shapes agree, else an array for each input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from layertap.models.errors import RequestError, escape
from layertap.models.plan.plan import Result, ResultSize
from layertap.models.plan.statistics import combine_rows, merge_rows
from layertap.models.points import AXES
from layertap.models.run.fingerprint import digest_reply
from layertap.service.engine.batch import Job
from layertap.service.engine.collect.results import make_receipt
from layertap.service.engine.limits import check_results, check_sizes
from layertap.service.engine.request import ReplyOptions
from layertap.service.features import Array, Features, Receipt, join_cuts

# Receipt fields that differ by input; all others agree in results that share one array.
BY_ROW = ("classes", "labels", "token_counts", "source_rates", "source_frames", "source_seconds")
OTHERWISE = {"call": -1, "preprocessed": "mixed", "forward": "", "how": "", "space": ""}
UNLIKE: dict[str, Any] = OTHERWISE | dict.fromkeys(
    ("grid_size", "rows_per_forward", "seconds_per_step", "input_shapes")
)  # if inputs differ
DIFFERING: dict[str, Any] = {"captured": (), "fingerprint": "", **UNLIKE, "truncated": None, **dict.fromkeys(BY_ROW)}
# What inputs' results must have in common for one array to hold them: shape, dtype, axes and receipt without DIFFERING.
Outline = tuple[tuple[int, ...], str, int, Receipt]
Entry = tuple[str, Result, int]  # a result in a reply: its name there, and its rows


def digest_jobs(jobs: Iterable[Job]) -> str:
    """The fingerprint of the whole reply to a request's jobs."""
    return digest_reply(digest for job in jobs for digest in job.prepared.fingerprints.values())


def list_entries(jobs: Sequence[Job]) -> list[Entry]:
    """The results in the reply to a request's jobs, in the order asked for."""
    if len(jobs) == 1:
        return [(result.key, result, jobs[0].rows) for result in jobs[0].prepared.spec.plan.results]
    plans = {id(job.plan): job for job in jobs}  # jobs with one plan have the same results
    results = {number: {result.key: result for result in job.plan.results} for number, job in plans.items()}
    outlines = [{each.key: _outline_result(job, each) for each in job.plan.results} for job in plans.values()]
    of_jobs = [(job, results[id(job.plan)]) for job in jobs]
    entries: list[Entry] = []
    for key, is_common in _find_common(outlines).items():
        if is_common:
            entries.append((key, of_jobs[0][1][key], len(jobs)))
        else:
            entries += [(f"{key}.input{job.input_index}", each[key], 1) for job, each in of_jobs if key in each]
    return entries


def count_bytes(result: Result, rows: int) -> int:
    """Bytes of a result in a reply."""
    return result.capture.nbytes(1 if result.capture.reduction.over else rows)


def _measure_entry(name: str, result: Result, rows: int) -> ResultSize:
    return result.measure(rows)._replace(key=name, nbytes=count_bytes(result, rows))


def check_entries(entries: Sequence[Entry], inputs: int, reply: ReplyOptions, max_results: int) -> None:
    """RequestError or TooLargeError, before any forward, if inputs of several shapes can't share a reply."""
    check_results(len(entries), max_results)
    names = set()
    for name, result, _ in entries:
        if name in names:
            raise RequestError(f"two results are called {escape(name)}", hint="give one another name by 'as'")
        names.add(name)
        if result.capture.reduction.over and name != result.key:
            raise RequestError(
                f"{escape(result.key)} has other channels for inputs of another shape, so that there are no "
                "statistics of all of them",
                hint="leave 'over' or 'by' out, or send one shape a request",
            )
    check_sizes([_measure_entry(*entry) for entry in entries], inputs, reply)


def join_inputs(parts: Sequence[Features]) -> Features:
    """The features of a request, joined from those of its jobs, with combined rows."""
    joined = _join_inputs(parts) if len(parts) > 1 else parts[0]
    combined = {
        key: combine_rows(joined.arrays[key], receipt.combine)
        for key, receipt in joined.receipts.items()
        if receipt.combine is not None
    }
    return replace(joined, arrays=joined.arrays | combined)


def _join_inputs(parts: Sequence[Features]) -> Features:
    first = parts[0]
    cut = join_cuts(parts)
    arrays, scales, receipts, by_input = dict[str, Array](), dict[str, Array](), dict[str, Receipt](), set[str]()
    for key, is_common in _find_common(map(_outline_features, parts)).items():
        if is_common:
            of_inputs = [part.receipts[key] for part in parts]
            arrays[key] = _join_arrays([part.arrays[key] for part in parts], of_inputs)
            receipts[key] = _join_receipts(of_inputs, cut)
            if key in first.scales:
                scales[key] = np.concatenate([part.scales[key] for part in parts])
            continue
        for part in parts:
            name = f"{key}.input{part.input_index}"
            if key in part.arrays:
                arrays[name], receipts[name] = part.arrays[key], part.receipts[key]
                by_input.add(name)
            if key in part.scales:
                scales[name] = part.scales[key]
    return replace(
        first,
        fingerprint=digest_reply(receipt.fingerprint for part in parts for receipt in part.receipts.values()),
        rows=sum(part.rows for part in parts),
        arrays=arrays,
        scales=scales,
        receipts=receipts,
        interventions=join_changes(part.interventions for part in parts),
        input_index=None,
        by_input=frozenset(by_input),
        tokens=sum(part.tokens for part in parts),
        cut=cut,
    )


def join_changes(changes: Iterable[tuple[tuple[str, ...], ...]]) -> tuple[tuple[str, ...], ...]:
    """What each intervention changes, over all inputs."""
    return tuple(tuple(dict.fromkeys(chain.from_iterable(each))) for each in zip(*changes, strict=True))


def _find_common(outlines: Iterable[Mapping[str, Outline]]) -> dict[str, bool]:
    """Each key, and whether one array holds the results of all inputs. Outlines are consumed lazily."""
    rest = iter(outlines)
    first = next(rest)
    common = {key: _has_rows(dtype, receipt) for key, (_, dtype, _, receipt) in first.items()}
    for each in rest:
        for key in dict.fromkeys((*common, *each)):
            common[key] = common.get(key, False) and each.get(key) == first[key]
    return common


def _has_rows(dtype: str, receipt: Receipt) -> bool:
    """Whether inputs have an axis instead of one shared result; int8 has scales along the first axis only."""
    axis = receipt.row_axis
    return bool(receipt.over or receipt.combine) or axis == 0 or (axis is not None and dtype != "int8")


def _outline_result(job: Job, result: Result) -> Outline:
    return _outline(result.capture.reply_shape(1), result.capture.dtype, make_receipt(job, result))


def _outline_features(features: Features) -> dict[str, Outline]:
    receipts = features.receipts
    return {key: _outline(array.shape, array.dtype.name, receipts[key]) for key, array in features.arrays.items()}


def _outline(shape: tuple[int, ...], dtype: str, receipt: Receipt) -> Outline:
    return shape, dtype, len(receipt.captured), replace(receipt, **DIFFERING)


def _join_arrays(arrays: Sequence[Array], receipts: Sequence[Receipt]) -> Array:
    first = receipts[0]
    if first.over is not None:
        return merge_rows(np.stack(arrays), first.stats or (), [_count_values(receipt) for receipt in receipts])
    return np.concatenate(arrays, first.row_axis or 0)


def _count_values(receipt: Receipt) -> int:
    """The weight of an input in merged statistics: its number of values, up to a factor equal for all inputs."""
    narrowed = {letter for option, letter in AXES.items() if vars(receipt)[option] is not None}
    letters = receipt.layout or " " * len(receipt.captured)
    return prod(size or 1 for letter, size in zip(letters, receipt.captured, strict=True) if letter not in narrowed)


def _join_receipts(receipts: Sequence[Receipt], cut: tuple[int, ...]) -> Receipt:
    first = receipts[0]
    fingerprints = tuple(receipt.fingerprint for receipt in receipts)
    sizes = zip(*(receipt.captured for receipt in receipts), strict=True)
    fields: dict[str, Any] = {}
    for name, unlike in UNLIKE.items():
        values = [getattr(receipt, name) for receipt in receipts]
        fields[name] = values[0] if len(set(values)) == 1 else unlike
    for name in BY_ROW:
        values = [getattr(receipt, name) for receipt in receipts]
        fields[name] = None if None in values else tuple(chain.from_iterable(values))
    return replace(
        first,
        captured=tuple(axis[0] if len(set(axis)) == 1 else None for axis in sizes),
        fingerprint=digest_reply(fingerprints),
        fingerprints=fingerprints if len(set(fingerprints)) > 1 else None,
        truncated=cut or None,
        **fields,
    )
