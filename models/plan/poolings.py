"""Poolings, which turn each row of a captured tensor into a vector: a function and an entry of a table for each.

A function gets the rows and the number of prefix tokens to leave out, and calls only tensor methods. ``mean``, ``max``
and ``gem`` reduce every axis but rows and channels to (N, C); ``mean_all`` is ``mean`` with prefix tokens.
``cls`` is the first token as (N, C), ``last`` the last token that is no padding. ``flatten`` is (N, everything else).
``none`` keeps the tensor as the hook saw it. ``average_to_grid`` comes before a pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor, to_floating
from layertap.models.points import Grid
from layertap.models.spec import Pool

GEM_P = 3.0  # the exponent of Radenović et al., "Fine-tuning CNN image retrieval with no human annotation", 2018
GEM_EPS = 1e-6


@dataclass(frozen=True)
class Pooling:
    """A pooling and its properties."""

    compute: Callable[[RowTensor, int], Tensor] | None  # None: the tensor stays as it is
    by_channel: bool = True  # the result is (N, C), so the layout must be known
    combines: bool = True  # values are combined: padding must be left out, and the rows of a batch kept apart
    averages: bool = False  # integers become floats
    skips_prefix: bool = True  # class and register tokens are left out
    first_token: bool = False  # the first token is taken
    last_token: bool = False  # the last token before the row's padding is taken


def _mean(rows: RowTensor, skip: int) -> Tensor:
    return to_floating(rows.positions(skip)).mean(-1)


def _gem(rows: RowTensor, skip: int) -> Tensor:
    mean = to_floating(rows.positions(skip)).clamp(min=GEM_EPS).pow(GEM_P).mean(-1)
    # Vectorised pow rounds differently from scalar pow: float64 makes the result the same for any batch.
    return mean.double().pow(1.0 / GEM_P).to(mean.dtype)


POOLINGS: Mapping[Pool, Pooling] = {
    "none": Pooling(None, by_channel=False, combines=False),
    "mean": Pooling(_mean, averages=True),
    "mean_all": Pooling(_mean, averages=True, skips_prefix=False),
    "max": Pooling(lambda rows, skip: rows.positions(skip).amax(-1)),
    "gem": Pooling(_gem, averages=True),
    "cls": Pooling(lambda rows, skip: rows.positions()[:, :, 0], combines=False, first_token=True),
    "last": Pooling(lambda rows, skip: rows.positions()[:, :, -1], skips_prefix=False, last_token=True),
    "flatten": Pooling(lambda rows, skip: rows.group().flatten(1), by_channel=False, combines=False),
}


def find_map_size(info: TensorInfo) -> Grid | None:
    """Rows and columns of a tensor's pixels or patches; None if it has other axes than these and channels."""
    axes = (info.layout or "").replace("N", "").replace("C", "")
    if info.entries_per_row > 1 or not info.has_axis("C"):
        return None
    if axes == "T" and info.grid_size is not None and prod(info.grid_size) == info.size("T") - info.prefix:
        return info.grid_size
    return (info.size("H"), info.size("W")) if axes == "HW" else None


def describe_grid(info: TensorInfo, grid: Grid | None) -> TensorInfo:
    """A tensor averaged to a grid as a catalog would describe it."""
    if grid is None:
        return info
    return replace(info, shape=(1, info.size("C"), *grid), layout="NCHW", row_axis=0, prefix=0, grid_size=None)


def average_to_grid(rows: RowTensor, grid: Grid) -> RowTensor:
    """Average pixels or patches, without prefix tokens, to (N, C, rows, columns), as torch's adaptive_avg_pool2d."""
    flat = to_floating(rows.positions(rows.info.prefix))
    maps = flat.reshape(*flat.shape[:2], *(find_map_size(rows.info) or grid))
    return replace(rows, value=adaptive_avg_pool2d(maps, grid), info=describe_grid(rows.info, grid))
