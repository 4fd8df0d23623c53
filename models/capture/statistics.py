"""Statistics of each row of a tensor, in place of the tensor: computed on its device, a few numbers a row.

All but the histogram are over all values of the row, so that one NaN shows in each of them. Sums and squares are made
in the dtype that is given: of float32 values above 1e19 ``l2`` and ``std`` may be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from layertap.models.selection.hook_points import Stat

BINS = 16


def list_columns(stats: Iterable[Stat]) -> tuple[str, ...]:
    """The name of each column that ``of`` gives: a statistic's own, ``histogram[0]`` and so on for its bins."""
    return tuple(
        column
        for name in stats
        for column in ([f"{name}[{place}]" for place in range(BINS)] if name == "histogram" else [name])
    )


def compute_statistics(values: Tensor, stats: Iterable[Stat]) -> Tensor:
    """Statistics of floating (rows, values of each row, at least one) as float32 (rows, columns)."""
    values = values.contiguous()  # a sum along another axis than the innermost is rounded by how many rows there are
    return torch.cat([STATISTICS[name](values).to(torch.float32).reshape(len(values), -1) for name in stats], dim=1)


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1)


def _std(values: Tensor) -> Tensor:
    """Of the population: divided by the number of values."""
    return values.std(-1, correction=0)


def _min(values: Tensor) -> Tensor:
    return values.amin(-1)


def _max(values: Tensor) -> Tensor:
    return values.amax(-1)


def _l2(values: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return length


def _zeros(values: Tensor) -> Tensor:
    """The share of zeros, 0 to 1."""
    return (values == 0).sum(-1) / values.shape[-1]


def _nonfinite(values: Tensor) -> Tensor:
    """How many are NaN or infinite."""
    return (~values.isfinite()).sum(-1)


def _histogram(values: Tensor) -> Tensor:
    """Counts of the finite values in equal bins from the least to the greatest of them, the last closed on both sides.

    Where they are all equal they are in the first bin.
    """
    other = ~values.isfinite()
    # Halves: the difference of two large numbers may be beyond the largest number.
    low = values.masked_fill(other, torch.inf).amin(-1, keepdim=True) / 2
    width = values.masked_fill(other, -torch.inf).amax(-1, keepdim=True) / 2 - low
    places = ((values / 2 - low) / width).nan_to_num_(0.0).mul_(BINS).clamp_(max=BINS - 1)
    places = places.masked_fill_(other, BINS).to(torch.uint8)
    return torch.stack([(places == place).sum(-1) for place in range(BINS)], dim=-1)


STATISTICS: dict[Stat, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "std": _std,
    "min": _min,
    "max": _max,
    "l2": _l2,
    "zeros": _zeros,
    "nonfinite": _nonfinite,
    "histogram": _histogram,
}
