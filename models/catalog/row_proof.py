"""Whether rows may share a forward: a row has the same bits beside other neighbours, and nothing is shared by rows.

Each tensor of the model is looked at, since inner layers may hold rows in another order than the output does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.observations import Boundary, CallObservation, Sketch
from layertap.models.catalog.shared_values import find_shared_values, run_turned
from layertap.models.catalog.trials import has_same_values, try_forward
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.hooks.tensor_tree import Path, TensorsByPath, iterate_tensors
from layertap.models.inputs.noise import QUIET, replace_neighbours
from layertap.models.spec import InputSpec

Place = tuple[tuple[nn.Module, int, str], Boundary, Path]  # of a tensor: a call's address, a side and a path


@dataclass(frozen=True)
class RowProof:
    """``crosses_rows``: a row's output is not known to be its own; ``unproven``: tensors whose rows are not."""

    crosses_rows: bool = False
    unproven: frozenset[Place] = frozenset()


def prove_rows(
    module: nn.Module,
    run: Forward,
    rows: Inputs,
    inputs: Sequence[InputSpec],
    several: CallRecorder,
    create_recorder: Callable[[], CallRecorder],
    tolerance: float,
) -> RowProof:
    """Compare what ``several`` recorded of a forward of these rows with the same row beside others."""
    shared = find_shared_values(module, run, rows)
    beside = _watch_neighbours(run, rows, inputs, create_recorder)
    if beside is None or shared.crosses_rows:
        return RowProof(crosses_rows=True)
    if any(not _is_same_turned(run, rows, flag, tolerance) for flag in shared.flags):
        return RowProof(crosses_rows=True)
    places: list[Place] = [((module, call, ""), boundary, path) for module, call, boundary, path in shared.places]
    different = _list_different(several, beside, exact=True)
    if different and _varies(several, run, rows, create_recorder):  # some devices add in another order each time
        different = _list_different(several, beside, exact=False)
    beside.release()
    return RowProof(unproven=frozenset([*places, *different]))


def _watch_neighbours(
    run: Forward, rows: Inputs, inputs: Sequence[InputSpec], create_recorder: Callable[[], CallRecorder]
) -> CallRecorder | None:
    """A forward of the same row beside others; beside milder ones if a model takes no such numbers."""
    for scaled in (True, False):
        recorder = create_recorder()
        try:
            recorder.watch(run, replace_neighbours(rows, inputs, scaled=scaled))
        except Exception as error:  # whatever a model raises, it means the same: not beside these
            if is_device_error(error):
                raise
            continue
        return recorder
    return None


def _varies(several: CallRecorder, run: Forward, rows: Inputs, create_recorder: Callable[[], CallRecorder]) -> bool:
    """Whether the very same forward gives other bits."""
    again = create_recorder()
    again.watch(run, {name: value.clone() for name, value in rows.items()})
    differs = bool(_list_different(several, again, exact=True))
    again.release()
    return differs


def _list_different(one: CallRecorder, other: CallRecorder, *, exact: bool) -> list[Place]:
    found, others = dict(_iterate_sketches(one)), dict(_iterate_sketches(other))
    return [place for place, sketch in found.items() if not _is_same(sketch, others.get(place), exact)]


def _iterate_sketches(recorder: CallRecorder) -> Iterator[tuple[Place, Sketch]]:
    for calls in recorder.calls.values():
        for call in calls:
            for each in (call, *call.functions.values()):
                yield from _iterate_of_call(each)


def _iterate_of_call(call: CallObservation) -> Iterator[tuple[Place, Sketch]]:
    for boundary, tensors in call.tensors.items():
        for path, observation in tensors.items():
            yield (call.address, boundary, path), observation.sketch


def _is_same(one: Sketch, other: Sketch | None, exact: bool) -> bool:
    return other is not None and (one.bits == other.bits if exact else one.matches(other))


def _is_same_turned(run: Forward, rows: Inputs, flag: int, tolerance: float) -> bool:
    """Whether the quiet row's output stays what it is where a flag has its other value."""
    usual, turned = try_forward(run, {name: value.clone() for name, value in rows.items()}), run_turned(run, rows, flag)
    return turned is not None and has_same_values(_select_quiet(usual), _select_quiet(turned), tolerance)


def _select_quiet(output: object) -> TensorsByPath:
    """The quiet row of what a model returned, as far as rows are on axis 0."""
    return TensorsByPath((path, tensor[QUIET : QUIET + 1]) for path, tensor in iterate_tensors(output) if tensor.ndim)
