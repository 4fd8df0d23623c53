"""What the forwards of a trial show: placeholders for what calls return, and marks of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_observer import CallObserver
from layertap.models.catalog.catalog import Call, Catalog
from layertap.models.catalog.observations import Boundary, Sketch
from layertap.models.hooks.tensor_tree import Path, iterate_tensors, replace_tensor
from layertap.models.resume.resumption import Forward, Inputs, Placeholder, SkippedCalls, not_resumable_error
from layertap.models.resume.taint import Taint
from layertap.models.selection.hook_points import HookPoint

CallBoundaryKey = tuple[nn.Module, int, Boundary]
TensorMarks = Mapping[Path, "TensorMark"]


@dataclass(frozen=True)
class TensorMark:
    """What tells whether a tensor is the same as another; ``tainted``: it depends on what stands in for a value."""

    sketch: Sketch
    infinite: int
    tainted: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor, tainted: bool = False) -> TensorMark:
        """The mark of a tensor of any dtype; one with a NaN counts as tainted."""
        return cls(Sketch.from_tensor(tensor), int(tensor.isinf().sum()), tainted or bool(tensor.isnan().any()))

    def matches(self, other: TensorMark) -> bool:
        """Never where there is a NaN, or what stands in for a value: it is what must not show."""
        is_same = self.infinite == other.infinite and self.sketch.matches(other.sketch)
        return is_same and not self.tainted and not other.tainted


class PlaceholderRecorder(CallObserver):
    """Keeps what calls return, without the numbers."""

    def __init__(self, module: nn.Module, numbers: Mapping[str, CallNumbers], catalog: Catalog) -> None:
        super().__init__(module)
        self._values: dict[tuple[str, int | None], Placeholder] = {}
        self._numbers = numbers
        self._names = {module.get_submodule(name): name for name in numbers}
        self._catalog = catalog

    def collect(self) -> dict[str, SkippedCalls]:
        """By module, what the calls that are skipped return."""
        return {
            name: tuple(None if number is None else self._values[name, number] for number in numbers)
            for name, numbers in self._numbers.items()
        }

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Keep what a call returns."""
        name = self._names.get(module)
        if name is None or call not in self._numbers[name]:
            return
        for path, tensor in iterate_tensors(value):
            value = replace_tensor(value, path, torch.empty(0, dtype=tensor.dtype))
        self._values[name, call] = Placeholder(value, self._catalog.layers[name].calls[call].output.tensors)


class MarkRecorder(CallObserver):
    """Marks every tensor of every call, and keeps the one that leaves a point."""

    def __init__(self, module: nn.Module, point: HookPoint) -> None:
        super().__init__(module)
        self.marks: dict[CallBoundaryKey, TensorMarks] = {}
        self._target = module.get_submodule(point.layer)
        self._point = point
        self._output: Tensor | None = None

    def get_output(self) -> Tensor:
        """What left the point, in memory of its own; LookupError where nothing did."""
        if self._output is None:
            raise LookupError
        return self._output

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call takes."""
        self.marks[module, call, "input"] = self._mark(value)

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call returns."""
        self.marks[module, call, "output"] = self._mark(value)
        if module is self._target and call == self._point.call:
            self._output = dict(iterate_tensors(value))[self._point.path].clone()

    def _mark(self, value: object) -> TensorMarks:
        return {path: TensorMark.from_tensor(tensor) for path, tensor in iterate_tensors(value)}


class ResumedMarkRecorder(MarkRecorder):
    """Marks the tensors of a resumed forward, in which what follows from placeholders is tainted."""

    def __init__(self, module: nn.Module, point: HookPoint, numbers: Mapping[str, CallNumbers]) -> None:
        super().__init__(module, point)
        self._taint = Taint()
        self._numbers = {module.get_submodule(name): calls for name, calls in numbers.items()}

    def with_taint(self, run: Forward) -> Forward:
        """A forward whose inputs are tainted, and what follows from them."""

        def run_tainted(rows: Inputs, module: nn.Module) -> object:
            self._taint.mark(rows.values())
            with self._taint:
                return run(rows, module)

        return run_tainted

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call returns; all of one that is skipped is tainted, but what was sent."""
        numbers = self._numbers.get(module, ())
        if call < len(numbers) and numbers[call] is not None:
            sent = self._point.path if module is self._target and call == len(numbers) - 1 else None
            self._taint.mark(tensor for path, tensor in iterate_tensors(value) if path != sent)
        super().leave(module, call, value)

    def _mark(self, value: object) -> TensorMarks:
        with self._taint.pause():
            return {
                path: TensorMark.from_tensor(tensor, self._taint.reaches(tensor))
                for path, tensor in iterate_tensors(value)
            }


CallNumbers = tuple[int | None, ...]  # of the calls that a resumed forward makes of a module; None where one runs


def find_skipped_calls(module: nn.Module, point: HookPoint, catalog: Catalog) -> dict[str, CallNumbers]:
    """The outermost modules that are skipped, and which calls of them; of the layer's own those up to the point.

    Calls are counted as they are made. Where one that is not made is of a module that runs later, what contains it is
    not skipped, or that module's calls would be miscounted. SelectorError where that is the layer itself.
    """
    start = catalog.layers[point.layer].calls[point.call]
    target = module.get_submodule(point.layer)
    names = {part: name for name, part in module.named_modules()} | {target: point.layer}
    calls_of = {part: catalog.layers[name or "."].calls for part, name in names.items()}
    late = {target} | {part for part, calls in calls_of.items() if not all(_ends_before(call, start) for call in calls)}
    counted = [call for part in late for call in calls_of[part]]
    if _contains_any(start, counted):
        raise not_resumable_error(point)
    skipped = {target: calls_of[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = calls_of[child]
            if child not in late and calls and not any(_contains_any(call, counted) for call in calls):
                skipped[child] = calls
            elif child is not target:
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
    """Whether a call is over when the layer's begins, or is a part of it."""
    return call.output.order < start.input.order or _is_inside(call, start)


def _is_inside(call: Call, span: Call) -> bool:
    return span.input.order < call.input.order < span.output.order


def _contains_any(span: Call, calls: Iterable[Call]) -> bool:
    return any(_is_inside(call, span) for call in calls)
