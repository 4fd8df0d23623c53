"""Catalogs of generations: what a few steps show, of all their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.inputs.generation import FEW_STEPS, GENERATE

STEP_AXES: Mapping[tuple[str, ...], int] = {("tokens",): 1, ("logits",): 1, (GENERATE,): 2}  # of the root's tensors


def extend_catalog(few: Catalog, end: Catalog, steps: int) -> Catalog:
    """The catalog of ``steps`` steps, from one of FEW_STEPS for the same text.

    Sizes that grew from the second to the third step grow on. They stop at those of the last step of ``end``, the
    catalog of FEW_STEPS for a text that is longer by all other steps, because sliding windows fill up.
    """
    layers = {name: _extend(layer, end.layers[name], steps) for name, layer in few.layers.items()}
    calls = [call.output for layer in layers.values() if layer.name != "." for call in layer.calls]
    order, cost = (max([getattr(each, name) for each in calls], default=1.0) for name in ("order", "cost"))
    total = max(cost, 1e-6)  # in forwards of a few steps
    root = layers["."].calls[0]
    given, made = (
        replace(side, tensors=tuple(_resize(each, steps) for each in side.tensors))
        for side in (root.input, root.output)
    )
    layers["."] = replace(layers["."], calls=(replace(root, input=given, output=replace(made, order=order + 1)),))
    costs = few.costs
    row_bytes = max(costs.row_bytes, end.costs.row_bytes) + sum(info.nbytes for info in made.tensors)
    costs = replace(costs, base=costs.base * total, per_row=costs.per_row * total, row_bytes=row_bytes)
    return replace(few, layers=_scale(layers, total), seconds=few.seconds * total, costs=costs)


def _extend(layer: Layer, end: Layer, steps: int) -> Layer:
    """A layer that runs equally often in every step, in so many; another one is taken to run as often as it did."""
    count, rest = divmod(len(layer.calls), FEW_STEPS)
    if rest or len(end.calls) != len(layer.calls):
        return layer
    calls = list(layer.calls[: steps * count])
    for step in range(FEW_STEPS, steps):
        for number in range(count, 2 * count):
            one, two, last = layer.calls[number], layer.calls[number + count], end.calls[number + count]
            calls.append(_grow_call(one, two, last, step + 1 - FEW_STEPS))
    return replace(layer, calls=tuple(calls))


def _grow_call(one: Call, two: Call, last: Call, by: int) -> Call:
    """The call ``by`` calls after ``two``, before which ``one`` was."""
    befores, lasts = one.boundaries, last.boundaries
    grown: dict[str, Any] = {}
    for site, side in two.boundaries.items():
        before, most = befores[site], lasts[site]
        if side is not None and before is not None and most is not None:
            grown[site] = _grow(before, side, most, by)
    return replace(two, **grown)


def _grow(one: CallBoundary, two: CallBoundary, end: CallBoundary, by: int) -> CallBoundary:
    tensors = two.tensors
    if [each.shape for each in one.tensors] != [each.shape for each in tensors]:
        tensors = tuple(_grow_info(*each, by) for each in zip(one.tensors, tensors, end.tensors, strict=False))
    order, cost = (getattr(two, name) + by * (getattr(two, name) - getattr(one, name)) for name in ("order", "cost"))
    return replace(two, order=order, cost=cost, tensors=tensors)


def _grow_info(one: TensorInfo, two: TensorInfo, end: TensorInfo, by: int) -> TensorInfo:
    sizes = zip(one.shape, two.shape, end.shape, strict=False)
    return replace(two, shape=tuple(b if a == b else min(b + by * (b - a), most) for a, b, most in sizes))


def _resize(info: TensorInfo, steps: int) -> TensorInfo:
    axis = STEP_AXES.get(info.path)
    return info if axis is None else replace(info, shape=(*info.shape[:axis], steps, *info.shape[axis + 1 :]))


def _scale(layers: Mapping[str, Layer], total: float) -> dict[str, Layer]:
    """Layers with their costs as shares of a longer forward."""

    def scale(call: Call) -> Call:
        known = [(site, side) for site, side in call.boundaries.items() if side is not None]
        scaled: dict[str, Any] = {site: replace(side, cost=round(side.cost / total, 4)) for site, side in known}
        return replace(call, **scaled)

    return {name: replace(layer, calls=tuple(map(scale, layer.calls))) for name, layer in layers.items()}
