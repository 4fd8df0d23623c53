"""Poolings, which turn each row of a captured tensor into a vector: a function and an entry of a table for each.

A function gets the rows and the number of prefix tokens to leave out, and calls only tensor methods. ``mean``, ``max``
and ``gem`` reduce every axis but rows and channels to (N, C); ``mean_all`` is ``mean`` with prefix tokens.
``cls`` is the first token as (N, C), ``last`` the last token that is no padding. ``flatten`` is (N, everything else).
``none`` keeps the tensor as the hook saw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from layertap.models.catalog.row_tensor import RowTensor, to_floating
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
