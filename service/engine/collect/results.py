"""What forwards gave, as named arrays with a receipt for each."""

from __future__ import annotations

import math

from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.gradients.position import describe_position, select_position
from layertap.models.hooks.sites import GRADIENTS
from layertap.models.labels import name_classes
from layertap.models.selection.hook_points import format_path
from layertap.models.selection.plan import ResolvedObjective, Result
from layertap.models.selection.statistics import list_columns, merge_rows
from layertap.service.engine.execute.forward_batch import Results
from layertap.service.engine.request import Job
from layertap.service.features import Array, Features, Receipt


def collect_features(job: Job, results: Results) -> Features:
    """The features of a job, of what its forwards gave."""
    arrays: dict[str, Array] = {}
    scales: dict[str, Array] = {}
    for result in job.spec.plan.results:
        whole = results[result.capture]
        reduction, values = result.capture.reduction, whole.values.numpy()
        arrays[result.key] = merge_rows(values, reduction.stats or ()) if reduction.over else values
        if whole.scale is not None:
            scales[result.key] = whole.scale.numpy()
    classes = _find_classes(job, results)
    return Features(
        model=job.model,
        fingerprint=job.fingerprint,
        rows=job.rows,
        arrays=arrays,
        scales=scales,
        receipts={result.key: make_receipt(job, result, classes) for result in job.spec.plan.results},
        errors=job.faults,
        verified=job.spec.verified_by is not None,
        warnings=(*job.spec.plan.warnings, *_warn_of_cuts(job)),
        interventions=job.changed,
        place=job.place,
        tokens=job.tokens,
    )


def _warn_of_cuts(job: Job) -> tuple[str, ...]:
    """That rows may be the beginnings of texts: those that have just as many tokens as texts are cut to."""
    counts = _count_tokens(job) or () if job.cut_to is not None else ()
    if job.cut_to not in counts:
        return ()
    return (f"a text has {job.cut_to} tokens, to which longer ones are cut as sentence-transformers cuts them",)


def _find_classes(job: Job, results: Results) -> tuple[int, ...] | None:
    """The class of each row's highest score, where that is what is differentiated, or that of an input's own."""
    scores, objective = job.spec.plan.scores, job.spec.plan.objective
    if objective is not None and job.place is not None and isinstance(objective.objective.klass, int):
        return (objective.objective.klass,) * job.rows  # those of other inputs may be others
    if scores is None or objective is None:
        return None
    values, leaf = _select_scores(results[scores].values.float(), objective)
    mask = job.inputs.get(job.mask) if job.mask else None
    if mask is not None and leaf.token_axes:  # a class for each token: what pads a text is none
        classes = values.masked_fill(~mask.bool(), -math.inf).argmax(1, keepdim=True)
        return tuple((mask.bool().cumsum(1).gather(1, classes)[:, 0] - 1).tolist())
    return tuple(values.argmax(1).tolist())


def _select_scores(values: Tensor, objective: ResolvedObjective) -> tuple[Tensor, TensorInfo]:
    """Scores where an objective looks: of tokens that one alone was captured."""
    position = objective.objective.position
    captured = (0,) if position is not None and len(position) == 1 else position
    return select_position(values, objective.tensor, captured), describe_position(objective.tensor, position)


def _count_tokens(job: Job) -> tuple[int, ...] | None:
    """How many tokens each row has of its own; None where nothing tells them from padding."""
    mask = job.inputs.get(job.mask) if job.mask else None
    return None if mask is None else tuple(mask.bool().sum(1).tolist())


def make_receipt(job: Job, result: Result, classes: tuple[int, ...] | None = None) -> Receipt:
    """Where a result comes from, as far as that is known; ``classes`` are those of its rows' highest scores."""
    point, leaf, reduction = result.capture.point, result.capture.tensor, result.capture.reduction
    classes = classes if point.site in GRADIENTS else None
    function, site, path = point.place
    axis = result.capture.reply_rows_axis
    entries = 1 if reduction.is_by_row or axis is None else result.capture.unpadded.entries_per_row
    return Receipt(
        layer=point.layer,
        call=point.call,
        module=result.module,
        function=function,
        site=site,
        path=format_path(path),
        layout=leaf.layout,
        captured=result.capture.unpadded.shape_for(job.rows),
        dtype=leaf.dtype,
        pool=reduction.pool,
        normalize=reduction.normalize,
        fingerprint=job.fingerprints[result.key],
        row_axis=axis,
        entries_per_row=entries,
        row_order="forward" if axis is not None and (leaf.mixed or (job.single_forward and entries > 1)) else "",
        stats=list_columns(reduction.stats) if reduction.stats is not None else None,
        by=reduction.by,
        over=reduction.over,
        how="unfused" if leaf.source and point.layer in job.spec.plan.unfused_layers else leaf.source,
        resumed=job.catalog.start,
        forward="compiled" if job.spec.compiled else "",
        classes=classes,
        token_counts=_count_tokens(job) if leaf.token_axes else None,
        labels=name_classes(job.labels, classes) if classes is not None else None,
        rows_per_forward=job.rows_per_forward,
        preprocessed=job.preprocessed,
        channels=reduction.channels,
        tokens=reduction.tokens,
        heads=reduction.heads,
        queries=reduction.queries,
        keys=reduction.keys,
        reply_dtype=reduction.dtype,
        prefix_tokens=leaf.prefix,
        grid_size=leaf.grid_size,
    )
