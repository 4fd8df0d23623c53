"""Reduce a captured tensor on its device as the request asked: narrow, pool, normalise, cast.

``selection/poolings.py`` has the poolings and ``selection/statistics.py`` what may be asked for in their place. Tokens
that only pad a text stay out of both; the first token of a text is the first that its mask keeps. Floating results are
computed in float32 whatever the model's dtype is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.devices.devices import DTYPES
from layertap.models.devices.transfer import to_plain
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.projections import project
from layertap.models.plan.requested import BY_AXIS, Reduction
from layertap.models.plan.statistics import get_statistic
from layertap.models.run.gradient_anchors import compute_objectives


@dataclass(frozen=True)
class ReducedArray:
    """A result that has left torch: a ``ReducedTensor`` as C-contiguous arrays in host memory."""

    values: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None = None

    @property
    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """The values, and the scale if it is there."""
        return (self.values,) if self.scale is None else (self.values, self.scale)


@dataclass(frozen=True)
class ReducedTensor:
    """What is kept of a capture: ``values`` is contiguous; ``scale`` (axis 0) is there for int8."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The values, and the scale if it is there."""
        return (self.values,) if self.scale is None else (self.values, self.scale)

    def clone(self) -> ReducedTensor:
        """A copy."""
        return ReducedTensor(*map(torch.clone, self.parts))

    def numpy(self) -> ReducedArray:
        """The same memory as arrays; the tensors are on the host."""
        return ReducedArray(self.values.numpy(), None if self.scale is None else self.scale.numpy())


def own_memory(reduced: ReducedTensor, captured: Tensor | None = None) -> ReducedTensor:
    """The result itself, or a copy if its memory is shared with the captured tensor or holds anything else."""
    # A slice pins the whole storage that it looks into, and what the model owns may still change.
    alone = all(part.untyped_storage().nbytes() == part.nbytes for part in reduced.parts)
    shared = captured is not None and _shares_memory(reduced.values, captured)
    return reduced if alone and not shared else reduced.clone()


def reduce(captured: RowTensor, reduction: Reduction, length: int | None = None) -> ReducedTensor:
    """Apply a reduction to a captured tensor; never returns memory that the model may still write to.

    Pooling and statistics ignore padding; per-token results are cut to ``length`` and zero-filled. Indices of tokens
    count from the row's first own token, negative ones from its last. InputError if it has no such token.
    """
    if reduction.project is not None:
        plain = replace(captured, value=to_plain(captured.value))
        return reduce(project(plain, reduction.project), replace(reduction, project=None), length)
    part = captured
    if captured.token_mask is not None and captured.info.token_axes and reduction.metric is None:
        if _is_of_whole_rows(captured.info, reduction):
            if captured.is_padded:
                return _reduce_row_by_row(_align_kept(captured, reduction, length), reduction)
        else:
            part = part if length is None else part.truncate(length)
            part = part.move_padding_last("".join(_find_numbered_axes(part.info, reduction)))
    return own_memory(apply_reduction(part, reduction), captured.value)


def apply_reduction(captured: RowTensor, reduction: Reduction) -> ReducedTensor:
    """The numbers of a reduction, in whatever memory they are: of the captured tensor, where they are its own."""
    if reduction.metric is not None:
        return ReducedTensor(compute_objectives(captured, reduction.metric).to(torch.float32).contiguous())
    value = replace(captured, value=to_plain(captured.value)).index_select(reduction.indices_by_axis)
    rows = replace(captured, value=value)
    if reduction.stats is not None:
        groups = rows.positions(along=BY_AXIS[reduction.by]) if reduction.by else rows.group().flatten(1)
        keys = value.shape[rows.info.axis("K")] if rows.info.has_axis("K") else None
        return ReducedTensor(compute_statistics(to_floating(groups), reduction.stats, reduction.edges, keys))
    pool = POOLINGS[reduction.pool].compute
    if pool is not None:
        value = pool(rows, _count_skipped(rows.info, reduction))
    if reduction.normalize:
        value = torch.nn.functional.normalize(to_floating(value), dim=-1)
    if reduction.dtype == "int8" and value.is_floating_point():
        return _quantize(value)
    if value.is_floating_point():
        value = value.to(DTYPES[reduction.dtype])
    return ReducedTensor(value.contiguous())


def compute_statistics(
    values: Tensor, stats: Iterable[str], edges: Sequence[float] | None = None, keys: int | None = None
) -> Tensor:
    """Statistics of floating (…, values of each group, at least one) as float32 (…, columns)."""
    groups = values.flatten(0, -2).contiguous()  # a sum along another axis than the innermost is rounded by the others
    computed = [get_statistic(name, edges, keys).compute(groups) for name in stats]
    columns = [each.to(torch.float32).reshape(len(groups), -1) for each in computed]
    return torch.cat(columns, dim=1).reshape(*values.shape[:-1], -1)


def _align_kept(captured: RowTensor, reduction: Reduction, length: int | None) -> RowTensor:
    """What is reduced row by row, with as many entries in every row where a result has one for each token."""
    kept = _find_kept_axes(captured.info, reduction)
    if length is None or not kept:
        return captured
    letters = "".join(letter for letter, axis in _find_numbered_axes(captured.info, reduction).items() if axis in kept)
    aligned = captured.truncate(length).move_padding_last(letters)
    token_axes = tuple(axis for axis in aligned.info.token_axes if axis not in kept)
    return replace(aligned, info=replace(aligned.info, token_axes=token_axes))


def _reduce_row_by_row(captured: RowTensor, reduction: Reduction) -> ReducedTensor:
    """Each row as it would be reduced without the tokens that pad it."""
    rows = [reduce(row, reduction) for row in captured.strip()]
    scales = [row.scale for row in rows if row.scale is not None]
    values = [row.values for row in rows]
    whole = torch.cat(values) if reduction.is_by_row else captured.concat(values)
    return ReducedTensor(whole, torch.cat(scales) if scales else None)


def _is_of_whole_rows(info: TensorInfo, reduction: Reduction) -> bool:
    """Whether a reduction makes numbers of all tokens of a row, or counts some of them from the end."""
    numbered = _find_numbered_axes(info, reduction)
    from_end = {letter for letter, indices in reduction.indices_by_axis.items() if min(indices) < 0}
    if any(axis in info.token_axes and letter in from_end for letter, axis in numbered.items()):
        return True
    combines = POOLINGS[reduction.pool].combines or reduction.stats is not None
    return combines and not set(numbered.values()).issuperset(info.token_axes)


def _find_kept_axes(info: TensorInfo, reduction: Reduction) -> set[int]:
    """The axes of tokens along which a result has an entry for each of them."""
    layout = info.layout or ""
    if reduction.stats is not None or POOLINGS[reduction.pool].by_channel:
        by = reduction.by if reduction.stats is not None else "channel"
        letters = BY_AXIS[by] if by else ""
    else:
        letters = "".join(set(layout) - set(_find_numbered_axes(info, reduction)))
    return {axis for axis, letter in enumerate(layout) if letter in letters and axis in info.token_axes}


def _find_numbered_axes(info: TensorInfo, reduction: Reduction) -> dict[str, int]:
    """The axes along which a reduction takes entries by their numbers, by their letters in the layout."""
    first = {"T"} if POOLINGS[reduction.pool].first_token else set[str]()
    letters = first | set(reduction.indices_by_axis)
    return {letter: axis for axis, letter in enumerate(info.layout or "") if letter in letters}


def _count_skipped(info: TensorInfo, reduction: Reduction) -> int:
    """How many tokens at the front a pool leaves out."""
    return info.prefix if reduction.tokens is None and POOLINGS[reduction.pool].skips_prefix else 0


def _quantize(value: Tensor) -> ReducedTensor:
    """Symmetric int8 with one float32 scale for each index of axis 0: value ≈ int8 × scale.

    Where a value is not finite the scale of that index is NaN.
    """
    flat = value.to(torch.float32).reshape(value.shape or (1,)).unsqueeze(-1).flatten(1)
    largest = flat.abs().amax(-1) if flat.shape[-1] else flat.new_zeros(len(flat))
    scale = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    whole = torch.nan_to_num(flat / scale[:, None], 0.0).round().to(torch.int8)
    return ReducedTensor(whole.reshape(value.shape).contiguous(), scale)


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
