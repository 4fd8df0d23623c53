"""Which of a forward's outputs an objective depends on position by position: found by gradients, never by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.errors import LayertapError
from layertap.models.gradients.objectives import OBJECTIVES
from layertap.models.selection.hook_points import Objective, Reduction
from layertap.models.selection.plan import Capture, ResolvedObjective, Tap

MAX_TOGETHER = 16  # maps that one backward looks at
MAX_MAPS = 65  # maps looked at in all: a block of a transformer returns 14


def make_trial_objective(objective: ResolvedObjective) -> ResolvedObjective:
    """The objective to try in place of one: the same for all classes of a tensor, as noise may saturate some."""
    of_classes = OBJECTIVES[objective.objective.kind].of_classes
    return replace(objective, objective=Objective(position=objective.objective.position)) if of_classes else objective


def find_last_sensitive(
    extractor: FeatureExtractor,
    forward: Callable[[], object],
    maps: Sequence[Tap],
    objective: ResolvedObjective,
) -> Tap | None:
    """The first of some maps where the objective has a gradient at any position that is no prefix token's.

    ``maps`` begin with what is returned last; ``forward`` runs one row, and more than once. None where the first few
    have none, or where the model itself cuts the graph.
    """
    starts = range(1, min(len(maps), MAX_MAPS), MAX_TOGETHER)
    for chunk in (maps[:1], *(maps[start : start + MAX_TOGETHER] for start in starts)):
        captures = [_capture_extremes(each) for each in chunk]
        request_slice = RequestSlice(0, 1, frozenset(captures), objective=objective)
        try:
            gradients = extractor.extract_slices(forward, [request_slice], 1).select(request_slice)
        except LayertapError:
            return None
        for tap, capture in zip(chunk, captures, strict=True):
            if gradients[capture].values.any():
                return tap
    return None


def _capture_extremes(tap: Tap) -> Capture:
    """The least and the greatest gradient at a map: both 0 where all are."""
    patches = tuple(range(tap.info.prefix, tap.info.shape[1])) if tap.info.layout == "NTC" else None
    return Capture(replace(tap.point, site="grad_output"), tap.info, Reduction(tokens=patches, stats=("min", "max")))
