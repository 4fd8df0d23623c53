"""A captured tensor made into what the request asked for, on its device: narrow, pool, normalise, cast.

``mean``, ``max`` and ``gem`` reduce every axis but rows and channels to (N, C); prefix tokens stay out of them, and so
do those that only pad a text. ``mean_all`` is ``mean`` with prefix tokens.
``cls`` is the first token as (N, C), of a text the first that its mask keeps. ``flatten`` is (N, everything else).
``none`` keeps the tensor as the hook saw it. Floating results are computed in float32 whatever the model's dtype is.
``statistics.py`` has what may be asked for in place of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from layertap.models.capture import statistics
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.padding import is_padded, move_padding_last, strip_padding, truncate
from layertap.models.errors import InputError
from layertap.models.selection.hook_points import Reduction

GEM_P = 3.0  # the exponent of Radenović et al., "Fine-tuning CNN image retrieval with no human annotation", 2018
GEM_EPS = 1e-6


@dataclass(frozen=True)
class ReducedTensor:
    """What is kept of a capture: ``values`` is contiguous; ``scale`` (axis 0) is there for int8."""

    values: Tensor
    scale: Tensor | None = None


def reduce(
    value: Tensor, leaf: TensorInfo, how: Reduction, real: Tensor | None = None, length: int | None = None
) -> ReducedTensor:
    """Apply a reduction to a captured tensor; never returns memory that the model may still write to.

    ``real`` (rows, tokens) is False where a token only pads its row: what is made of all tokens leaves it out, what
    is kept of each has ``length`` of them, 0 where one is no token of its row. What is named by its number is counted
    from the row's first own token. InputError where nothing is left of a row.
    """
    kept = value
    if real is not None and leaf.token_axes:
        if how.tokens is None and (how.pool in OF_ALL or how.stats is not None):
            if is_padded(leaf, real):
                value, leaf, real = _with_channels(value, leaf, how, real, length)
                return _row_by_row(value, leaf, how, real)
        else:
            if length is not None:
                kept, leaf = truncate(value, leaf, length, real)
            kept = move_padding_last(kept, leaf, _numbered(how), real[:, :length])
    return ensure_owned(apply_reduction(kept, leaf, how), value)


def apply_reduction(value: Tensor, leaf: TensorInfo, how: Reduction) -> ReducedTensor:
    """The numbers of a reduction, in whatever memory they are: of the captured tensor, where they are its own."""
    kept = _narrow(value, leaf.layout, how)
    if how.stats is not None:
        return ReducedTensor(
            statistics.compute_statistics(_to_floating(move_rows_first(kept, leaf).values.flatten(1)), how.stats)
        )
    if how.pool != "none":
        kept = POOLS[how.pool](move_rows_first(kept, leaf), _left_out(leaf, how))
    if how.normalize:
        kept = torch.nn.functional.normalize(_to_floating(kept), dim=-1)
    if how.dtype == "int8" and kept.is_floating_point():
        return _quantize(kept)
    if kept.is_floating_point():
        kept = kept.to(CASTS[how.dtype])
    return ReducedTensor(kept.contiguous())


def ensure_owned(found: ReducedTensor, value: Tensor) -> ReducedTensor:
    """The same in memory that holds nothing else, and that is not a captured tensor's."""
    kept = found.values
    # A slice pins the whole storage that it looks into, and what the model owns may still change.
    alone = kept.untyped_storage().nbytes() == kept.nbytes and not _shares(kept, value)
    return found if alone else replace(found, values=kept.clone())


def compute_reduced_shape(leaf: TensorInfo, how: Reduction, rows: int) -> tuple[int, ...]:
    """The shape that ``reduce`` gives for a forward of ``rows`` rows."""
    if how.stats is not None:
        return (rows, len(statistics.list_columns(how.stats)))
    shape = list(leaf.shape_for(rows))
    for axis, chosen in (("C", how.channels), ("T", how.tokens)):
        if chosen is not None and leaf.layout is not None:
            shape[leaf.layout.index(axis)] = len(chosen)
    if how.pool == "none":
        return tuple(shape)
    if how.pool == "flatten":
        return (rows, prod(shape) // rows)
    return (rows, shape[leaf.layout.index("C")] if leaf.layout and "C" in leaf.layout else 1)


def _with_channels(
    value: Tensor, leaf: TensorInfo, how: Reduction, real: Tensor, length: int | None
) -> tuple[Tensor, TensorInfo, Tensor]:
    """What is reduced row by row, with as many channels in every row: where tokens are these, a pool keeps them."""
    channel = (leaf.layout or "").find("C")
    if how.stats is not None or length is None or channel not in leaf.token_axes:
        return value, leaf, real
    value, leaf = truncate(value, leaf, length, real)
    real = real[:, :length]
    others = tuple(axis for axis in leaf.token_axes if axis != channel)
    return move_padding_last(value, leaf, _numbered(how), real), replace(leaf, token_axes=others), real


def _row_by_row(value: Tensor, leaf: TensorInfo, how: Reduction, real: Tensor) -> ReducedTensor:
    """Each row as it would be reduced without the tokens that pad it."""
    if bool((real.sum(1) <= _left_out(leaf, how)).any()):
        raise InputError("an input has no token but its class token, so there is nothing to pool")
    found = [reduce(row, own, how) for row, own in strip_padding(value, leaf, real)]
    scales = [each.scale for each in found if each.scale is not None]
    return ReducedTensor(torch.cat([each.values for each in found]), torch.cat(scales) if scales else None)


def _numbered(how: Reduction) -> str:
    """The axes along which a reduction takes some by their numbers."""
    by_number = {"T": how.tokens is not None or how.pool == "cls", "C": how.channels is not None}
    return "".join(letter for letter, chosen in by_number.items() if chosen)


def _left_out(leaf: TensorInfo, how: Reduction) -> int:
    """How many tokens at the front a pool leaves out."""
    return 0 if how.tokens is not None or how.pool == "mean_all" else leaf.prefix


def _narrow(value: Tensor, layout: str | None, how: Reduction) -> Tensor:
    for axis, chosen in (("C", how.channels), ("T", how.tokens)):
        if chosen is not None and layout is not None:
            index = torch.tensor(chosen, device=value.device)
            value = value.index_select(layout.index(axis), index)
    return value


@dataclass(frozen=True)
class RowView:
    """A tensor as (N, entries per row, …); ``channel`` is the axis of channels, None where there is none."""

    values: Tensor
    channel: int | None

    def positions(self, skip: int) -> Tensor:
        """As (N, channels, positions): pixels or tokens in order, without the first ``skip``.

        Contiguous: a sum along another axis than the innermost is rounded by how many rows there are beside it.
        """
        if self.channel is None:
            return self.values.flatten(1).unsqueeze(1)
        return self.values.movedim(self.channel, 1).flatten(2)[:, :, skip:].contiguous()


def move_rows_first(value: Tensor, leaf: TensorInfo) -> RowView:
    """A leaf's tensor with its rows first, what belongs to one of them beside each other."""
    axis = leaf.row_axis or 0
    first = value.movedim(axis, 0)
    values = first.reshape(first.shape[0] // leaf.entries_per_row, leaf.entries_per_row, *first.shape[1:])
    letters = (leaf.layout or "").replace("N", "")
    return RowView(values, letters.index("C") + 2 if "C" in letters else None)


def _mean(rows: RowView, skip: int) -> Tensor:
    return _to_floating(rows.positions(skip)).mean(-1)


def _max(rows: RowView, skip: int) -> Tensor:
    return rows.positions(skip).amax(-1)


def _gem(rows: RowView, skip: int) -> Tensor:
    mean = _to_floating(rows.positions(skip)).clamp(min=GEM_EPS).pow(GEM_P).mean(-1)
    # A root of several numbers at once is rounded otherwise than that of one: in float64 the difference is cut off.
    return mean.double().pow(1.0 / GEM_P).to(mean.dtype)


def _cls(rows: RowView, skip: int) -> Tensor:
    return rows.positions(0)[:, :, 0]


def _flatten(rows: RowView, skip: int) -> Tensor:
    return rows.values.flatten(1)


def _to_floating(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float64 else value.to(torch.float32)


def _quantize(value: Tensor) -> ReducedTensor:
    """Symmetric int8 with one float32 scale for each index of axis 0: value ≈ int8 × scale.

    Where a value is not finite nothing of that index can be told: its scale is NaN.
    """
    flat = value.to(torch.float32).reshape(value.shape[0], -1) if value.ndim else value.reshape(1, 1)
    scale = (flat.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    whole = torch.nan_to_num(flat / scale[:, None], 0.0).round().to(torch.int8)
    return ReducedTensor(whole.reshape(value.shape).contiguous(), scale)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


POOLS: dict[str, Callable[[RowView, int], Tensor]] = {
    "mean": _mean,
    "mean_all": _mean,
    "max": _max,
    "gem": _gem,
    "cls": _cls,
    "flatten": _flatten,
}

CASTS = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
OF_ALL = frozenset({"mean", "mean_all", "max", "gem"})  # pools that make one number of all tokens
