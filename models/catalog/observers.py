"""What the dry run's forwards write down: order, shapes, row axes and layouts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layertap.models.catalog import layout
from layertap.models.catalog.call_observer import CallObserver, Run
from layertap.models.catalog.sketch import Sketch
from layertap.models.hooks import attention
from layertap.models.hooks.tensor_tree import Path, find_refused, iterate_tensors
from layertap.models.inputs.noise import PLACE, ROWS


@dataclass
class TensorObservation:
    """A tensor as one forward showed it; ``sketch`` is of the part that belongs to the row that ran alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sketch: Sketch
    row_axis: int | None
    mixed: bool
    layout: str | None = None


@dataclass
class AttentionObservation:
    """Attention as one forward showed it: the weights, and the tensor that tells where their rows are."""

    weights: TensorObservation
    evidence: TensorObservation
    how: str


@dataclass
class CallObservation:
    """One call of a module as it was seen; ``took`` and ``gave`` are what could not be looked at, by path and kind."""

    start: int
    end: int = -1
    input: dict[Path, TensorObservation] = field(default_factory=dict)
    output: dict[Path, TensorObservation] = field(default_factory=dict)
    inputs_refused: tuple[tuple[Path, str], ...] = ()
    outputs_refused: tuple[tuple[Path, str], ...] = ()
    attention: list[AttentionObservation] = field(default_factory=list)


class CallRecorder(CallObserver):
    """Notes order, shapes and layouts; given the recorder of one row alone, also which axis holds the rows.

    Its own forward then has ROWS rows, that row in the middle: what either neighbour does to it shows.
    """

    def __init__(self, module: nn.Module, alone: CallRecorder | None = None) -> None:
        super().__init__(module)
        self.calls: dict[nn.Module, list[CallObservation]] = {}
        self._alone = alone
        self._order = 0
        self._running: list[tuple[nn.Module, int]] = []
        self._tensors: dict[int, _TensorHistory] = {}
        self._recent: dict[int, TensorObservation] = {}  # by number of axes, what was returned last

    @property
    def summarize_calls(self) -> dict[nn.Module, list[tuple[set[Path], set[Path], int]]]:
        """Which modules were called, how often, and with and for what kind of value; how often they attended."""
        return {
            module: [(set(visit.input), set(visit.output), len(visit.attention)) for visit in visits]
            for module, visits in self.calls.items()
        }

    def watch(self, run: Run, inputs: Mapping[str, Tensor]) -> None:
        """Run one forward."""
        with attention.AttentionObserver(self._attend):
            super().watch(run, inputs)

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """Note what a call takes."""
        with attention.disable_observers():
            self._enter(module, call, value)

    def _enter(self, module: nn.Module, call: int, value: object) -> None:
        self._running.append((module, call))
        visit = CallObservation(self._tick(), inputs_refused=tuple(find_refused(value)))
        self.calls.setdefault(module, []).append(visit)
        for path, leaf in iterate_tensors(value):
            visit.input[path] = seen = self._see(self._past(module, call, "input").get(path), leaf)
            self._argument(module, leaf, seen, whole=visit.start == 1)

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Note what a call returns."""
        with attention.disable_observers():
            self._leave(module, call, value)

    def _leave(self, module: nn.Module, call: int, value: object) -> None:
        while self._running and self._running.pop() != (module, call):
            pass
        visit = self.calls[module][call]
        visit.end, visit.outputs_refused = self._tick(), tuple(find_refused(value))
        if value is None:  # as it is after a call that raised
            visit.attention.clear()
        came = next(iter(visit.input.values()), None)
        before: layout.Evidence = (came.shape, came.layout) if came else ((), None)
        for path, leaf in iterate_tensors(value):
            visit.output[path] = seen = self._see(self._past(module, call, "output").get(path), leaf)
            self._result(module, leaf, seen, before)

    def _see(self, past: TensorObservation | None, leaf: Tensor) -> TensorObservation:
        shape = tuple(leaf.shape)
        if past is None:
            axis = 0 if shape[:1] == (1,) else None
            return TensorObservation(shape, leaf.dtype, Sketch.from_tensor(leaf), axis, mixed=axis is None)
        axis = _grown_axis(past.shape, shape)
        own = leaf if axis is None else leaf.narrow(axis, PLACE * past.shape[axis], past.shape[axis])
        sketch = Sketch.from_tensor(own)
        return TensorObservation(
            shape, leaf.dtype, sketch, axis, mixed=own.shape != past.shape or not sketch.matches(past.sketch)
        )

    def _attend(self, sight: attention.AttentionEvent) -> None:
        """Note attention, by shape alone: weights of many tokens are large, and nobody asked for them yet."""
        if not self._running:
            return
        module = attention.find_owner([module for module, _ in self._running])
        call = next(call for running, call in reversed(self._running) if running is module)
        shape = attention.unfold_weights(sight.shape, module)
        if shape is None:
            return
        attended = self.calls[module][call].attention
        visits = self._alone.calls.get(module, []) if self._alone else []
        earlier = visits[call].attention if call < len(visits) else []
        past = earlier[len(attended)] if len(attended) < len(earlier) else None
        evidence = self._see(past.evidence if past else None, sight.evidence)
        axis: int | None
        if past is None:
            axis = 0 if shape[0] == 1 else None
        else:
            axis = _grown_axis(past.weights.shape, shape)
            axis = axis if axis == evidence.row_axis else None
        mixed = axis is None or (past is not None and evidence.mixed)
        attended.append(
            AttentionObservation(
                TensorObservation(shape, sight.dtype, evidence.sketch, axis, mixed), evidence, sight.how
            )
        )

    def _past(self, module: nn.Module, call: int, side: str) -> dict[Path, TensorObservation]:
        visits = self._alone.calls.get(module, []) if self._alone else []
        sides: dict[Path, TensorObservation] = getattr(visits[call], side) if call < len(visits) else {}
        return sides

    def _argument(self, module: nn.Module, leaf: Tensor, seen: TensorObservation, *, whole: bool) -> None:
        if layout.is_plain(seen.shape, seen.row_axis):
            seen.layout = layout.get_plain_layout(seen.shape, seen.row_axis)
            return
        sighted = self._sighted(leaf)
        sighted.settle(layout.infer_argument_layout(module, seen.shape))
        shape = seen.shape
        sighted.add(
            seen, layout.infer_input_layout(shape) if whole else layout.infer_from_evidence(shape, self._nearest(shape))
        )

    def _result(self, module: nn.Module, leaf: Tensor, seen: TensorObservation, before: layout.Evidence) -> None:
        if layout.is_plain(seen.shape, seen.row_axis):
            seen.layout = layout.get_plain_layout(seen.shape, seen.row_axis)
            return
        sighted = self._sighted(leaf)
        sighted.settle(layout.infer_result_layout(module, seen.shape, before))
        sighted.add(seen, self._guess(module, seen.shape, before))
        self._recent[len(seen.shape)] = seen

    def _guess(self, module: nn.Module, shape: tuple[int, ...], before: layout.Evidence) -> str | None:
        if next(module.parameters(), None) is None and next(module.children(), None) is None:
            return layout.infer_rearranged_layout(shape, before)
        inside = self._nearest(shape) if next(module.children(), None) is not None else []
        return layout.infer_from_evidence(shape, [before, *inside] if before[0] == shape else [*inside, before])

    def _nearest(self, shape: tuple[int, ...]) -> list[layout.Evidence]:
        """What a module returned last with as many axes: within a module, one of its parts."""
        last = self._recent.get(len(shape))
        return [(last.shape, last.layout)] if last else []

    def _sighted(self, leaf: Tensor) -> _TensorHistory:
        found = self._tensors.get(id(leaf))
        if found is None or found.reference() is not leaf or found.shape != leaf.shape:
            found = self._tensors[id(leaf)] = _TensorHistory(weakref.ref(leaf), leaf.shape)
        return found

    def _tick(self) -> int:
        self._order += 1
        return self._order


@dataclass
class _TensorHistory:
    """Every sighting of one tensor: what a module's type tells about it holds for all of them."""

    reference: weakref.ref[Tensor]
    shape: torch.Size  # an in-place squeeze makes the same object another tensor
    certain: bool = False
    layout: str | None = None
    sightings: list[TensorObservation] = field(default_factory=list)

    def settle(self, known: str | None) -> None:
        """A module's type tells the layout, or nothing; the first that does is believed."""
        if known is None or self.certain:
            return
        self.certain, self.layout = True, known
        for seen in self.sightings:
            seen.layout = known

    def add(self, seen: TensorObservation, guess: str | None) -> None:
        """The tensor is seen again; only the first guess counts, where nothing is certain."""
        if not self.certain and not self.sightings:
            self.layout = guess
        seen.layout = self.layout
        self.sightings.append(seen)


def _grown_axis(one: tuple[int, ...], several: tuple[int, ...]) -> int | None:
    if len(one) != len(several):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and several[grown[0]] == ROWS * one[grown[0]] else None
