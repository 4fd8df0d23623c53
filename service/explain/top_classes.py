"""The best classes of each row, of scores that are captured beside what a request asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layertap.models.errors import LayertapError
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.labels import Labels
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import HookPoint, Objective, Selector
from layertap.service.features import Array, Features, TopClass

SCORES = "class-scores"  # no name that a method has


def find_scores(model: ModelInfo) -> Selector | None:
    """What captures a model's scores of classes; None where it gives none, one for each row."""
    try:
        point = resolve_objective(Objective(), model.catalog).point
    except LayertapError:
        return None
    return make_selector(point, SCORES)


def make_selector(point: HookPoint, alias: str) -> Selector:
    """What names a point and nothing else."""
    return Selector(point.text, point.layer, point.call, point.path, point.site, alias=alias)


def take_top_classes(features: Features, count: int, labels: Labels | None) -> Features:
    """Features with the best classes of each row in place of the scores; as they are where these were not captured."""
    if SCORES not in features.arrays:
        return features
    arrays, receipts = dict(features.arrays), dict(features.receipts)
    scores = arrays.pop(SCORES)
    del receipts[SCORES]
    best = tuple(_find_best(row, count, labels) for row in scores.reshape(len(scores), -1)) if scores.ndim < 3 else ()
    return replace(features, arrays=arrays, receipts=receipts, top_classes=best)


def _find_best(scores: Array, count: int, labels: Labels | None) -> tuple[TopClass, ...]:
    exact = scores.astype(np.float64)
    powers = np.exp(exact - exact.max())
    shares: list[float | None] = (powers / powers.sum()).tolist() if len(scores) > 1 else [None]
    named = labels.names if labels is not None and len(labels.names) == len(scores) else None
    best = np.argsort(-exact, kind="stable")[:count].tolist()
    return tuple(
        TopClass(number, float(exact[number]), shares[number], named[number] if named else None) for number in best
    )
