"""Whether forwards can go on from a layer's output: tried once, before anybody gets an answer.

A whole forward is compared with one that goes on from what left the layer in it, tensor by tensor. The modules that
stand still in the second one were seen with another row: whatever of theirs comes through makes a difference. So does
what a module kept of its last forward: that was the other row's. A comparison hides a NaN, masks and whole numbers have
none, and all of these may happen to be the same in both forwards: what is computed from what stands still is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_observer import CallObserver
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.catalog.sketch import Sketch
from layertap.models.devices.memory import is_device_error
from layertap.models.hooks.tensor_tree import Path, iterate_tensors, replace_tensor
from layertap.models.resume.resumption import (
    Calls,
    Forward,
    Placeholder,
    Resumption,
    Rows,
    format_point,
    not_resumable_error,
)
from layertap.models.resume.taint import Taint
from layertap.models.selection.hook_points import HookPoint
from layertap.models.spec import InputSpec

Side = tuple[nn.Module, int, str]  # of a call of a module: "input" or "output"
Marks = Mapping[Path, "TensorMark"]
Numbers = tuple[int | None, ...]  # of the calls that are met of a module, None where one runs
SMALLEST = 1e-4  # of a forward's cost: what is left after its last layer


def verify_resumable(
    module: nn.Module,
    start: tuple[HookPoint, TensorInfo],
    catalog: Catalog,
    inputs: tuple[InputSpec, ...],
    run: Forward,
    rows: Rows,
    dtype: torch.dtype,
) -> Resumption:
    """Forwards that go on from a point, after a trial of three; SelectorError where the model has none.

    ``rows`` are a few, in ``dtype`` where they are floating. Of the first one only structures are kept. What a device
    raises for want of memory, or for good, goes through: it says nothing of the model.
    """
    point, leaf = start
    numbers = _find_skipped(module, point, catalog)
    first = {name: value[:1].clone() for name, value in rows.items()}
    others = {name: value[1:].clone() if catalog.rowwise else value[1:2].clone() for name, value in rows.items()}
    buffers = [_Buffers.of(part) for part in module.modules()]
    whole, resumed = _Marked(module, point), _Resumed(module, point, numbers)
    try:
        with torch.no_grad():
            whole.watch(lambda rows: run(rows, module), others)
            shapes = _Shapes(module, numbers, catalog)
            shapes.watch(lambda rows: run(rows, module), first)
            draft = Resumption(point, leaf, catalog, inputs, dtype, shapes.collect_skipped)
            resumed.watch(
                lambda rows: draft.forward(resumed.followed(run), module, rows["given"]), {"given": whole.given()}
            )
    except Exception as error:  # whatever a model raises where it finds NaN, it means the same
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    finally:
        written = [each for each in buffers if each.restored()]
    if written:
        raise not_resumable_error(point)
    return replace(draft, catalog=_Trial(module, point, numbers, whole.marks, resumed.marks).catalog(catalog))


def _find_skipped(module: nn.Module, point: HookPoint, catalog: Catalog) -> dict[str, Numbers]:
    """The outermost modules that stand still, and the calls of them that are met; of the layer's own up to the point.

    Calls are counted as they are met. Where one that nobody meets is of a module that runs later, what contains it
    does not stand still, or that module's calls would be miscounted.
    """
    own = catalog.layers[point.layer].calls[point.call]
    target = module.get_submodule(point.layer)
    names = {part: name for name, part in module.named_modules()} | {target: point.layer}
    known = {part: catalog.layers[name or "."].calls for part, name in names.items()}
    late = {target} | {part for part, calls in known.items() if not all(_ended(call, own) for call in calls)}
    counted = [call for part in late for call in known[part]]
    if _hides(own, counted):
        raise not_resumable_error(point)
    chosen = {target: known[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = known[child]
            if child not in late and calls and not any(_hides(call, counted) for call in calls):
                chosen[child] = calls
            elif child is not target:
                walk(child)

    walk(module)
    spans = [call for calls in chosen.values() for call in calls if _ended(call, own) or call is own]
    return {
        names[part]: tuple(
            number if _ended(call, own) or call is own else None
            for number, call in enumerate(calls)
            if not any(_inside(call, span) for span in spans)
        )
        for part, calls in chosen.items()
    }


def _ended(call: Call, own: Call) -> bool:
    """Whether a call is over when the layer's begins, or is a part of it."""
    return call.output.order < own.input.order or _inside(call, own)


def _inside(call: Call, span: Call) -> bool:
    return span.input.order < call.input.order < span.output.order


def _hides(span: Call, calls: Iterable[Call]) -> bool:
    return any(_inside(call, span) for call in calls)


class _Shapes(CallObserver):
    """Keeps what calls return, without the numbers."""

    def __init__(self, module: nn.Module, numbers: Mapping[str, Numbers], catalog: Catalog) -> None:
        super().__init__(module)
        self._values: dict[tuple[str, int | None], Placeholder] = {}
        self._numbers = numbers
        self._names = {module.get_submodule(name): name for name in numbers}
        self._catalog = catalog

    @property
    def collect_skipped(self) -> dict[str, Calls]:
        """By module, what the calls that were asked for return."""
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
            value = replace_tensor(value, path, tensor.to("meta"))
        self._values[name, call] = Placeholder(value, self._catalog.layers[name].calls[call].output.tensors)


@dataclass(frozen=True)
class TensorMark:
    """What tells whether a tensor is the same as another."""

    sketch: Sketch
    infinite: int
    hollow: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor, hollow: bool = False) -> TensorMark:
        """The mark of a tensor of any dtype; ``hollow`` is one that hangs on what stands in for a value."""
        return cls(Sketch.from_tensor(tensor), int(tensor.isinf().sum()), hollow or bool(tensor.isnan().any()))

    def matches(self, other: TensorMark) -> bool:
        """Never where there is a NaN, or what stands in for one: it is what must not show."""
        same = self.infinite == other.infinite and self.sketch.matches(other.sketch)
        return same and not self.hollow and not other.hollow


class _Marked(CallObserver):
    """Marks every tensor of every call, and keeps the one that leaves a point."""

    def __init__(self, module: nn.Module, point: HookPoint) -> None:
        super().__init__(module)
        self.marks: dict[Side, Marks] = {}
        self._target = module.get_submodule(point.layer)
        self._point = point
        self._given: Tensor | None = None

    def given(self) -> Tensor:
        """What left the point, in memory of its own."""
        if self._given is None:
            raise LookupError
        return self._given

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call takes."""
        self.marks[module, call, "input"] = self._marks(value)

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call returns."""
        self.marks[module, call, "output"] = self._marks(value)
        if module is self._target and call == self._point.call:
            self._given = dict(iterate_tensors(value))[self._point.path].clone()

    def _marks(self, value: object) -> Marks:
        return {path: TensorMark.from_tensor(tensor) for path, tensor in iterate_tensors(value)}


class _Resumed(_Marked):
    """Marks those of a resumed forward, in which it is known what follows from hollow tensors."""

    def __init__(self, module: nn.Module, point: HookPoint, numbers: Mapping[str, Numbers]) -> None:
        super().__init__(module, point)
        self._taint = Taint()
        self._met = {module.get_submodule(name): met for name, met in numbers.items()}

    def followed(self, run: Forward) -> Forward:
        """A forward that begins with hollow inputs."""

        def begin(rows: Rows, module: nn.Module) -> object:
            self._taint.mark(rows.values())
            with self._taint:
                return run(rows, module)

        return begin

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Mark what a call returns; all of one that stands still is hollow, but what was given."""
        met = self._met.get(module, ())
        if call < len(met) and met[call] is not None:
            own = self._point.path if module is self._target and call == len(met) - 1 else None
            self._taint.mark(tensor for path, tensor in iterate_tensors(value) if path != own)
        super().leave(module, call, value)

    def _marks(self, value: object) -> Marks:
        with self._taint.pause():
            return {
                path: TensorMark.from_tensor(tensor, self._taint.reaches(tensor))
                for path, tensor in iterate_tensors(value)
            }


@dataclass(frozen=True)
class _Trial:
    """Two forwards, a whole one and a resumed one, in which some calls stood still."""

    module: nn.Module
    point: HookPoint
    numbers: Mapping[str, Numbers]
    whole: Mapping[Side, Marks]
    resumed: Mapping[Side, Marks]

    def catalog(self, known: Catalog) -> Catalog:
        """What a catalogue says of the tensors that came out as they were, and of no others."""
        spent = known.layers[self.point.layer].calls[self.point.call].output.cost
        left = max(1.0 - spent, SMALLEST)

        def part(moment: CallBoundary, paths: Iterable[Path]) -> CallBoundary:
            chosen = frozenset(paths)
            kept = tuple(leaf for leaf in moment.tensors if leaf.path in chosen)
            return replace(moment, cost=round(max(moment.cost - spent, 0.0) / left, 4), tensors=kept)

        def call(module: nn.Module, number: int, call: Call) -> Call:
            before = part(call.input, self._same((module, number, "input")))
            after = part(call.output, self._returned(module, number))
            ran = (
                (module, number) not in self._stood and self._all(before, call.input) and self._all(after, call.output)
            )
            return Call(before, after, replace(call.attention, cost=after.cost) if call.attention and ran else None)

        def layer(layer: Layer) -> Layer:
            module = self.module.get_submodule("" if layer.name == "." else layer.name)
            return replace(layer, calls=tuple(call(module, number, each) for number, each in enumerate(layer.calls)))

        costs = replace(known.costs, base=known.costs.base * left, per_row=known.costs.per_row * left)
        layers = {name: layer(each) for name, each in known.layers.items()}
        return replace(known, layers=layers, seconds=known.seconds * left, costs=costs, start=format_point(self.point))

    @cached_property
    def _stood(self) -> set[tuple[nn.Module, int | None]]:
        return {(self.module.get_submodule(name), number) for name, calls in self.numbers.items() for number in calls}

    def _returned(self, module: nn.Module, number: int) -> Iterable[Path]:
        """Of a call that stood still nothing is known, but what was given."""
        if (module, number) not in self._stood:
            return self._same((module, number, "output"))
        own = self.module.get_submodule(self.point.layer), self.point.call
        return [self.point.path] if (module, number) == own else []

    def _same(self, side: Side) -> Iterator[Path]:
        marks = self.resumed.get(side, {})
        return (path for path, mark in self.whole.get(side, {}).items() if path in marks and mark.matches(marks[path]))

    @staticmethod
    def _all(found: CallBoundary, known: CallBoundary) -> bool:
        return len(found.tensors) == len(known.tensors)


@dataclass(frozen=True)
class _Buffers:
    """A module's own buffers as they were, and copies of them."""

    module: nn.Module
    own: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> _Buffers:
        """Those that a module has now."""
        own = dict(module.named_buffers(recurse=False))
        return cls(module, own, {name: buffer.clone() for name, buffer in own.items()})

    def restored(self) -> bool:
        """Put back what a forward wrote to, replaced or added; whether it did anything of that."""
        now = dict(self.module.named_buffers(recurse=False))
        if now.keys() == self.own.keys() and all(_equal(now[name], copy) for name, copy in self.copies.items()):
            return False
        for name in now.keys() - self.own.keys():
            self.module._buffers[name] = None
        for name, buffer in self.own.items():
            buffer.copy_(self.copies[name])
            self.module._buffers[name] = buffer
        return True


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(value: Tensor) -> Tensor:
    """Numbers that equal themselves, which NaN does not."""
    return value.contiguous().reshape(-1).view(torch.uint8)
