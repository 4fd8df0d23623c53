"""Gradients of one forward: anchors in its graph, and the gradient of the objectives at each anchor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from layertap.models.devices.memory import is_device_error
from layertap.models.errors import InputError, find_own_line
from layertap.models.hooks.attach import Modules, StopForward, attach_tensors, attach_values
from layertap.models.hooks.running_calls import Changes, run_own
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.points import Point


class GradientAnchors:
    """The anchors and the objective of one forward.

    An anchor is a module's input or output. The forward goes on with a copy of it, so that in-place operations do not
    overwrite the anchor, and other uses of the value add nothing to its gradient.
    """

    def __init__(self) -> None:
        self._anchors: dict[Point, Tensor] = {}
        self._changed: list[Tensor] = []  # the successors whose gradients are changed first
        self._totals: dict[Point, Tensor] = {}

    def anchor(self, key: Point, value: Tensor, changes: Iterable[Callable[[Tensor], Tensor]]) -> Tensor:
        """Keep a value as an anchor and return the copy that replaces it in the forward.

        ``changes`` are applied to its gradient, the last one first.
        """
        # If nothing before it requires grad the graph begins here: weights are frozen, inputs may be integers.
        anchor = value.clone() if value.requires_grad else value.detach().clone().requires_grad_()
        self._anchors[key] = anchor
        changed, successor = None, anchor.clone()
        for change in changes:
            # Not on the anchor: autograd does not promise to read a tensor's gradient after the tensor's own hooks.
            successor.register_hook(partial(run_own, change))  # type: ignore[no-untyped-call]
            changed, successor = successor, successor.clone()
        if changed is not None:
            self._changed.append(changed)
        return successor

    def anchor_weights(self, stack: ExitStack, modules: Modules, points: Collection[Point]) -> None:
        """Anchor parameters: until the stack ends, aliases that require grad take their places in the whole tree.

        The parameters themselves stay as they are: other replicas, and other processes, read them too.
        """
        aliases: dict[int, nn.Parameter] = {}
        for point in points:
            *inside, name = point.path[0].split(".")
            owner = modules[".".join(filter(None, [point.layer.removeprefix("."), *inside])) or "."]
            parameter = owner._parameters[name]
            if parameter is not None:
                self._anchors[point] = aliases.setdefault(id(parameter), nn.Parameter(parameter.detach()))
        for part in modules.names if aliases else ():
            for name, parameter in [*part._parameters.items()]:
                if (alias := aliases.get(id(parameter))) is not None:
                    stack.callback(part._parameters.__setitem__, name, parameter)
                    part._parameters[name] = alias

    def add(self, point: Point, objective: Tensor) -> None:
        """Add an objective that is computed from a point's tensor."""
        self._totals[point] = self._totals[point] + objective if point in self._totals else objective

    def reaches(self, point: Point, anchors: Collection[Point]) -> bool:
        """Whether the objective at a point depends on the earliest anchored call among ``anchors``."""
        first = next(key for key in self._anchors if key in anchors)
        beside = [anchor for key, anchor in self._anchors.items() if replace(key, path=first.path) == first]
        ends = {get_gradient_edge(anchor).node for anchor in beside}
        return not ends.isdisjoint(_collect_nodes(self._totals[point]))

    def compute_gradients(self) -> Mapping[Point, Tensor]:
        """The gradient at each anchor; frees the graph. InputError if the model can't be differentiated.

        If the objective does not depend on an anchor, its gradient is zero with the changes applied. Of a weight this
        is an error: it may be read from elsewhere than its module, or behind the model's own ``detach``.
        """
        anchors = list(self._anchors.values())
        totals = [total for total in self._totals.values() if total.requires_grad]
        # Autograd calls no hook without a gradient: whether a change is applied would depend on the rest of the batch.
        seeds = [None] * len(totals) + [torch.zeros_like(changed) for changed in self._changed]
        gradients: Sequence[Tensor | None] = [None] * len(anchors)
        try:
            if seeds:
                gradients = torch.autograd.grad([*totals, *self._changed], anchors, seeds, allow_unused=True)
        except RuntimeError as error:
            if is_device_error(error) or find_own_line(error) is not None:  # of a backward of the model's own
                raise
            raise InputError(
                f"the model can't be differentiated there ({type(error).__name__})",
                hint="ask for a gradient nearer to the objective",
            ) from error
        found = dict(zip(self._anchors, gradients, strict=True))
        if unused := [key for key in found if found[key] is None and key.site == "grad_weight"]:
            why = "the objective does not depend on it, or the model reads it elsewhere than in its module"
            detail = f"no gradient reaches {unused[0].escaped_text}: {why}"
            raise InputError(detail, hint="leave it out", points=dict.fromkeys(unused, "has no gradient"))
        return {
            key: torch.zeros_like(self._anchors[key]) if gradient is None else gradient.detach()
            for key, gradient in found.items()
        }


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


def find_unreachable(forward: Callable[[], object], modules: Modules, points: Collection[Point]) -> list[Point]:
    """The points that no autograd graph reaches that begins at the model's input or its embedding tables.

    Runs the forward with grad enabled, up to the last point; without points it runs nothing. Empty if no graph could
    begin, all points if the forward fails with grad enabled.
    """
    if not points:
        return []
    graph_began = False
    reached: dict[Point, bool] = {}

    def begin_graph(call: Point, value: object) -> Changes:
        nonlocal graph_began
        # Inside the model's own no_grad a graph would not begin.
        tensors = dict(iterate_tensors(value)) if torch.is_grad_enabled() else {}
        changes = {
            path: tensor.detach().clone().requires_grad_().clone()
            for path, tensor in tensors.items()
            if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        }
        graph_began = graph_began or bool(changes)
        return changes

    def check_point(point: Point, tensor: Tensor) -> None:
        reached[point] = tensor.requires_grad
        if len(reached) == len(points):
            raise StopForward

    with ExitStack() as stack:
        tables = [name for name, part in modules.items() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        starts = [Point(".", 0, (), "input"), *(modules.locate(Point(name, 0, (), "output")) for name in tables)]
        attach_values(stack, modules, starts, begin_graph)
        attach_tensors(stack, modules, points, check_point)
        try:
            with suppress(StopForward), torch.enable_grad():
                forward()
        except RuntimeError as error:
            if is_device_error(error):
                raise
            return list(points)  # the forward only runs without a graph
    return [point for point, is_reached in reached.items() if graph_began and not is_reached]
