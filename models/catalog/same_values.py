"""Whether two forwards returned the same floating numbers, but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from layertap.models.hooks.tensor_tree import iterate_tensors


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
    one, other = one.float(), other.float()
    largest = torch.where(one.isfinite(), one.abs(), 0.0).amax() if one.numel() else 0.0
    return torch.allclose(other, one, rtol=0.0, atol=tolerance * max(float(largest), 1e-6), equal_nan=True)
