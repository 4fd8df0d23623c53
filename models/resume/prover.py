"""Verify that forwards can resume from a layer's output: once, before the first reply.

A whole forward is compared, tensor by tensor, with one that resumes from its layer's output. Between the two another
row runs, so that values which a module keeps from its last forward differ. Skipped modules return placeholders, with
the structure of that row's outputs and NaN as numbers. But a comparison hides a NaN, masks and integers have none, and
values may be equal by chance: so everything that is computed from placeholders is tracked too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer
from layertap.models.catalog.observations import Boundary, Sketch
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.hooks.attach import attach_at, observe_calls
from layertap.models.hooks.tensor_tree import Path, iterate_tensors, replace_tensor
from layertap.models.resume.resumption import (
    Placeholder,
    Resumption,
    SkippedCalls,
    format_point,
    locate,
    not_resumable_error,
)
from layertap.models.selection.hook_points import HookPoint
from layertap.models.selection.plan import Tap, get_boundary, get_call
from layertap.models.spec import InputSpec
from layertap.models.taint import Taint

SMALLEST = 1e-4  # the smallest share of a forward's cost that remains, after its last layer
CallNumbers = tuple[int | None, ...]  # for each call of a module in a resumed forward: its number if skipped, else None
CallBoundaryKey = tuple[nn.Module, int, Boundary]
TensorMarks = Mapping[Path, "TensorMark"]


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
    whole, resumed = MarkRecorder(module, point), MarkRecorder(module, point, skipped)
    try:
        with torch.no_grad():
            whole.watch(run, others)
            placeholders = collect_placeholders(module, run, first, skipped, catalog)
            draft = Resumption(start, catalog, inputs, dtype, placeholders)
            run_tainted = resumed.with_taint(run)
            resumed.watch(lambda batch: draft.forward(run_tainted, module, batch["sent"]), {"sent": whole.get_output()})
    except Exception as error:  # a model may raise anything on NaN: it can't resume
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    trial = Trial(module, point, catalog, skipped, whole.marks, resumed.marks)
    return replace(draft, catalog=trial.build_catalog())


@dataclass(frozen=True)
class TensorMark:
    """A sketch that tells whether two tensors are equal; ``tainted``: the tensor depends on a placeholder."""

    sketch: Sketch
    infinite: int
    tainted: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor, tainted: bool = False) -> TensorMark:
        """The mark of a tensor of any dtype; one with a NaN counts as tainted."""
        return cls(Sketch.from_tensor(tensor), int(tensor.isinf().sum()), tainted or bool(tensor.isnan().any()))

    def matches(self, other: TensorMark) -> bool:
        """Whether both are equal; never if either has a NaN or depends on a placeholder."""
        is_same = self.infinite == other.infinite and self.sketch.matches(other.sketch)
        return is_same and not self.tainted and not other.tainted


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


class MarkRecorder:
    """Marks every tensor of every call of a forward, and keeps the tensor at a point.

    In a resumed forward, whose ``skipped`` calls are given, everything that depends on its inputs or on the outputs of
    skipped calls is tainted. In a whole forward nothing is.
    """

    def __init__(self, module: nn.Module, point: HookPoint, skipped: Mapping[str, CallNumbers] | None = None) -> None:
        self.marks: dict[CallBoundaryKey, TensorMarks] = {}
        self._module = module
        self._location = locate(point, module)
        self._point = point
        self._skipped = {module.get_submodule(name): calls for name, calls in (skipped or {}).items()}
        self._taint = Taint()
        self._output: Tensor | None = None

    def watch(self, run: Forward, batch: Inputs) -> None:
        """Run one forward."""
        with observe_calls(self._module, self._enter, self._leave), ExitStack() as stack:
            if not self._skipped:
                attach_at(stack, {self._point: self._location}, lambda _, tensor: self._keep(tensor))
            run(batch)

    def _keep(self, tensor: Tensor) -> None:
        self._output = tensor.clone()

    def with_taint(self, run: Forward) -> Forward:
        """A forward that taints its inputs, and everything that depends on them."""

        def run_tainted(batch: Inputs) -> object:
            self._taint.mark(batch.values())
            with self._taint:
                return run(batch)

        return run_tainted

    def get_output(self) -> Tensor:
        """A copy of the tensor at the point; LookupError if no call reached it."""
        if self._output is None:
            raise LookupError
        return self._output

    def _enter(self, module: nn.Module, call: int, value: object) -> None:
        self.marks[module, call, "input"] = self._mark(value)

    def _leave(self, module: nn.Module, call: int, value: object) -> None:
        numbers = self._skipped.get(module, ())
        if call < len(numbers) and numbers[call] is not None:
            # The output of a skipped call is unknown, except for the tensor that was sent.
            is_start = not self._point.function and module is self._location[0] and call == len(numbers) - 1
            sent = self._point.path if is_start else None
            self._taint.mark(tensor for path, tensor in iterate_tensors(value) if path != sent)
        self.marks[module, call, "output"] = self._mark(value)

    def _mark(self, value: object) -> TensorMarks:
        with self._taint.pause():
            return {
                path: TensorMark.from_tensor(tensor, self._taint.reaches(tensor))
                for path, tensor in iterate_tensors(value)
            }


def find_skipped_calls(module: nn.Module, point: HookPoint, catalog: Catalog) -> dict[str, CallNumbers]:
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
    if _contains_any(start, counted):
        raise not_resumable_error(point)
    # A layer whose function is the point runs its own code; only its children may be skipped.
    skipped = {} if point.function else {target: calls_of[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = calls_of[child]
            if child not in late and calls and not any(_contains_any(call, counted) for call in calls):
                skipped[child] = calls
            elif child is not target or point.function:
                walk(child)

    walk(module)
    spans = [call for calls in skipped.values() for call in calls if _ends_before(call, start) or call is start]
    return {
        names[part]: tuple(
            number if _ends_before(call, start) or call is start else None
            for number, call in enumerate(calls)
            if not any(_is_inside(call, span) for span in spans)
        )
        for part, calls in skipped.items()
    }


def _ends_before(call: Call, start: Call) -> bool:
    """Whether a call ends before the layer's call begins, or is inside it."""
    return call.output.order < start.input.order or _is_inside(call, start)


def _is_inside(call: Call, span: Call) -> bool:
    return span.input.order < call.input.order < span.output.order


def _contains_any(span: Call, calls: Iterable[Call]) -> bool:
    return any(_is_inside(call, span) for call in calls)


@dataclass(frozen=True)
class Trial:
    """The marks of two forwards, a whole one and a resumed one in which some calls were skipped."""

    module: nn.Module
    point: HookPoint
    catalog: Catalog
    skipped: Mapping[str, CallNumbers]
    whole: Mapping[CallBoundaryKey, TensorMarks]
    resumed: Mapping[CallBoundaryKey, TensorMarks]

    def build_catalog(self) -> Catalog:
        """The catalogue of the tensors that were equal in both forwards."""
        catalog, rest = self.catalog, self._remaining_cost
        costs = replace(catalog.costs, base=catalog.costs.base * rest, per_row=catalog.costs.per_row * rest)
        layers = {name: self._build_layer(layer) for name, layer in catalog.layers.items()}
        start, seconds = format_point(self.point), catalog.seconds * rest
        return replace(catalog, layers=layers, seconds=seconds, costs=costs, start=start, has_functions=False)

    @property
    def _skipped_cost(self) -> float:
        """The share of a whole forward's cost up to the point."""
        return get_boundary(self.point, self.catalog).cost

    @property
    def _remaining_cost(self) -> float:
        return max(1.0 - self._skipped_cost, SMALLEST)

    @cached_property
    def _skipped_calls(self) -> set[tuple[nn.Module, int | None]]:
        return {(self.module.get_submodule(name), number) for name, calls in self.skipped.items() for number in calls}

    def _build_layer(self, layer: Layer) -> Layer:
        module = self.module.get_submodule("" if layer.name == "." else layer.name)
        return replace(layer, calls=tuple(self._build_call(module, *pair) for pair in enumerate(layer.calls)))

    def _build_call(self, module: nn.Module, number: int, call: Call) -> Call:
        before = self._build_boundary(call.input, self._find_same((module, number, "input")))
        after = self._build_boundary(call.output, self._find_same((module, number, "output")))
        is_whole = (
            (module, number) not in self._skipped_calls
            and len(before.tensors) == len(call.input.tensors)
            and len(after.tensors) == len(call.output.tensors)
        )
        weights, sinks = (
            replace(each, cost=after.cost) if each and is_whole else None for each in (call.attention, call.sinks)
        )
        return Call(before, after, weights, sinks=sinks)

    def _build_boundary(self, boundary: CallBoundary, same: set[Path]) -> CallBoundary:
        tensors = tuple(info for info in boundary.tensors if info.path in same)
        cost = max(boundary.cost - self._skipped_cost, 0.0) / self._remaining_cost
        return replace(boundary, cost=round(cost, 4), tensors=tensors)

    def _find_same(self, key: CallBoundaryKey) -> set[Path]:
        module, number, boundary = key
        if boundary == "output" and (module, number) in self._skipped_calls:  # only the sent tensor is known
            is_start = (module, number) == (locate(self.point, self.module)[0], self.point.call)
            return {self.point.path} if is_start and not self.point.function else set()
        resumed = self.resumed.get(key, {})
        whole = self.whole.get(key, {})
        return {path for path, mark in whole.items() if path in resumed and mark.matches(resumed[path])}
