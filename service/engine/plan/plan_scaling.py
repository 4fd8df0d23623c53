"""About what a plan gives for rows of another shape than it was made for, before anything has run with that shape."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

from layertap.models.selection.plan import Plan, Result
from layertap.models.spec import Shapes

SMALL = 8  # pixels or tokens: what is no larger may have been made so from any size
GROWTH = 0.75  # of how much more a row holds: borders and rounding take some of it


def scale_plan(plan: Plan, shapes: Shapes, known: Shapes) -> Plan:
    """A plan for rows of another shape, meant low.

    Maps grow with the picture; what stays as it is, is pooled, or gives statistics, is left so. Of smaller rows
    whatever may shrink counts as a single number. Of several inputs the one that grew least counts: which layers see
    which is not known.
    """
    ratios = [prod(new) / prod(old) for new, old in zip(shapes, known, strict=True)]
    if min(ratios) < 1:
        return replace(plan, results=tuple(_shrink(result) for result in plan.results))
    ratio = min(ratios) * GROWTH
    return replace(plan, results=tuple(_grow(result, ratio) for result in plan.results)) if ratio > 1 else plan


def _shrink(result: Result) -> Result:
    return _with_shape(result, (1,) * len(result.capture.tensor.shape)) if _keeps_size(result) else result


def _grow(result: Result, ratio: float) -> Result:
    tensor, reduction = result.capture.tensor, result.capture.reduction
    axes = [axis for axis, letter in enumerate(tensor.layout or "") if letter in "HT" and tensor.shape[axis] > SMALL]
    if not _keeps_size(result) or reduction.tokens is not None or not axes:
        return result
    grown = axes[0]
    return _with_shape(
        result, tuple(math.ceil(size * ratio) if axis == grown else size for axis, size in enumerate(tensor.shape))
    )


def _keeps_size(result: Result) -> bool:
    """Whether a result is as large as what it is made of."""
    return result.capture.reduction.pool in ("none", "flatten") and result.capture.reduction.stats is None


def _with_shape(result: Result, shape: tuple[int, ...]) -> Result:
    return replace(result, capture=replace(result.capture, tensor=replace(result.capture.tensor, shape=shape)))
