"""Statistics of each row of a tensor, in place of the tensor: a function and a row of a table each; needs no torch.

A function gets floating (rows, values of each row, at least one), gives (rows,) or (rows, columns), and uses what a
tensor itself offers. All but the histogram are over all values of the row, so that one NaN shows in each of them. Sums
and squares are made in the dtype that is given: of float32 values above 1e19 ``l2`` and ``std`` may be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BINS = 16


@dataclass(frozen=True)
class Statistic:
    """A statistic; ``bins``: how many columns it has, None for one without a number."""

    compute: Callable[[Tensor], Tensor]
    bins: int | None = None


def list_columns(stats: Iterable[str]) -> tuple[str, ...]:
    """The name of each column of some statistics: a statistic's own, ``histogram[0]`` and so on for bins."""
    return tuple(column for name in stats for column in _list_columns(name, STATISTICS[name].bins))


def _list_columns(name: str, bins: int | None) -> list[str]:
    return [name] if bins is None else [f"{name}[{place}]" for place in range(bins)]


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
    length: Tensor = values.norm(dim=-1)
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
    from torch import stack  # here: whoever only reads the table needs no torch

    other = ~values.isfinite()
    # Halves: the difference of two large numbers may be beyond the largest number.
    low = values.masked_fill(other, inf).amin(-1, keepdim=True) / 2
    width = values.masked_fill(other, -inf).amax(-1, keepdim=True) / 2 - low
    places = ((values / 2 - low) / width).nan_to_num_(0.0).mul_(BINS).clamp_(max=BINS - 1)
    places = places.masked_fill_(other, BINS).byte()
    return stack([(places == place).sum(-1) for place in range(BINS)], dim=-1)


STATISTICS = {
    "mean": Statistic(_mean),
    "std": Statistic(_std),
    "min": Statistic(_min),
    "max": Statistic(_max),
    "l2": Statistic(_l2),
    "zeros": Statistic(_zeros),
    "nonfinite": Statistic(_nonfinite),
    "histogram": Statistic(_histogram, bins=BINS),
}
STATS = tuple(STATISTICS)
