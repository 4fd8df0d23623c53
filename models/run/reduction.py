"""Reduce a captured tensor on its device as the request asked: narrow, pool, sample, normalise, cast.

Padding counts in no pooling (``plan/poolings.py``) and no statistic (``plan/statistics.py``). Floating results
are computed in float32 whatever the model's dtype is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.devices.devices import DTYPES
from layertap.models.devices.transfer import to_plain
from layertap.models.plan.objectives import compute_objectives
from layertap.models.plan.poolings import POOLINGS, average_to_grid
from layertap.models.plan.projections import project
from layertap.models.plan.requested import BY_AXIS, Reduction
from layertap.models.plan.statistics import get_statistic

A = TypeVar("A", Tensor, npt.NDArray[Any])


@dataclass(frozen=True)
class Reduced(Generic[A]):
    """What is kept of a capture: ``values`` is C-contiguous; ``scale`` (axis 0) is there for int8."""

    values: A
    scale: A | None = None

    @property
    def parts(self) -> tuple[A, ...]:
        """The values, and the scale if it is there."""
        return (self.values,) if self.scale is None else (self.values, self.scale)


ReducedTensor = Reduced[Tensor]
ReducedArray = Reduced[npt.NDArray[Any]]  # in host memory, for what knows no torch


def own_memory(reduced: ReducedTensor, captured: Tensor | None = None) -> ReducedTensor:
    """The result itself, or a copy if its memory is shared with the captured tensor or holds anything else."""
    # A slice pins the whole storage that it looks into, and what the model owns may still change.
    alone = all(part.untyped_storage().nbytes() == part.nbytes for part in reduced.parts)
    shared = captured is not None and _shares_memory(reduced.values, captured)
    return reduced if alone and not shared else Reduced(*map(torch.clone, reduced.parts))


def reduce(captured: RowTensor, reduction: Reduction, length: int | None = None) -> ReducedTensor:
    """Apply a reduction to a captured tensor; never returns memory that the model may still write to.

    Indices of tokens count from the row's first own token, negative ones from its last; InputError if it has no such
    token. Per-token results have an entry for each of the first ``length`` positions, 0 for padding; without ``length``
    all tokens stay as they are unless they are combined or named.
    """
    if reduction.project is not None:
        plain = replace(captured, value=to_plain(captured.value))
        return reduce(project(plain, reduction.project), replace(reduction, project=None), length)
    if reduction.grid is not None:
        plain = replace(captured, value=to_plain(captured.value))
        return reduce(average_to_grid(plain, reduction.grid), replace(reduction, grid=None), length)
    mask = captured.token_mask
    if mask is None or not captured.is_padded:
        whole = _combine(_narrow(captured, reduction), reduction)
    else:
        whole = _reduce_padded(captured, reduction, mask.shape[1] if length is None else length, length is None)
    return own_memory(_cast(whole, reduction), captured.value)


def _reduce_padded(captured: RowTensor, reduction: Reduction, size: int, keeps_padding: bool) -> Tensor:
    """Strip each row of its padding, reduce it, and put entries for single tokens back where these were."""
    letters, indices = dict(enumerate(captured.info.layout or "")), reduction.indices_by_axis
    if captured.info.row_axis is None:
        return _combine(_narrow(_cut(captured, reduction, size), reduction), reduction)
    is_pooled = reduction.stats is None and reduction.metric is None
    keeps_axes = is_pooled and not POOLINGS[reduction.pool].by_channel
    if keeps_axes and keeps_padding and not any(letters.get(axis) in indices for axis in captured.info.token_axes):
        return _combine(_narrow(captured, reduction), reduction)
    along = "C" if is_pooled else BY_AXIS[reduction.by] if reduction.by else None  # axis 1 of what combines tokens
    rows = []
    for row, own in zip(captured.strip(size), captured.list_own_tokens(size), strict=True):
        kept = [(axis, tokens) for axis, tokens in own if letters.get(axis) not in indices]
        part = _narrow(row, reduction)
        if keeps_axes:
            rows.append(_put_back(part.value, kept, size))
        else:
            kept = [(1, tokens) for axis, tokens in kept if along and letters.get(axis) == along]
            rows.append(_put_back(_combine(part, reduction), kept, size))
    if not keeps_axes:
        return torch.cat(rows)
    return _combine(RowTensor(captured.concat(rows), captured.info.with_length(size)), reduction)


def _cut(captured: RowTensor, reduction: Reduction, size: int) -> RowTensor:
    """The first tokens of a tensor that is the same for all rows; along an axis with named ones, those that rows keep.

    Nothing else of it depends on the mask, and so on who shares the forward.
    """
    letters, value = captured.info.layout or "", captured.value
    (own,) = captured.list_own_tokens(size)
    for axis, tokens in own:
        is_named = letters[axis : axis + 1] in reduction.indices_by_axis
        value = value.index_select(axis, tokens.to(value.device)) if is_named else value.narrow(axis, 0, size)
    return RowTensor(value, replace(captured.info, shape=tuple(value.shape)))


def apply_reduction(captured: RowTensor, reduction: Reduction) -> ReducedTensor:
    """The numbers of a reduction of a tensor without padding; they may be in the captured tensor's memory."""
    return _cast(_combine(_narrow(captured, reduction), reduction), reduction)


def _narrow(rows: RowTensor, reduction: Reduction) -> RowTensor:
    if reduction.metric is not None:
        return rows
    return replace(rows, value=replace(rows, value=to_plain(rows.value)).index_select(reduction.indices_by_axis))


def _combine(rows: RowTensor, reduction: Reduction) -> Tensor:
    """Narrowed rows after the objective, the statistics or the pooling that is asked for."""
    if reduction.metric is not None:
        return compute_objectives(rows, reduction.metric)
    if reduction.stats is not None:
        groups = rows.positions(along=BY_AXIS[reduction.by]) if reduction.by else rows.group().flatten(1)
        keys = rows.value.shape[rows.info.axis("K")] if rows.info.has_axis("K") else None
        return compute_statistics(to_floating(groups), reduction.stats, reduction.edges, keys)
    pooling = POOLINGS[reduction.pool]
    skips_prefix = reduction.tokens is None and pooling.skips_prefix
    value = rows.value if pooling.compute is None else pooling.compute(rows, rows.info.prefix if skips_prefix else 0)
    if reduction.sample is not None:
        chosen = np.random.default_rng(reduction.sample.seed).choice(
            value.shape[1], reduction.sample.units, replace=False
        )
        value = value.index_select(1, torch.from_numpy(chosen).to(value.device))
    return torch.nn.functional.normalize(to_floating(value), dim=-1) if reduction.normalize else value


def _cast(value: Tensor, reduction: Reduction) -> ReducedTensor:
    if reduction.metric is not None or reduction.stats is not None:
        return Reduced(value.to(torch.float32).contiguous())
    if reduction.dtype == "int8" and value.is_floating_point():
        return _quantize(value)
    return Reduced((value.to(DTYPES[reduction.dtype]) if value.is_floating_point() else value).contiguous())


def _put_back(value: Tensor, tokens_by_axis: Sequence[tuple[int, Tensor]], size: int) -> Tensor:
    """The entries of a row's own tokens at the tokens' positions along axes of this size; 0 elsewhere."""
    for axis, tokens in tokens_by_axis:
        zeros = value.new_zeros([size if each == axis else entries for each, entries in enumerate(value.shape)])
        value = zeros.index_copy(axis, tokens.to(value.device), value)
    return value


def compute_statistics(
    values: Tensor, stats: Iterable[str], edges: Sequence[float] | None = None, keys: int | None = None
) -> Tensor:
    """Statistics of floating (…, values of each group, at least one) as float32 (…, columns)."""
    groups = values.flatten(0, -2).contiguous()  # a sum along another axis than the innermost is rounded by the others
    computed = [get_statistic(name, edges, keys).compute(groups) for name in stats]
    columns = [each.to(torch.float32).reshape(len(groups), -1) for each in computed]
    return torch.cat(columns, dim=1).reshape(*values.shape[:-1], -1)


def _quantize(value: Tensor) -> ReducedTensor:
    """Symmetric int8 with one float32 scale for each index of axis 0: value ≈ int8 × scale.

    Where a value is not finite the scale of that index is NaN.
    """
    flat = value.to(torch.float32).reshape(value.shape or (1,)).unsqueeze(-1).flatten(1)
    largest = flat.abs().amax(-1) if flat.shape[-1] else flat.new_zeros(len(flat))
    scale = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    whole = torch.nan_to_num(flat / scale[:, None], 0.0).round().to(torch.int8)
    return Reduced(whole.reshape(value.shape).contiguous(), scale)


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
