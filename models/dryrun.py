"""The dry run: three small forwards that tell everything a catalogue knows.

The first takes one row, the second the same row and another: what grew is the row axis, and what the first row left
behind must be there again, or rows are not independent. The third is timed. One that fails with two rows is a model
whose axis 0 is not rows: it is catalogued from the first and runs one row at a time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from models import layout
from models.catalog import Call, Catalog, Layer, Leaf, Moment
from models.errors import InputError
from models.spec import InputSpec
from models.structure import Path, call_value, leaves

Inputs = Mapping[str, Tensor]
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-4}
COARSE = 0.2  # half precision: enough to tell a row from its neighbour


def survey(
    module: nn.Module,
    inputs: Sequence[InputSpec],
    run: Callable[[Inputs], object],
    device: torch.device,
    prefix: int,
    dtype: torch.dtype,
) -> Catalog:
    """The catalogue of a module for one shape of input.

    ``inputs`` gives the shapes of one row; ``run`` calls the module with a batch of such rows; ``prefix`` is the
    number of tokens that stand before the patches; floating inputs come in ``dtype``. InputError where the module
    can't take that shape.
    """
    pair = _noise(inputs, device, dtype, rows=2)
    single = {name: value[:1].clone() for name, value in pair.items()}
    with torch.inference_mode():
        first = _Recorder(module)
        try:
            first.watch(run, single)
        except Exception as error:
            shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
            raise InputError(f"the model can't take an input of this shape: {shapes}") from error
        second = _Recorder(module, before=first)
        try:
            second.watch(run, pair)
        except Exception:  # whatever a model raises, it means the same: not two rows at once
            second = first
        clock = _Clock(module, device)
        clock.watch(run, single)
    return _Assembly(module, first, second, clock, prefix).catalog()


@dataclass
class _Seen:
    """A tensor as one forward showed it: ``sketch`` is a projection of the first row, ``norm`` its scale."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sketch: float
    norm: float
    row_axis: int | None = None
    mixed: bool = False
    layout: str | None = None


@dataclass
class _Visit:
    """One call of a module as it was seen."""

    start: int
    end: int = -1
    input: dict[Path, _Seen] = field(default_factory=dict)
    output: dict[Path, _Seen] = field(default_factory=dict)


class _Hooked:
    """Calls ``enter`` and ``leave`` around every call of every module while ``watch`` runs one forward."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())

    def watch(self, run: Callable[[Inputs], object], inputs: Inputs) -> None:
        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_pre_hook(self._pre, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._post).remove)
            self.begin()
            run(inputs)

    def _pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(module, call_value(args, kwargs))

    def _post(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.leave(module, output)

    def begin(self) -> None: ...
    def enter(self, module: nn.Module, value: object) -> None: ...
    def leave(self, module: nn.Module, value: object) -> None: ...


class _Recorder(_Hooked):
    """Notes order, shapes and layouts; given the recorder of one row, also which axis holds the rows."""

    def __init__(self, module: nn.Module, before: _Recorder | None = None) -> None:
        super().__init__(module)
        self.before = before
        self.visits: dict[nn.Module, list[_Visit]] = {}
        self._open: dict[nn.Module, list[tuple[int, _Visit]]] = {}
        self._order = 0
        self._layouts: dict[int, tuple[weakref.ref[Tensor], str | None]] = {}

    def enter(self, module: nn.Module, value: object) -> None:
        calls = self.visits.setdefault(module, [])
        visit = _Visit(self._tick())
        visit.input = {path: self._entering(module, len(calls), path, leaf) for path, leaf in leaves(value)}
        self._open.setdefault(module, []).append((len(calls), visit))
        calls.append(visit)

    def leave(self, module: nn.Module, value: object) -> None:
        call, visit = self._open[module].pop()
        visit.end = self._tick()
        before = next(iter(visit.input.values()), None)
        visit.output = {path: self._leaving(module, call, path, leaf, before) for path, leaf in leaves(value)}

    def _entering(self, module: nn.Module, call: int, path: Path, leaf: Tensor) -> _Seen:
        seen = self._see(module, call, path, leaf, "input")
        seen.layout = self._known(leaf) or layout.of_input(seen.shape, seen.row_axis)
        self._remember(leaf, seen.layout)
        return seen

    def _leaving(self, module: nn.Module, call: int, path: Path, leaf: Tensor, before: _Seen | None) -> _Seen:
        seen = self._see(module, call, path, leaf, "output")
        came, same = (before.layout, before.shape == seen.shape) if before else (None, False)
        known = self._known(leaf) if any(True for _ in module.children()) else None
        seen.layout = known or layout.infer(module, seen.shape, seen.row_axis, came, same)
        self._remember(leaf, seen.layout)
        return seen

    def _see(self, module: nn.Module, call: int, path: Path, leaf: Tensor, side: str) -> _Seen:
        shape = tuple(leaf.shape)
        past = self._past(module, call, path, side)
        axis = _grown_axis(past.shape, shape) if past else (0 if shape[:1] == (1,) else None)
        own = leaf.narrow(axis, 0, past.shape[axis]) if past is not None and axis is not None else leaf
        seen = _Seen(shape, leaf.dtype, *_sketch(own), row_axis=axis)
        seen.mixed = past is not None and axis is not None and _differs(past, seen)
        return seen

    def _past(self, module: nn.Module, call: int, path: Path, side: str) -> _Seen | None:
        visits = self.before.visits.get(module, []) if self.before else []
        sides: dict[Path, _Seen] = getattr(visits[call], side) if call < len(visits) else {}
        return sides.get(path)

    def _known(self, leaf: Tensor) -> str | None:
        reference, known = self._layouts.get(id(leaf), (None, None))
        return known if reference is not None and reference() is leaf else None

    def _remember(self, leaf: Tensor, known: str | None) -> None:
        self._layouts[id(leaf)] = (weakref.ref(leaf), known)

    def _tick(self) -> int:
        self._order += 1
        return self._order


class _Clock(_Hooked):
    """Seconds since the start at which each call began and ended."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self.device = device
        self.starts: dict[nn.Module, list[float]] = {}
        self.ends: dict[nn.Module, list[float]] = {}
        self.total = 0.0

    def watch(self, run: Callable[[Inputs], object], inputs: Inputs) -> None:
        super().watch(run, inputs)
        self.total = max(self._now(), 1e-9)

    def begin(self) -> None:
        self._zero = 0.0
        self._zero = self._now()

    def enter(self, module: nn.Module, value: object) -> None:
        self.starts.setdefault(module, []).append(self._now())

    def leave(self, module: nn.Module, value: object) -> None:
        self.ends.setdefault(module, []).append(self._now())

    def share(self, times: Mapping[nn.Module, list[float]], module: nn.Module, call: int) -> float:
        """The share of the whole forward spent at a call's start or end, 0 to 1."""
        marks = times.get(module, [])
        return round(min(marks[call] / self.total, 1.0), 4) if call < len(marks) else 1.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self._zero


@dataclass
class _Assembly:
    """Puts what was seen together: shapes of one row from the first forward, axes and layouts from the second."""

    module: nn.Module
    first: _Recorder
    second: _Recorder
    clock: _Clock
    prefix: int

    def catalog(self) -> Catalog:
        grids = self._grids()
        names = list(self.module.named_modules(remove_duplicate=False))
        layers = [self._layer(name or ".", module, grids) for name, module in names]
        layers.sort(key=lambda layer: layer.calls[0].input.order if layer.calls else len(layers) ** 2)
        whole = next(layer for layer in layers if layer.name == ".")
        rowwise = self.second is not self.first and all(
            leaf.row_axis == 0 and not leaf.mixed for call in whole.calls for leaf in call.output.leaves
        )
        return Catalog({layer.name: layer for layer in layers}, self.clock.total, rowwise)

    def _layer(self, name: str, module: nn.Module, grids: set[int]) -> Layer:
        visits = self.first.visits.get(module, [])
        calls = tuple(self._call(module, index, visit, grids) for index, visit in enumerate(visits) if visit.end > 0)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        is_leaf = next(module.children(), None) is None
        return Layer(name, type(module).__name__, is_leaf, parameters, calls, tuple(_hazards(module, bool(calls))))

    def _call(self, module: nn.Module, index: int, visit: _Visit, grids: set[int]) -> Call:
        later = self.second.visits.get(module, [])
        twin = later[index] if index < len(later) else visit
        return Call(
            Moment(
                visit.start,
                self.clock.share(self.clock.starts, module, index),
                tuple(self._leaf(path, seen, twin.input.get(path, seen), grids) for path, seen in visit.input.items()),
            ),
            Moment(
                visit.end,
                self.clock.share(self.clock.ends, module, index),
                tuple(
                    self._leaf(path, seen, twin.output.get(path, seen), grids) for path, seen in visit.output.items()
                ),
            ),
        )

    def _leaf(self, path: Path, seen: _Seen, twin: _Seen, grids: set[int]) -> Leaf:
        leaf = Leaf(path, seen.shape, dtype_name(seen.dtype), twin.row_axis, twin.mixed, twin.layout)
        if leaf.layout not in ("NTC", "TNC") or leaf.per_row != 1:
            return leaf
        tokens = seen.shape[leaf.layout.index("T")]
        return replace(leaf, prefix=self.prefix) if tokens > self.prefix and tokens not in grids else leaf

    def _grids(self) -> set[int]:
        """Sizes of every feature map: as many tokens as that means that no class token is among them."""
        seen = (leaf for visits in self.second.visits.values() for visit in visits for leaf in visit.output.values())
        sizes = set()
        for leaf in seen:
            if leaf.layout in ("NCHW", "NHWC"):
                sizes.add(leaf.shape[leaf.layout.index("H")] * leaf.shape[leaf.layout.index("W")])
        return sizes


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _noise(inputs: Sequence[InputSpec], device: torch.device, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(spec: InputSpec) -> Tensor:
        shape = (rows, *spec.shape)
        if DTYPES[spec.dtype].is_floating_point:
            return torch.randn(shape, generator=generator).to(device, dtype)
        return torch.randint(0, 2, shape, generator=generator).to(device, DTYPES[spec.dtype])

    return {spec.name: draw(spec) for spec in inputs}


def _grown_axis(one: tuple[int, ...], two: tuple[int, ...]) -> int | None:
    if len(one) != len(two):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and two[grown[0]] == 2 * one[grown[0]] else None


def _sketch(leaf: Tensor) -> tuple[float, float]:
    values = leaf.detach().to(torch.float32).flatten()
    weights = torch.arange(values.numel(), device=values.device, dtype=torch.float32).mul_(12.9898).sin_()
    return float(values @ weights), float(values.norm())


def _differs(past: _Seen, now: _Seen) -> bool:
    tolerance = TOLERANCE.get(past.dtype, COARSE if past.dtype.is_floating_point else 1e-3)
    return not abs(past.sketch - now.sketch) <= tolerance * max(past.norm, 1e-6)


def _hazards(module: nn.Module, called: bool) -> Iterator[str]:
    if getattr(module, "inplace", False) is True:
        yield "inplace"
    if not called:
        yield "never_called"
    if isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower():
        yield "attention"


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}
