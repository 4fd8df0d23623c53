"""Gradients of one forward: anchors in its graph, the sum that is differentiated, what each anchor gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.devices.memory import is_device_error
from layertap.models.errors import InputError
from layertap.models.gradients.objectives import OBJECTIVES
from layertap.models.hooks.attach import ATTACH, Location, StopForward, attach_at
from layertap.models.hooks.running_calls import Changes
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.selection.hook_points import HookPoint, Objective


class GradientAnchors:
    """The anchors and the objective of one forward.

    An anchor stands where a value left a module, or came to it; what goes on is a copy, so that operations in place
    write to memory of their own, and whoever else uses the value adds nothing to its gradient.
    """

    def __init__(self) -> None:
        self._anchors: dict[Location, Tensor] = {}
        self._changed: list[Tensor] = []  # the successors whose gradients are changed first
        self._totals: dict[HookPoint, Tensor] = {}

    def anchor(self, key: Location, value: Tensor, changes: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Keep a value as an anchor; what is returned goes on in its place.

        ``changes`` are made to its gradient, the last one first.
        """
        # Where nothing before it is differentiated the graph begins here: weights are frozen, inputs may be integers.
        anchor = value.clone() if value.requires_grad else value.detach().clone().requires_grad_()
        self._anchors[key] = anchor
        changed, successor = None, anchor.clone()
        for change in changes:
            # Not on the anchor: whether autograd looks at a tensor before or after its own hooks is its affair.
            successor.register_hook(change)  # type: ignore[no-untyped-call]
            changed, successor = successor, successor.clone()
        if changed is not None:
            self._changed.append(changed)
        return successor

    def add(self, point: HookPoint, objective: Tensor) -> None:
        """Differentiate an objective that looks at a point, too."""
        self._totals[point] = self._totals[point] + objective if point in self._totals else objective

    def reaches(self, point: HookPoint, anchors: Collection[Location]) -> bool:
        """Whether a graph leads from what was differentiated at a point to the earliest call that is anchored so."""
        first = next(key for key in self._anchors if key in anchors)[:3]
        ends = {get_gradient_edge(anchor).node for key, anchor in self._anchors.items() if key[:3] == first}
        return not ends.isdisjoint(_collect_nodes(self._totals[point]))

    def compute_gradients(self) -> Mapping[Location, Tensor]:
        """The gradient at each anchor: zero, changed too, where the objective does not depend on it. Ends the graph.

        InputError if the model computes what has no derivative.
        """
        anchors = list(self._anchors.values())
        totals = [total for total in self._totals.values() if total.requires_grad]
        # Autograd calls no hook where no gradient arrives: it would depend on the rows beside whether a change is made.
        seeds = [None] * len(totals) + [torch.zeros_like(changed) for changed in self._changed]
        if not seeds:
            return {key: torch.zeros_like(anchor) for key, anchor in self._anchors.items()}
        try:
            gradients = torch.autograd.grad([*totals, *self._changed], anchors, seeds, allow_unused=True)
        except RuntimeError as error:
            if is_device_error(error):
                raise
            raise InputError(
                f"the model can't be differentiated there ({type(error).__name__})",
                hint="ask for a gradient nearer to the objective",
            ) from error
        return {
            key: torch.zeros_like(anchor) if gradient is None else gradient.detach()
            for (key, anchor), gradient in zip(self._anchors.items(), gradients, strict=True)
        }


def compute_objective(rows: RowTensor, objective: Objective) -> Tensor:
    """The sum of an objective over a request's rows, in float32 or wider; each row's is that of it without padding."""
    sums = [each.sum() for each in _compute_parts(rows, objective)]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def compute_objectives(rows: RowTensor, objective: Objective) -> Tensor:
    """An objective of each of a request's rows, (rows,), in float32 or wider, of each without padding."""
    parts = [each.flatten() for each in _compute_parts(rows, objective)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _compute_parts(rows: RowTensor, objective: Objective) -> list[Tensor]:
    rows = replace(rows, value=to_floating(rows.value))
    parts = rows.strip() if rows.is_padded else (rows,)
    return [OBJECTIVES[objective.kind].compute(each.at(objective.position), objective) for each in parts]


def _collect_nodes(end: Tensor) -> set[Any]:
    """Every operation that a tensor depends on."""
    nodes: set[Any] = set()
    pending: list[Any] = [end.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [before for before, _ in node.next_functions]
    return nodes


def find_unreachable(
    forward: Callable[[], object], modules: Mapping[str, nn.Module], points: Collection[HookPoint]
) -> list[HookPoint]:
    """Those of some outputs that no graph leads to, though one began at the model's input, or where it looks up tables.

    Runs a forward up to the last of them, with a graph, where there are any. The list is empty if no graph could
    begin; it names all of them where the forward does not run with one.
    """
    if not points:
        return []
    graph_began = False
    reached: dict[HookPoint, bool] = {}

    def begin_graph(call: int, value: object) -> Changes:
        nonlocal graph_began
        # In a mode of the model's own nothing would come of it.
        tensors = dict(iterate_tensors(value)) if torch.is_grad_enabled() else {}
        changes = {
            path: tensor.detach().clone().requires_grad_().clone()
            for path, tensor in tensors.items()
            if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        }
        graph_began = graph_began or bool(changes)
        return changes

    def check_point(point: HookPoint, tensor: Tensor) -> None:
        reached[point] = tensor.requires_grad
        if len(reached) == len(points):
            raise StopForward

    with ExitStack() as stack:
        ATTACH["input"](stack, modules["."], begin_graph)
        for table in {part for part in modules.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}:
            ATTACH["output"](stack, table, begin_graph)
        attach_at(stack, {point: point.locate(modules) for point in points}, check_point)
        try:
            with suppress(StopForward), torch.enable_grad():
                forward()
        except RuntimeError as error:
            if is_device_error(error):
                raise
            return list(points)  # what can't be computed with a graph is computed without one
    return [point for point, is_reached in reached.items() if graph_began and not is_reached]
