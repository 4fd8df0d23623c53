"""Whether rows may share a forward: a row has the same bits beside other neighbours, and nothing is shared by rows.

Each tensor of the model is looked at, since inner layers may hold rows in another order than the output does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.observations import Place
from layertap.models.catalog.shared_values import TrackedForward
from layertap.models.catalog.trials import has_same_values, try_forward
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.hooks.tensor_tree import TensorsByPath, iterate_tensors
from layertap.models.inputs.noise import QUIET, copy_rows, replace_neighbours
from layertap.models.spec import InputSpec


def prove_rows(
    module: nn.Module,
    run: Forward,
    rows: Inputs,
    inputs: Sequence[InputSpec],
    several: CallRecorder,
    create_recorder: Callable[[], CallRecorder],
    tolerance: float,
) -> frozenset[Place] | None:
    """The tensors whose rows are not known to be their own; None if that is so of what the model returns.

    What ``several`` recorded of a forward of these rows, three or more, is compared with the same row beside others.
    """
    fewer = TrackedForward(module, run, {name: value[:2] for name, value in rows.items()})
    whole = TrackedForward(module, run, rows, fewer)

    def watch(rows: Inputs) -> CallRecorder | None:
        return try_forward(create_recorder().watch, run, rows)

    if whole.crosses_rows or not all(_is_same_turned(whole, flag, tolerance) for flag in whole.flags):
        return None
    # Beside milder ones if a model takes no such numbers.
    beside = watch(replace_neighbours(rows, inputs)) or watch(replace_neighbours(rows, inputs, scaled=False))
    if beside is None:
        return None
    different = _list_different(several, beside, exact=True)
    if different:  # some devices add in another order each time: the very same forward has other bits
        again = create_recorder().watch(run, copy_rows(rows))
        if _list_different(several, again, exact=True):
            different = _list_different(several, beside, exact=False)
    return frozenset([*whole.places, *different])


def _list_different(one: CallRecorder, other: CallRecorder, *, exact: bool) -> list[Place]:
    others = other.list_sketches()
    return [
        place
        for place, sketch in one.list_sketches().items()
        if place not in others or not (sketch.bits == others[place].bits if exact else sketch.matches(others[place]))
    ]


def _is_same_turned(whole: TrackedForward, flag: int, tolerance: float) -> bool:
    """Whether the quiet row's output stays what it is where a flag has its other value."""
    turned = whole.turn(flag).output
    return turned is not None and has_same_values(_select_quiet(whole.output), _select_quiet(turned), tolerance)


def _select_quiet(output: object) -> TensorsByPath:
    """The quiet row of what a model returned, as far as rows are on axis 0."""
    return TensorsByPath((path, tensor[QUIET : QUIET + 1]) for path, tensor in iterate_tensors(output) if tensor.ndim)
