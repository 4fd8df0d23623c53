"""What the requests that share a forward want of each call of a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.hooks.sites import ATTENTION, GRADIENTS, Side
from layertap.models.hooks.tensor_tree import Path
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import Capture, ResolvedIntervention


@dataclass
class GradientAnchor:
    """Where a gradient is wanted, or changed."""

    point: HookPoint
    leaf: TensorInfo
    interventions: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)


@dataclass
class CallActions:
    """What is wanted of one call of a module, on one side; the order of fields is the order in which it is done.

    ``objectives`` are the places of the slices whose objectives look at it.
    """

    interventions: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)
    anchors: dict[Path, GradientAnchor] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    objectives: list[int] = field(default_factory=list)

    @property
    def point(self) -> HookPoint:
        """One of those where something is changed or differentiated."""
        return [*(anchor.point for anchor in self.anchors.values()), *(each.point for _, each in self.interventions)][0]


def group_actions(
    slices: Sequence[RequestSlice], captures: Iterable[Capture], modules: Mapping[str, nn.Module]
) -> Mapping[tuple[nn.Module, Side], Mapping[int, CallActions]]:
    """The actions by module and side, then by call."""
    groups: dict[tuple[nn.Module, Side], dict[int, CallActions]] = defaultdict(lambda: defaultdict(CallActions))
    changes = [change for request_slice in slices for change in request_slice.interventions]
    # Weights that are changed are seen where that is done, and nowhere else.
    unfused = {modules[change.point.layer] for change in changes if change.point.site in ATTENTION}

    def get_actions(point: HookPoint) -> CallActions:
        module = modules[point.layer]
        side: Side = "unfused" if point.side == "attention" and module in unfused else point.side
        return groups[module, side][point.call]

    def get_anchor(item: ResolvedIntervention | Capture) -> GradientAnchor:
        return get_actions(item.point).anchors.setdefault(item.point.path, GradientAnchor(item.point, item.tensor))

    captures = tuple(captures)
    for request_slice in slices:
        for change in request_slice.interventions:
            target = get_anchor(change) if change.point.site in GRADIENTS else get_actions(change.point)
            target.interventions.append((request_slice, change))
    for capture in captures:
        if capture.point.site in GRADIENTS:
            get_anchor(capture)
    for capture in captures:
        if capture.point.site not in GRADIENTS:
            get_actions(capture.point).captures.append(capture)
    for place, request_slice in enumerate(slices):
        if request_slice.objective is not None:
            get_actions(request_slice.objective.point).objectives.append(place)
    return groups
