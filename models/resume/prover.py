"""Whether forwards can go on from a layer's output: tried once, before anybody gets an answer.

A whole forward is compared with one that goes on from what left the layer in it, tensor by tensor. The modules that
are skipped in the second one were seen with another row: whatever of theirs comes through makes a difference. So does
what a module kept of its last forward: that was the other row's. A comparison hides a NaN, masks and whole numbers have
none, and all of these may happen to be the same in both forwards: what is computed from placeholders is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer
from layertap.models.devices.memory import is_device_error
from layertap.models.hooks.tensor_tree import Path
from layertap.models.module_state import ModuleState
from layertap.models.resume.recorders import (
    CallBoundaryKey,
    CallNumbers,
    MarkRecorder,
    PlaceholderRecorder,
    ResumedMarkRecorder,
    TensorMarks,
    find_skipped_calls,
)
from layertap.models.resume.resumption import Forward, Inputs, Resumption, format_point, not_resumable_error
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import Tap
from layertap.models.spec import InputSpec


def verify_resumable(
    module: nn.Module,
    start: Tap,
    catalog: Catalog,
    inputs: tuple[InputSpec, ...],
    run: Forward,
    rows: Inputs,
    dtype: torch.dtype,
) -> Resumption:
    """Forwards that go on from a point, after a trial of three; SelectorError where the model has none.

    ``rows`` are a few, in ``dtype`` where they are floating. Of the first one only structures are kept. What a device
    raises for want of memory, or for good, goes through: it says nothing of the model.
    """
    point = start.point
    skipped = find_skipped_calls(module, point, catalog)
    first = {name: value[:1].clone() for name, value in rows.items()}
    others = {name: value[1:2].clone() if catalog.crosses_rows else value[1:].clone() for name, value in rows.items()}
    before = ModuleState(module)
    whole, resumed = MarkRecorder(module, point), ResumedMarkRecorder(module, point, skipped)
    try:
        with torch.no_grad():
            whole.watch(lambda rows: run(rows, module), others)
            placeholders = PlaceholderRecorder(module, skipped, catalog)
            placeholders.watch(lambda rows: run(rows, module), first)
            draft = Resumption(start, catalog, inputs, dtype, placeholders.collect())
            run_tainted = resumed.with_taint(run)
            resumed.watch(lambda rows: draft.forward(run_tainted, module, rows["sent"]), {"sent": whole.get_output()})
    except Exception as error:  # whatever a model raises where it finds NaN, it means the same
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    finally:
        written = before.find_changes()
        before.put_back(written)
    if written:
        raise not_resumable_error(point)
    trial = Trial(module, point, skipped, whole.marks, resumed.marks)
    return replace(draft, catalog=trial.build_catalog(catalog))


SMALLEST = 1e-4  # of a forward's cost: what is left after its last layer


@dataclass(frozen=True)
class Trial:
    """The marks of two forwards, a whole one and a resumed one in which some calls were skipped."""

    module: nn.Module
    point: HookPoint
    skipped: Mapping[str, CallNumbers]
    whole: Mapping[CallBoundaryKey, TensorMarks]
    resumed: Mapping[CallBoundaryKey, TensorMarks]

    def build_catalog(self, catalog: Catalog) -> Catalog:
        """What a catalogue says of the tensors that came out as they were, and of no others."""
        rest = self._get_remaining_cost(catalog)
        costs = replace(catalog.costs, base=catalog.costs.base * rest, per_row=catalog.costs.per_row * rest)
        layers = {name: self._build_layer(layer, catalog) for name, layer in catalog.layers.items()}
        start = format_point(self.point)
        seconds = catalog.seconds * rest
        return replace(catalog, layers=layers, seconds=seconds, costs=costs, start=start, has_functions=False)

    def _get_skipped_cost(self, catalog: Catalog) -> float:
        """The share of a whole forward's cost up to the point."""
        return catalog.layers[self.point.layer].calls[self.point.call].output.cost

    def _get_remaining_cost(self, catalog: Catalog) -> float:
        return max(1.0 - self._get_skipped_cost(catalog), SMALLEST)

    def _build_layer(self, layer: Layer, catalog: Catalog) -> Layer:
        module = self.module.get_submodule("" if layer.name == "." else layer.name)
        calls = tuple(self._build_call(module, number, call, catalog) for number, call in enumerate(layer.calls))
        return replace(layer, calls=calls)

    def _build_call(self, module: nn.Module, number: int, call: Call, catalog: Catalog) -> Call:
        before = self._build_boundary(call.input, self._find_same((module, number, "input")), catalog)
        after = self._build_boundary(call.output, self._find_same_outputs(module, number), catalog)
        is_whole = (
            (module, number) not in self._skipped_calls
            and len(before.tensors) == len(call.input.tensors)
            and len(after.tensors) == len(call.output.tensors)
        )
        weights, sinks = (
            replace(each, cost=after.cost) if each and is_whole else None for each in (call.attention, call.sinks)
        )
        return Call(before, after, weights, sinks=sinks)

    def _build_boundary(self, boundary: CallBoundary, paths: Iterable[Path], catalog: Catalog) -> CallBoundary:
        same = frozenset(paths)
        tensors = tuple(info for info in boundary.tensors if info.path in same)
        cost = max(boundary.cost - self._get_skipped_cost(catalog), 0.0) / self._get_remaining_cost(catalog)
        return replace(boundary, cost=round(cost, 4), tensors=tensors)

    @cached_property
    def _skipped_calls(self) -> set[tuple[nn.Module, int | None]]:
        return {(self.module.get_submodule(name), number) for name, calls in self.skipped.items() for number in calls}

    def _find_same_outputs(self, module: nn.Module, number: int) -> Iterable[Path]:
        """Of a call that was skipped nothing is known, but what was sent."""
        if (module, number) not in self._skipped_calls:
            return self._find_same((module, number, "output"))
        start = self.module.get_submodule(self.point.layer), self.point.call
        return [self.point.path] if (module, number) == start else []

    def _find_same(self, key: CallBoundaryKey) -> Iterator[Path]:
        resumed = self.resumed.get(key, {})
        whole = self.whole.get(key, {})
        return (path for path, mark in whole.items() if path in resumed and mark.matches(resumed[path]))
