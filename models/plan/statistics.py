"""Statistics of each row of a tensor, returned instead of it: a function and an entry of a table for each.

A function gets floats (rows, values), at least one value a row, returns (rows,) or (rows, columns), and calls only
tensor methods. All but the histogram use all values of the row, so that one NaN shows in each of them. Sums and squares
are computed in the input's dtype: for float32 values above 1e19 ``l2`` and ``std`` may be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.models.plan.requested import Combine

BINS = 16
MAX_EDGES = 1025
Numbers = NDArray[np.float64]
Rows = NDArray[np.float32]
Merge = Callable[[Numbers, Numbers, Numbers], Numbers]


@dataclass(frozen=True)
class Statistic:
    """A statistic; ``merge`` makes that of all rows from each row's (axis 0), its mean and its number of values."""

    compute: Callable[[Tensor], Tensor]
    merge: Merge | None  # None: these are not enough
    bins: int | None = None  # numbered columns; None: one column without a number
    in_all: bool = True  # ``true`` stands for it too; for new ones False: callers count the columns


def get_statistic(name: str, edges: Sequence[float] | None = None, keys: int | None = None) -> Statistic:
    """A statistic by name; ``edges``: the edges of the histogram's bins; a histogram with given edges can be merged.

    ``keys``: how many consecutive values are the attention weights of one query; None: all.
    """
    if name == "entropy":
        return replace(STATISTICS[name], compute=partial(_entropy, keys=keys))
    if name != "histogram" or edges is None:
        return STATISTICS[name]
    return Statistic(partial(_count_between, edges=edges), _merge_sum, bins=len(edges) - 1)


def list_columns(stats: Iterable[str], edges: Sequence[float] | None = None) -> tuple[str, ...]:
    """The column names of some statistics: the statistic's name, or ``histogram[0]`` and so on for bins."""
    columns: list[str] = []
    for name in stats:
        bins = get_statistic(name, edges).bins
        columns += [name] if bins is None else [f"{name}[{number}]" for number in range(bins)]
    return tuple(columns)


def _entropy(values: Tensor, keys: int | None = None) -> Tensor:
    """Attention entropy over keys, in nats, averaged over queries; NaN if a query's weights are all 0.

    Each query's weights are scaled to sum to 1: with sinks, selected keys or interventions they do not.
    """
    weights = values.reshape(*values.shape[:-1], -1, keys or values.shape[-1])
    weights = weights / weights.sum(-1, keepdim=True)
    entropy: Tensor = -torch.xlogy(weights, weights).sum(-1).mean(-1)
    return entropy


def _histogram(values: Tensor) -> Tensor:
    """Counts of the finite values in equal bins from their minimum to their maximum, the last closed on both sides.

    If all are equal they are in the first bin.
    """
    other = ~values.isfinite()
    # Halved, because the difference of two large numbers may overflow.
    low = values.masked_fill(other, inf).amin(-1, keepdim=True) / 2
    width = values.masked_fill(other, -inf).amax(-1, keepdim=True) / 2 - low
    bins = ((values / 2 - low) / width).nan_to_num_(0.0).mul_(BINS).clamp_(max=BINS - 1)
    bins = bins.masked_fill_(other, BINS).byte()
    return torch.stack([(bins == number).sum(-1) for number in range(BINS)], dim=-1)


def _count_between(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Counts of the values in bins between ``edges``, the last closed on both sides; values outside are not counted."""
    limits = torch.tensor(edges, dtype=values.dtype, device=values.device)
    bins = torch.bucketize(values, limits, right=True)
    bins = bins.masked_fill_(values == limits[-1], len(edges) - 1)
    counts = torch.zeros(*values.shape[:-1], len(edges) + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(-1, bins, torch.ones_like(bins))[..., 1:-1]


def merge_rows(
    values: NDArray[np.float32], names: Sequence[str], counts: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Statistics of all rows together, (…, columns), from each row's, (rows, …, columns); ``names``: the columns.

    ``counts`` are proportional to each row's number of values; None if rows have equally many.
    """
    weights = np.ones(len(values)) if counts is None else np.array(counts, np.float64)
    columns = {name: values[..., column].astype(np.float64) for column, name in enumerate(names)}
    merges = {name: STATISTICS[name.partition("[")[0]].merge or _merge_sum for name in names}
    merged = [merge(columns[name], columns.get("mean", columns[name]), weights) for name, merge in merges.items()]
    return np.stack(merged, axis=-1).astype(np.float32)


def combine_rows(rows: Rows, how: Combine) -> Rows:
    """All rows, (N, …), in one: their sum, mean or mean of squares, (…), or the (N, N) dot products of each two."""
    return COMBINATIONS[how](rows).astype(np.float32, copy=False)


COMBINATIONS: Mapping[Combine, Callable[[Rows], NDArray[np.floating[Any]]]] = {
    "sum": lambda rows: rows.sum(0, dtype=np.float64),
    "mean": lambda rows: rows.mean(0, dtype=np.float64),
    "mean_square": lambda rows: np.einsum("n...,n...->...", rows, rows, dtype=np.float64) / len(rows),
    "dot": lambda rows: (flat := rows.reshape(len(rows), -1)) @ flat.T,
}


def _merge_sum(values: Numbers, *_: Numbers) -> Numbers:
    merged: Numbers = values.sum(0)
    return merged


def _merge_mean(values: Numbers, _: Numbers, weights: Numbers) -> Numbers:
    merged: Numbers = np.average(values, axis=0, weights=weights)
    return merged


def _merge_std(values: Numbers, means: Numbers, weights: Numbers) -> Numbers:
    """From the variances within and between rows: a difference of squares would lose digits."""
    between = _merge_mean((means - _merge_mean(means, means, weights)) ** 2, means, weights)
    merged: Numbers = np.sqrt(_merge_mean(values**2, means, weights) + between)
    return merged


STATISTICS = {
    "mean": Statistic(lambda values: values.mean(-1), _merge_mean),
    "std": Statistic(lambda values: values.std(-1, correction=0), _merge_std),  # divided by the number of values
    "min": Statistic(lambda values: values.amin(-1), lambda values, *_: values.min(0)),
    "max": Statistic(lambda values: values.amax(-1), lambda values, *_: values.max(0)),
    "l2": Statistic(lambda values: values.norm(dim=-1), lambda values, *_: np.sqrt((values**2).sum(0))),
    "zeros": Statistic(lambda values: (values == 0).sum(-1) / values.shape[-1], _merge_mean),  # their share, 0 to 1
    "nonfinite": Statistic(lambda values: (~values.isfinite()).sum(-1), _merge_sum),
    "histogram": Statistic(_histogram, None, bins=BINS),
    "entropy": Statistic(_entropy, _merge_mean, in_all=False),
    # The first of several greatest values, among pixels or own tokens in order; exact up to 2**24, as float32 is.
    "argmax": Statistic(lambda values: values.argmax(-1), None, in_all=False),
    "count": Statistic(lambda values: values.new_full(values.shape[:-1], values.shape[-1]), _merge_sum, in_all=False),
}
STATS = tuple(name for name, statistic in STATISTICS.items() if statistic.in_all)
