"""The dry run: three small forwards that tell everything a catalogue knows.

One takes a single row, one is timed, and one takes the same row between two others: what grew is the row axis, and
what the row left behind when it was alone must be there again, or rows are not independent. A model that can't take
several rows, or takes another course with them, is catalogued from the first and runs one row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layertap.models.catalog.call_observer import CallTimer, Run
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.catalog.observers import (
    AttentionObservation,
    CallObservation,
    CallRecorder,
    TensorObservation,
)
from layertap.models.devices.dtypes import dtype_name
from layertap.models.errors import IN_THE_LOG, InputError
from layertap.models.hooks.tensor_tree import Path
from layertap.models.inputs.noise import PLACE, ROWS, make_noise
from layertap.models.spec import InputSpec

Side = Literal["input", "output"]
Where = Callable[[CallObservation], TensorObservation | None]  # which tensor of a call
TIMED, TIMED_S = 5, 0.1
OF_SHAPES = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AssertionError,
)  # what torch and models say of a wrong one


def survey(
    module: nn.Module, inputs: Sequence[InputSpec], run: Run, device: torch.device, prefix: int, dtype: torch.dtype
) -> Catalog:
    """The catalogue of a module for one shape of input.

    ``inputs`` gives the shapes of one row; ``run`` calls the module with a batch of such rows; ``prefix`` is the
    number of tokens that stand before the patches; floating inputs come in ``dtype``. InputError where the module
    can't take that shape.
    """
    batch = make_noise(inputs, device, dtype)
    # Not inference mode: what a model keeps of its first forward (tables, caches) must be fit for gradients later.
    with torch.no_grad():
        first = CallRecorder(module)
        try:
            first.watch(run, _one(batch))
            clock = _timed(module, run, _one(batch), device)
        except Exception as error:
            raise _refusal(error, inputs) from error
        second = CallRecorder(module, alone=first)
        try:
            second.watch(run, batch)
        except Exception:  # whatever a model raises, it means the same: not several rows at once
            second = first
        stretched = _of_other_length(module, inputs, run, device, dtype)
    if second.summarize_calls != first.summarize_calls:
        second = first
    return _Assembly(module, first, second, clock, prefix, stretched).catalog()


@dataclass(frozen=True)
class _LengthProbe:
    """A forward of a text of another length, which tells what grows with it; ``lengths`` are those of both forwards."""

    recorder: CallRecorder
    lengths: tuple[int, int]

    def token_axes(self, module: nn.Module, number: int, site: Where, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a tensor that have an entry for each token."""
        visits = self.recorder.calls.get(module, [])
        other = site(visits[number]) if number < len(visits) else None
        if other is None or len(other.shape) != len(shape):
            return ()
        sizes = zip(shape, other.shape, strict=True)
        return tuple(axis for axis, pair in enumerate(sizes) if pair == self.lengths)


def _of_other_length(
    module: nn.Module, inputs: Sequence[InputSpec], run: Run, device: torch.device, dtype: torch.dtype
) -> _LengthProbe | None:
    """None where all rows have one length, or the model does not take another."""
    known = next((spec for spec in inputs if spec.longest is not None), None)
    if known is None or known.longest == 1:
        return None
    length = known.shape[0]
    other = length - 1 if length == known.longest else length + 1
    specs = [replace(spec, shape=(other, *spec.shape[1:])) if spec.longest else spec for spec in inputs]
    recorder = CallRecorder(module)
    try:
        recorder.watch(run, _one(make_noise(specs, device, dtype)))
    except Exception:  # whatever a model raises, it means the same
        return None
    return _LengthProbe(recorder, (length, other))


def _refusal(error: Exception, inputs: Sequence[InputSpec]) -> InputError:
    """What a forward's error says: of a shape it may be one of the model's own bugs too, others are nothing else."""
    raised = f"the model's own forward raised {type(error).__name__}"
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
    if isinstance(error, OF_SHAPES) and not isinstance(error, NotImplementedError | RecursionError):
        return InputError(
            f"the model can't take an input of this shape: {shapes}, or has a bug: {raised}", hint=IN_THE_LOG
        )
    return InputError(f"{raised} for an input of shape {shapes}", hint=IN_THE_LOG)


def _timed(module: nn.Module, run: Run, row: Mapping[str, Tensor], device: torch.device) -> CallTimer:
    """The quickest of a few forwards, of one where it takes long: whatever disturbs a machine only adds."""
    clocks: list[CallTimer] = []
    while len(clocks) < TIMED and sum(clock.total for clock in clocks) < TIMED_S:
        clocks.append(CallTimer(module, device))
        clocks[-1].watch(run, row)
    return min(clocks, key=lambda clock: clock.total)


@dataclass
class _Assembly:
    """Puts what was seen together: shapes of one row from the first forward, axes and layouts from the second."""

    module: nn.Module
    first: CallRecorder
    second: CallRecorder
    clock: CallTimer
    prefix: int
    stretched: _LengthProbe | None

    def catalog(self) -> Catalog:
        whole = self.second.calls.get(self.module, [])
        batches = self.second is not self.first
        rowwise = batches and not any(seen.mixed for visit in whole for seen in visit.output.values())
        grids = self._grids()
        names = self.module.named_modules(remove_duplicate=False)
        layers = [self._layer(name or ".", part, rowwise, grids) for name, part in names]
        layers.sort(key=lambda layer: layer.calls[0].input.order if layer.calls else math.inf)
        return Catalog({layer.name: layer for layer in layers}, self.clock.total, rowwise, batches=batches)

    def _layer(self, name: str, module: nn.Module, rowwise: bool, grids: set[int]) -> Layer:
        visits = zip(self.first.calls.get(module, []), self.second.calls.get(module, []), strict=True)
        calls = tuple(self._call(module, number, *pair, rowwise, grids) for number, pair in enumerate(visits))
        parameters = sum(parameter.numel() for parameter in module.parameters())
        is_leaf = next(module.children(), None) is None
        kind = type_before_parametrizations(module).__name__
        return Layer(name, kind, is_leaf, parameters, calls, tuple(_hazards(module, bool(calls))))

    def _call(
        self,
        module: nn.Module,
        number: int,
        visit: CallObservation,
        twin: CallObservation,
        rowwise: bool,
        grids: set[int],
    ) -> Call:
        def with_tokens(leaf: TensorInfo, where: Where) -> TensorInfo:
            if self.stretched is None or leaf.mixed:
                return leaf
            return replace(leaf, token_axes=self.stretched.token_axes(module, number, where, leaf.shape))

        def leaves(side: Side) -> tuple[TensorInfo, ...]:
            seen, later = _side(visit, side), _side(twin, side)
            found = ((path, self._leaf(path, seen[path], later[path], rowwise, grids)) for path in seen)
            return tuple(with_tokens(leaf, partial(_seen_at, side, path)) for path, leaf in found)

        after = self.clock.after(module, number)
        weights = tuple(
            with_tokens(
                replace(self._leaf(path, one.weights, other.weights, rowwise, grids), how=one.how),
                partial(_attended_at, place),
            )
            for place, (path, one, other) in enumerate(_numbered(visit.attention, twin.attention))
        )
        return Call(
            CallBoundary(visit.start, self.clock.before(module, number), leaves("input"), visit.inputs_refused),
            CallBoundary(visit.end, after, leaves("output"), visit.outputs_refused),
            CallBoundary(visit.end, after, weights) if weights else None,
        )

    def _leaf(
        self, path: Path, seen: TensorObservation, twin: TensorObservation, rowwise: bool, grids: set[int]
    ) -> TensorInfo:
        # One row at a time, whatever has an axis for rows holds that one.
        mixed = twin.mixed and (rowwise or twin.row_axis is None)
        leaf = TensorInfo(path, seen.shape, dtype_name(seen.dtype), twin.row_axis, mixed, twin.layout)
        if leaf.layout not in ("NTC", "TNC") or leaf.entries_per_row != 1:
            return leaf
        tokens = seen.shape[leaf.layout.index("T")]
        return replace(leaf, prefix=self.prefix) if tokens > self.prefix and tokens not in grids else leaf

    def _grids(self) -> set[int]:
        """Sizes of every feature map: as many tokens as that means that no class token is among them."""
        return {
            math.prod(seen.shape[2:])
            for visits in self.second.calls.values()
            for visit in visits
            for seen in visit.output.values()
            if seen.layout in ("NCHW", "NCTHW")
        }


def _side(visit: CallObservation, side: Side) -> dict[Path, TensorObservation]:
    return visit.input if side == "input" else visit.output


def _seen_at(side: Side, path: Path, visit: CallObservation) -> TensorObservation | None:
    return _side(visit, side).get(path)


def _attended_at(place: int, visit: CallObservation) -> TensorObservation | None:
    return visit.attention[place].weights if place < len(visit.attention) else None


def _numbered(
    visit: Sequence[AttentionObservation], twin: Sequence[AttentionObservation]
) -> Iterator[tuple[Path, AttentionObservation, AttentionObservation]]:
    """The attention of a call by path, which is empty where there is only one."""
    for at, (one, other) in enumerate(zip(visit, twin, strict=True)):
        yield ((str(at),) if len(visit) > 1 else ()), one, other


def has_same_calls(
    one: nn.Module, other: nn.Module, forward: Callable[..., object], batch: Mapping[str, Tensor]
) -> bool:
    """Whether a copy of a module runs as the module does: every part of it is called, and returns the same.

    Nothing that they share may change on the way: two threads will run them at once.
    """
    before = _WriteMarks.of(one)
    try:
        with torch.no_grad():
            mine = _watched(one, forward, batch)
            # Another row than that, and than a copy brings along: what one tree left in the other must show.
            forward(_one(batch, 0), one)
            its = _watched(other, forward, batch)
    except Exception:  # a copy may lack what its constructor set up elsewhere
        return False
    return _WriteMarks.of(one).like(before) and all(_alike(*pair) for pair in zip(mine, its, strict=True))


def _watched(
    module: nn.Module, forward: Callable[..., object], batch: Mapping[str, Tensor]
) -> list[list[CallObservation]]:
    """The calls of each part of a module, in a forward of a row that no other forward at loading ends with."""
    recorder = CallRecorder(module)
    recorder.watch(partial(forward, module=module), _one(batch, ROWS - 1))
    return [recorder.calls.get(part, []) for part in module.modules()]


@dataclass(frozen=True)
class _WriteMarks:
    """What tells whether something was written to a module's tensors. Not all of it leaves a new version behind."""

    versions: list[int]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> _WriteMarks:
        tensors = (*module.parameters(), *module.buffers())
        # A tensor that a forward made, a cache for one, has no version.
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        return cls(versions, [buffer.detach().clone().reshape(-1).view(torch.uint8) for buffer in module.buffers()])

    def like(self, other: _WriteMarks) -> bool:
        same = self.versions == other.versions and len(self.buffers) == len(other.buffers)
        return same and all(torch.equal(*pair) for pair in zip(self.buffers, other.buffers, strict=True))


def _alike(mine: Sequence[CallObservation], its: Sequence[CallObservation]) -> bool:
    """Whether two modules were called at the same places of a forward and returned the same."""
    return [(visit.start, visit.end) for visit in mine] == [(visit.start, visit.end) for visit in its] and all(
        one.output.keys() == other.output.keys()
        and all(one.output[path].sketch.matches(other.output[path].sketch) for path in one.output)
        for one, other in zip(mine, its, strict=True)
    )


def _one(batch: Mapping[str, Tensor], place: int = PLACE) -> dict[str, Tensor]:
    """A row alone, in memory of its own: a model may write to its input."""
    return {name: value[place : place + 1].clone() for name, value in batch.items()}


def _hazards(module: nn.Module, called: bool) -> Iterator[str]:
    if getattr(module, "inplace", False) is True:
        yield "inplace"
    if not called:
        yield "never_called"
    if isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower():
        yield "attention"
