"""Trials when a model is loaded: the same row again, kinds of outputs, and texts with padding on either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from layertap.models.catalog.row_tensor import is_near
from layertap.models.catalog.taint import MarkedMemory
from layertap.models.devices.devices import TOLERANCE, use_threads
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.devices.turns import block_construction
from layertap.models.hooks.tensor_tree import Path, TensorsByPath, iterate_tensors
from layertap.models.inputs.model_inputs import POSITIONS, TextSpec, number_tokens
from layertap.models.inputs.noise import LOUDER, copy_rows, make_noise
from layertap.models.labels import Outputs
from layertap.models.spec import InputSpec, LeftPadding

T = TypeVar("T")
ROUNDING = TOLERANCE["float32"]  # whatever the model computes in: the same kernels take the same numbers
SHORT, LONG, IN_FRONT = 5, 64, 3  # tokens of a text, at most of its neighbour, of padding in front


def run_alone(run: Forward, row: Inputs) -> TensorsByPath:
    """A copy of what a model returns for a row, on one thread without hooks: kernels that differ round otherwise."""
    with use_threads(1):
        output = run(copy_rows(row))  # it may write to its input
        return TensorsByPath((path, tensor.clone()) for path, tensor in iterate_tensors(output))


def is_same_again(run: Forward, row: Inputs, output: TensorsByPath) -> bool:
    """Whether a model returns the same for a row again, twice, after a transposed and a loud one; but for rounding.

    Meanwhile no construction sets the generator back, so that the two runs draw different random numbers.
    """
    for change in (_transpose, lambda value: value * LOUDER):
        floats = {name: change(value) for name, value in row.items() if value.is_floating_point()}
        try_forward(run, copy_rows(row) | floats)
    with block_construction():
        return all(has_same_values(output, run_alone(run, row), ROUNDING) for _ in range(2))


def _transpose(value: Tensor) -> Tensor:
    """Rows with their last two axes exchanged; reversed if there is one axis."""
    return value.transpose(-1, -2).contiguous() if value.ndim > 2 else value.flip(-1)


def find_outputs(returned: object, of_sigmoids: MarkedMemory) -> tuple[tuple[Path, Outputs], ...]:
    """Which of the returned tensors are class probabilities, or log-probabilities, by path.

    Those are tensors that sum to 1 along an axis, and outputs of a sigmoid.
    """
    found: dict[Path, Outputs] = {}
    for path, tensor in iterate_tensors(returned):
        if not tensor.is_floating_point() or not tensor.numel() or not tensor.isfinite().all():
            continue
        if of_sigmoids.has_any([tensor]) or (tensor.min() >= 0 and _adds_up(tensor)):
            found[path] = "probabilities"
        elif tensor.max() <= 0 and _adds_up(tensor.exp()):
            found[path] = "log_probabilities"
    return tuple(found.items())


def _adds_up(tensor: Tensor) -> bool:
    """Whether numbers add up to 1 along the axis of classes, the second or the last one."""
    axes = {min(1, tensor.ndim - 1), tensor.ndim - 1} if tensor.ndim else set()
    tolerance = 1e-4 if tensor.dtype.itemsize > 2 else 2e-2
    sums = [tensor.float().sum(axis) for axis in axes if tensor.shape[axis] > 1]
    return any(bool(((each - 1).abs() <= tolerance).all()) for each in sums)


def try_padding(run: Forward, text: TextSpec, device: torch.device, tolerance: float) -> tuple[bool, LeftPadding]:
    """Whether texts may be padded to share forwards, and how padding in front of one is given to the model.

    Values are the same within ``tolerance`` of a tensor's largest number. Device errors are raised.
    """
    if text.mask is None or text.max_tokens < SHORT + IN_FRONT:
        return text.pads, "as sent"
    long = InputSpec(text.ids, (min(text.max_tokens, LONG),), "int64", values=(0, text.vocabulary * text.marks))
    drawn = make_noise([long], device, torch.float32)[text.ids]
    short, padding = drawn[:1, :SHORT], torch.full_like(drawn[:1], text.pad)

    def forward(ids: Tensor, mask: Tensor, numbers: Tensor | None = None) -> object:
        rows = {text.ids: ids.clone(), text.mask or "": mask}
        return try_forward(run, rows if numbers is None else rows | {POSITIONS: numbers})

    def is_same_behind(size: int) -> bool:
        ids, mask = drawn[:2].clone(), torch.ones_like(drawn[:2])
        ids[0, size:], mask[0, size:] = text.pad, 0
        row = ids[:1, :size]
        alone = forward(row, torch.ones_like(row))
        return alone is None or has_same_values(alone, forward(ids, mask), tolerance)

    alone = forward(short, torch.ones_like(short))
    if alone is None:  # the model takes no text this short
        return text.pads, "as sent"
    # Models that attend in blocks meet padding at some lengths only.
    pads = text.pads and all(map(is_same_behind, (SHORT, drawn.shape[1] * 2 // 3)))
    if text.pads and not pads:  # padding in front would shift the blocks, too
        return False, "refused"
    in_front = torch.cat([padding[:, :IN_FRONT], short], 1)
    mask = torch.ones_like(in_front)
    mask[:, :IN_FRONT] = 0
    if has_same_values(alone, forward(in_front, mask), tolerance, IN_FRONT):
        return pads, "as sent"
    is_numbered = has_same_values(alone, forward(in_front, mask, number_tokens(mask)), tolerance, IN_FRONT)
    return pads, "numbered" if is_numbered else "refused"


def try_forward(forward: Callable[..., T], *given: Any) -> T | None:
    """What a forward returns; None if the model raises, whatever that is. Device errors are raised."""
    try:
        return forward(*given)
    except Exception as error:
        if is_device_error(error):
            raise
        return None


def has_same_values(one: object, other: object, tolerance: float, start: int = 0) -> bool:
    """Whether all floating tensors of a value are in another, within a share of their largest number.

    Along an axis that is longer in the other they begin at ``start``: there are further tokens, or rows.
    """
    others = dict(iterate_tensors(other))
    return all(
        _is_part(tensor, others.get(path), tolerance, start)
        for path, tensor in iterate_tensors(one)
        if tensor.is_floating_point()
    )


def _is_part(one: Tensor, other: Tensor | None, tolerance: float, start: int) -> bool:
    if other is None or other.ndim != one.ndim:
        return False
    for axis, size in enumerate(one.shape):
        if other.shape[axis] != size:
            if other.shape[axis] < start + size:
                return False
            other = other.narrow(axis, start, size)
    return is_near(one, other, tolerance)
