"""Verify that forwards can resume from a layer's output: once, before the first reply.

A whole forward is compared, tensor by tensor, with one that resumes from its layer's output. Between the two another
row runs, so that values which a module keeps from its last forward differ. Skipped modules return placeholders, with
the structure of that row's outputs and NaN as numbers. But a comparison hides a NaN, masks and integers have none, and
values may be equal by chance: so everything that is computed from placeholders is tracked too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer
from layertap.models.catalog.observations import Observation, Place
from layertap.models.catalog.taint import Taint
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.hooks.attach import attach_at, observe_calls
from layertap.models.hooks.tensor_tree import Path, iterate_tensors, replace_tensor
from layertap.models.plan.plan import Tap, get_boundary, get_call
from layertap.models.points import Point, Site
from layertap.models.run.resumption import (
    Placeholder,
    Resumption,
    SkippedCalls,
    format_point,
    locate,
    not_resumable_error,
)
from layertap.models.spec import InputSpec

SMALLEST = 1e-4  # the smallest share of a forward's cost that remains, after its last layer
CallNumbers = tuple[int | None, ...]  # for each call of a module in a resumed forward: its number if skipped, else None
UNKNOWN = -1  # numbers that are left out of a sketch: no sketch has so many, so that it matches none


def verify_resumable(
    module: nn.Module,
    start: Tap,
    catalog: Catalog,
    inputs: tuple[InputSpec, ...],
    run: Forward,
    batch: Inputs,
    dtype: torch.dtype,
) -> Resumption:
    """Forwards that resume from a point, verified with three forwards; SelectorError if the model can't resume there.

    ``run`` calls the module; ``batch`` has a few rows, floating ones in ``dtype``, of which the first is only used for
    the structure of outputs.
    Device errors, such as out of memory, are raised as they are: they do not mean that the model can't resume.
    """
    point = start.point
    skipped = find_skipped_calls(module, point, catalog)
    first = {name: value[:1].clone() for name, value in batch.items()}
    others = {name: value[1:2].clone() if catalog.crosses_rows else value[1:].clone() for name, value in batch.items()}
    whole, resumed, sent = CallRecorder(module), ResumedRecorder(module, point, skipped), list[Tensor]()

    def run_tainted(batch: Inputs) -> object:
        resumed.taint.marked.mark(batch.values())
        with resumed.taint:
            return run(batch)

    try:
        with torch.no_grad():
            with ExitStack() as stack:
                attach_at(stack, {point: locate(point, module)}, lambda _, tensor: sent.append(tensor.clone()))
                whole.watch(run, others)
            placeholders = collect_placeholders(module, run, first, skipped, catalog)
            draft = Resumption(start, catalog, inputs, dtype, placeholders)
            resumed.watch(lambda batch: draft.forward(run_tainted, module, batch["sent"]), {"sent": sent[-1]})
    except Exception as error:  # a model may raise anything on NaN: it can't resume
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    seen = resumed.list_sketches()
    same = {place for place, sketch in whole.list_sketches().items() if place in seen and sketch.matches(seen[place])}
    return replace(draft, catalog=build_catalog(module, point, catalog, skipped, same))


def collect_placeholders(
    module: nn.Module, run: Forward, batch: Inputs, numbers: Mapping[str, CallNumbers], catalog: Catalog
) -> dict[str, SkippedCalls]:
    """For each module, the structure of what its skipped calls return, without the numbers."""
    values: dict[tuple[str, int | None], Placeholder] = {}
    names = {module.get_submodule(name): name for name in numbers}

    def keep(part: nn.Module, call: int, value: object) -> None:
        name = names.get(part)
        if name is None or call not in numbers[name]:
            return
        for path, tensor in iterate_tensors(value):
            value = replace_tensor(value, path, torch.empty(0, dtype=tensor.dtype))
        values[name, call] = Placeholder(value, catalog.layers[name].calls[call].output.tensors)

    with observe_calls(module, lambda *_: None, keep):
        run(batch)
    return {
        name: tuple(None if number is None else values[name, number] for number in calls)
        for name, calls in numbers.items()
    }


class ResumedRecorder(CallRecorder):
    """Records a forward in which some calls are skipped; what depends on what these return equals nothing.

    Of a skipped call everything is unknown but the tensor that was sent, which ``point`` is.
    """

    def __init__(self, module: nn.Module, point: Point, skipped: Mapping[str, CallNumbers]) -> None:
        super().__init__(module)
        self.taint = Taint()
        self._point = point
        self._start = None if point.function else locate(point, module)[0]
        self._skipped = {module.get_submodule(name): calls for name, calls in skipped.items()}

    def _record_outputs(self, module: nn.Module, number: int, value: object) -> None:
        numbers = self._skipped.get(module, ())
        if number < len(numbers) and numbers[number] is not None:
            is_start = module is self._start and number == len(numbers) - 1
            sent = self._point.path if is_start else None
            self.taint.marked.mark(tensor for path, tensor in iterate_tensors(value) if path != sent)
        super()._record_outputs(module, number, value)

    def _observe(self, path: Path, tensor: Tensor, earlier: Observation | None) -> Observation:
        observation = super()._observe(path, tensor, earlier)
        if self.taint.reaches(tensor):
            observation.sketch = replace(observation.sketch, masked=UNKNOWN)
        return observation


def find_skipped_calls(module: nn.Module, point: Point, catalog: Catalog) -> dict[str, CallNumbers]:
    """The outermost modules that are skipped, and which of their calls; for the layer itself those up to the point.

    Hooks count calls as they run. A call that contains a call of a module that also runs later is not skipped, or
    the later calls would be miscounted. SelectorError if the layer's own call is such a call.
    """
    start = get_call(point, catalog)
    target = locate(point, module)[0]
    names = {part: name for name, part in module.named_modules()} | {target: point.layer}
    calls_of = {part: catalog.layers[name or "."].calls for part, name in names.items()}
    late = {target} | {part for part, calls in calls_of.items() if not all(_ends_before(call, start) for call in calls)}
    counted = [call for part in late for call in calls_of[part]]
    if any(map(start.contains, counted)):
        raise not_resumable_error(point)
    # A layer whose function is the point runs its own code; only its children may be skipped.
    skipped = {} if point.function else {target: calls_of[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = calls_of[child]
            if child not in late and calls and not any(call.contains(each) for call in calls for each in counted):
                skipped[child] = calls
            elif child is not target or point.function:
                walk(child)

    walk(module)
    spans = [call for calls in skipped.values() for call in calls if _ends_before(call, start) or call is start]
    return {
        names[part]: tuple(
            number if _ends_before(call, start) or call is start else None
            for number, call in enumerate(calls)
            if not any(span.contains(call) for span in spans)
        )
        for part, calls in skipped.items()
    }


def _ends_before(call: Call, start: Call) -> bool:
    """Whether a call ends before the layer's call begins, or is inside it."""
    return call.output.order < start.input.order or start.contains(call)


def build_catalog(
    module: nn.Module, point: Point, catalog: Catalog, skipped: Mapping[str, CallNumbers], same: Set[Place]
) -> Catalog:
    """The catalog of the tensors that were the ``same`` in a whole forward and in a resumed one."""
    spent = get_boundary(point, catalog).cost
    rest = max(1.0 - spent, SMALLEST)
    skipped_calls = {(module.get_submodule(name), number) for name, calls in skipped.items() for number in calls}

    def select(boundary: CallBoundary, call: tuple[nn.Module, int], side: Site) -> CallBoundary:
        tensors = tuple(info for info in boundary.tensors if ((*call, ""), side, info.path) in same)
        return replace(boundary, cost=round(max(boundary.cost - spent, 0.0) / rest, 4), tensors=tensors)

    def build_call(part: nn.Module, number: int, call: Call) -> Call:
        key = part, number
        before, after = select(call.input, key, "input"), select(call.output, key, "output")
        counts = [len(each.tensors) for each in (before, after)]
        is_whole = key not in skipped_calls and counts == [len(each.tensors) for each in (call.input, call.output)]
        weights, sinks = (
            replace(each, cost=after.cost) if each and is_whole else None for each in (call.attention, call.sinks)
        )
        return Call(before, after, weights, sinks=sinks)

    def build_layer(layer: Layer) -> Layer:
        part = module.get_submodule("" if layer.name == "." else layer.name)
        return replace(layer, calls=tuple(build_call(part, *pair) for pair in enumerate(layer.calls)))

    return replace(
        catalog,
        layers={name: build_layer(layer) for name, layer in catalog.layers.items()},
        seconds=catalog.seconds * rest,
        costs=replace(catalog.costs, base=catalog.costs.base * rest, per_row=catalog.costs.per_row * rest),
        start=format_point(point),
        has_functions=False,
    )
