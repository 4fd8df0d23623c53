"""The features of a job: named arrays with a receipt for each, and warnings about NaN, infinity and zero vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.errors import escape
from layertap.models.labels import name_classes
from layertap.models.plan.plan import Result
from layertap.models.plan.statistics import list_columns, merge_rows
from layertap.models.points import AXES, GRADIENTS, format_path
from layertap.service.engine.batch import Job, Results
from layertap.service.features import Array, Features, Receipt

MAX_NAMED = 8  # results named in a warning, limited by the size of a header
HALF_EXPONENT = 0x7C00  # all bits set: NaN or infinite


def collect_features(job: Job, results: Results) -> Features:
    """The features of a job from the results of its forwards; rows that are to be combined are not yet."""
    prepared, plan = job.prepared, job.prepared.spec.plan
    arrays: dict[str, Array] = {}
    scales: dict[str, Array] = {}
    for result in plan.results:
        whole = results[result.capture]
        reduction, values = result.capture.reduction, whole.values
        if reduction.over:
            values = merge_rows(values, list_columns(reduction.stats or (), reduction.edges))
        arrays[result.key] = values
        if whole.scale is not None:
            scales[result.key] = whole.scale
    return Features(
        model=prepared.key.name,
        fingerprint=prepared.fingerprint,
        rows=job.rows,
        arrays=arrays,
        scales=scales,
        receipts=_make_receipts(job, results),
        errors=job.faults,
        verified=prepared.spec.verified_by is not None,
        warnings=(*prepared.spec.plan.warnings, *job.warnings),
        interventions=prepared.changed,
        input_index=job.input_index,
        tokens=job.tokens,
        cut=job.cut if any(job.cut) else (),
    )


def _make_receipts(job: Job, results: Results) -> dict[str, Receipt]:
    """The receipt of each result; what does not depend on the values of rows is made once for all requests."""
    prepared, plan = job.prepared, job.prepared.spec.plan
    receipts = prepared.receipts.get(job.rows)
    if receipts is None:
        receipts = {result.key: make_receipt(job, result) for result in plan.results}
        prepared.receipts[job.rows] = receipts
    if plan.objective is None and prepared.mask is None and not job.cut:
        return receipts
    mask, cut = job.token_mask, job.cut if any(job.cut) else None
    classes = labels = None
    if plan.objective is not None and (classes := _find_classes(job, results)) is not None:
        labels = name_classes(prepared.labels, classes, plan.objective.point.layer)
    known: dict[str, Any] = {}
    if job.origins:
        origins = {
            "source_rates": tuple([each.rate for each in job.origins]),
            "source_frames": tuple([each.frames for each in job.origins]),
            "source_seconds": tuple([each.seconds for each in job.origins]),
        }
        known = {name: values for name, values in origins.items() if any(values)}
    token_counts = None if mask is None else tuple(mask.sum(1).tolist())  # without padding
    return {
        result.key: replace(
            receipts[result.key],
            classes=classes if result.capture.point.site in GRADIENTS else None,
            labels=labels if result.capture.point.site in GRADIENTS else None,
            token_counts=token_counts if result.capture.info.token_axes else None,
            truncated=cut,
            **known,
        )
        for result in plan.results
    }


def _find_classes(job: Job, results: Results) -> tuple[int, ...] | None:
    """The class of each row if the objective is its highest score, or the class that an input names; else None."""
    scores, objective = job.plan.scores, job.plan.objective
    if objective is not None and job.input_index is not None and isinstance(objective.objective.klass, int):
        return (objective.objective.klass,) * job.rows  # other inputs may name other classes
    if scores is None or objective is None:
        return None
    position = objective.objective.position
    captured = (0,) if position is not None and len(position) == 1 else position  # a single token is captured alone
    selected = RowTensor(torch.tensor(results[scores].values, dtype=torch.float32), objective.info).at(captured)
    values, mask = selected.value, job.token_mask
    if mask is not None and selected.info.token_axes:  # a class for each token, padding excluded
        classes = values.masked_fill(~mask, -math.inf).argmax(1, keepdim=True)
        return tuple((mask.cumsum(1).gather(1, classes)[:, 0] - 1).tolist())
    return tuple(values.argmax(1).tolist())


def make_receipt(job: Job, result: Result) -> Receipt:
    """The receipt of a result, without what depends on the values of rows: classes, tokens, what was truncated."""
    point, info, reduction = result.capture.point, result.capture.info, result.capture.reduction
    axis = result.capture.reply_rows_axis
    entries = 1 if axis is None else result.capture.reduced_info.entries_per_row
    return Receipt(
        layer=point.layer,
        call=point.call,
        module=result.module,
        function=point.function,
        site=point.site,
        path=format_path(point.path),
        layout=info.layout,
        captured=result.capture.unpadded.shape_for(job.rows),
        dtype=info.dtype,
        pool=reduction.pool,
        grid=reduction.grid,
        sample=reduction.sample,
        normalize=reduction.normalize,
        fingerprint=job.prepared.fingerprints[result.key],
        space=job.prepared.spaces.get(result.key, ""),
        row_axis=axis,
        entries_per_row=entries,
        row_order="forward"
        if axis is not None and (info.crosses_rows or (job.prepared.rows_per_forward == job.rows > 1 and entries > 1))
        else "",
        stats=list_columns(reduction.stats, reduction.edges) if reduction.stats is not None else None,
        by=reduction.by,
        over=reduction.over,
        edges=reduction.edges,
        combine=reduction.combine,
        how="unfused" if info.source and point.layer in job.plan.unfused_layers else info.source,
        resumed=job.prepared.catalog.start,
        input_shapes=resumption.shapes if (resumption := job.prepared.spec.resumption) is not None else None,
        forward="compiled" if job.prepared.spec.compiled else "",
        rows_per_forward=job.prepared.rows_per_forward,
        preprocessed=job.prepared.preprocessed,
        **{option: getattr(reduction, option) for option in AXES},
        reply_dtype=reduction.dtype,
        prefix_tokens=info.prefix,
        grid_size=info.grid_size,
        seconds_per_step=_find_step(job, info),
    )


def _find_step(job: Job, info: TensorInfo) -> float | None:
    """Seconds between two entries of a tensor's time axis, if it is known."""
    return next((job.prepared.steps.get(info.size(axis)) for axis in "TL" if info.has_axis(axis)), None)


def add_warnings(features: Features) -> Features:
    """Add a warning for each result with NaN, infinity or zero vectors: its key, how many, and what is wrong."""
    found = [
        f"{escape(key)}: {text}"
        for key, array in features.arrays.items()
        for text in _describe_numbers(array, features.scales.get(key), features.receipts[key])
    ]
    if not found:
        return features
    others = [f"{len(found) - MAX_NAMED} more warnings of such numbers"] if len(found) > MAX_NAMED else []
    return replace(features, warnings=(*features.warnings, *found[:MAX_NAMED], *others))


def find_tokens(features: Features) -> str | None:
    """The key of the tokens that were generated; None if they were not asked for."""
    wanted = ".", "[tokens]", "output"
    receipts = features.receipts.items()
    return next((key for key, each in receipts if (each.layer, each.path, each.site) == wanted), None)


def find_wrong_row(features: Features) -> tuple[int, str] | None:
    """The first row with bad numbers in a single result (rows, …), and what is wrong; None if there is none."""
    ((key, array),) = features.arrays.items()
    receipt = features.receipts[key]
    if not _describe_numbers(array, None, receipt):
        return None
    by_row = ((row, _describe_numbers(array[row : row + 1], None, receipt)) for row in range(len(array)))
    return next((row, texts[0]) for row, texts in by_row if texts)


def _describe_numbers(array: Array, scale: Array | None, receipt: Receipt) -> list[str]:
    """Descriptions of the bad numbers in a result."""
    nonfinite = _count_nonfinite(array)
    is_half = array.dtype == np.float16 or receipt.dtype == "float16"
    overflowing = int(np.count_nonzero(np.isinf(array))) if nonfinite and is_half else 0
    counts = {
        "numbers are NaN or infinite": nonfinite - overflowing,
        "numbers are infinite: float16 ends at 65504": overflowing,
        "scales are NaN: the values that they scale are not finite": 0 if scale is None else _count_nonfinite(scale),
        "vectors are all zeros: they have no length 1": _count_zero_vectors(array) if receipt.normalize else 0,
    }
    return [f"{count} {text}" for text, count in counts.items() if count]


def _count_nonfinite(array: Array) -> int:
    if array.dtype.kind != "f":
        return 0
    if array.dtype != np.float16:
        return array.size - int(np.count_nonzero(np.isfinite(array)))
    return int(np.count_nonzero((array.view(np.uint16) & HALF_EXPONENT) == HALF_EXPONENT))  # ten times as fast


def _count_zero_vectors(array: Array) -> int:
    if not array.size:
        return 0
    vectors = array.reshape(-1, array.shape[-1])
    may_be = vectors[:, 0] == 0
    return int(np.count_nonzero(~vectors[may_be].any(1))) if may_be.any() else 0
