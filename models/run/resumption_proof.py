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

from layertap.models.catalog.call_recorder import NO_SKETCH, CallRecorder, Sketch
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog
from layertap.models.catalog.taint import Taint
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.hooks.attach import Modules, OnModuleCall, attach_tensors, observe_calls
from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor
from layertap.models.plan.plan import Tap, get_boundary, get_call
from layertap.models.points import ATTENTION, Point
from layertap.models.run.resumption import (
    Placeholder,
    Resumption,
    SkippedCalls,
    format_point,
    not_resumable_error,
)
from layertap.models.spec import InputSpec

SMALLEST = 1e-4  # the smallest share of a forward's cost that remains, after its last layer
CallNumbers = tuple[int | None, ...]  # for each call of a module in a resumed forward: its number if skipped, else None


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
    point, modules = start.point, Modules(module)
    skipped = find_skipped_calls(module, point, catalog)
    first = {name: value[:1].clone() for name, value in batch.items()}
    others = {name: value[1:2].clone() if catalog.crosses_rows else value[1:].clone() for name, value in batch.items()}
    taint, sent = Taint(), list[Tensor]()
    whole = CallRecorder(module)
    # What depends on what skipped calls return equals nothing.
    resumed = CallRecorder(module, look=lambda each: NO_SKETCH if taint.reaches(each) else Sketch.from_tensor(each))

    def run_tainted(batch: Inputs) -> object:
        taint.marked.mark(batch.values())
        with taint:
            return run(batch)

    try:
        with torch.no_grad():
            with ExitStack() as stack:
                attach_tensors(stack, modules, [point], lambda _, tensor: sent.append(tensor.clone()))
                whole.watch(run, others)
            placeholders = collect_placeholders(module, run, first, skipped, catalog)
            draft = Resumption(start, catalog, inputs, dtype, placeholders)
            with observe_calls(module, lambda *_: None, create_marker(taint, module, point, skipped)):
                resumed.watch(lambda batch: draft.forward(run_tainted, modules, batch["sent"]), {"sent": sent[-1]})
    except Exception as error:  # a model may raise anything on NaN: it can't resume
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    seen = resumed.tensors
    same = {key for key, each in whole.tensors.items() if key in seen and each.sketch.matches(seen[key].sketch)}
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
        values[name, call] = value, catalog.layers[name].calls[call].output.tensors

    with observe_calls(module, lambda *_: None, keep):
        run(batch)
    return {
        name: tuple(None if number is None else values[name, number] for number in calls)
        for name, calls in numbers.items()
    }


def create_marker(taint: Taint, module: nn.Module, point: Point, skipped: Mapping[str, CallNumbers]) -> OnModuleCall:
    """A callback that marks what a skipped call returns, all but the tensor that was sent, which ``point`` is."""
    calls = {module.get_submodule(name): numbers for name, numbers in skipped.items()}
    start = None if point.function else Modules(module)[point.layer]

    def mark(part: nn.Module, call: int, value: object) -> None:
        numbers = calls.get(part, ())
        if call < len(numbers) and numbers[call] is not None:
            sent = point.path if part is start and call == len(numbers) - 1 else None
            taint.marked.mark(tensor for path, tensor in iterate_tensors(value) if path != sent)

    return mark


def find_skipped_calls(module: nn.Module, point: Point, catalog: Catalog) -> dict[str, CallNumbers]:
    """The outermost modules that are skipped, and which of their calls; for the layer itself those up to the point.

    Hooks count calls as they run. A call that contains a call of a module that also runs later is not skipped, or
    the later calls would be miscounted. SelectorError if the layer's own call is such a call.
    """
    start = get_call(point, catalog)
    target = Modules(module)[point.layer]
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
    module: nn.Module, point: Point, catalog: Catalog, skipped: Mapping[str, CallNumbers], same: Set[Point]
) -> Catalog:
    """The catalog of the tensors that were the ``same`` in a whole forward and in a resumed one."""
    spent = get_boundary(point, catalog).cost
    rest = max(1.0 - spent, SMALLEST)
    modules = Modules(module)
    first = {name: modules.names[part] for name, part in modules.items()}
    skipped_calls = {(first[name or "."], number) for name, calls in skipped.items() for number in calls}
    boundaries: dict[Point, CallBoundary] = {}
    cut: set[tuple[str, int]] = set()  # calls of which something is left out: their attention is, too
    for key, boundary in catalog.boundaries.items():
        call = first[key.layer], key.call
        if key.site in ATTENTION and (call in cut or call in skipped_calls):
            continue
        tensors = tuple(info for info in boundary.tensors if Point(*call, info.path, key.site) in same)
        if key.site in ATTENTION:
            tensors = boundary.tensors
        elif len(tensors) < len(boundary.tensors):
            cut.add(call)
        cost = round(max(boundary.cost - spent, 0.0) / rest, 4)
        boundaries[key] = replace(boundary, cost=cost, tensors=tensors)
    return replace(
        catalog.with_boundaries(boundaries),
        seconds=catalog.seconds * rest,
        costs=replace(catalog.costs, base=catalog.costs.base * rest, per_row=catalog.costs.per_row * rest),
        start=format_point(point),
    )
