"""At which of a forward's outputs an objective depends on their positions: found out by gradients, never by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.errors import LayertapError
from layertap.models.gradients.objectives import CLASS_OBJECTIVES
from layertap.models.interventions.resolve import ResolvedObjective
from layertap.models.selection.hook_points import HookPoint, Objective, Reduction
from layertap.models.selection.plan import Capture

PointInfo = tuple[HookPoint, TensorInfo]
TOGETHER, MOST = 16, 65  # outputs looked at in one backward, and in all: a block of a transformer returns 14 maps


def make_trial_objective(goal: ResolvedObjective) -> ResolvedObjective:
    """The goal to try in place of one: the same for all classes of a tensor, as noise may saturate some."""
    return replace(goal, objective=Objective()) if goal.objective.kind in CLASS_OBJECTIVES else goal


def find_last_sensitive(
    extractor: FeatureExtractor, forward: Callable[[], object], spots: Sequence[PointInfo], goal: ResolvedObjective
) -> PointInfo | None:
    """The first of some maps where the objective has a gradient at any position that is no prefix token's.

    ``spots`` begin with what is returned last; ``forward`` runs one row, and more than once. None where the first few
    have none, or where the model itself cuts the graph.
    """
    starts = range(1, min(len(spots), MOST), TOGETHER)
    for chunk in (spots[:1], *(spots[at : at + TOGETHER] for at in starts)):
        captures = [_extremes(*spot) for spot in chunk]
        share = RequestSlice(0, 1, frozenset(captures), objective=goal)
        try:
            found = extractor.extract_slices(forward, [share], 1).select(share)
        except LayertapError:
            return None
        for spot, capture in zip(chunk, captures, strict=True):
            if found[capture].values.any():
                return spot
    return None


def _extremes(point: HookPoint, leaf: TensorInfo) -> Capture:
    """The least and the greatest gradient at a map: both 0 where all are."""
    patches = tuple(range(leaf.prefix, leaf.shape[1])) if leaf.layout == "NTC" else None
    return Capture(replace(point, site="grad_output"), leaf, Reduction(tokens=patches, stats=("min", "max")))
