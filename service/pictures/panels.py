"""How each kind of result is drawn: which numbers form tiles, by its layout.

Each kind is a row of ``KINDS``. Arrays here belong to one input, without a row axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layertap.models.points import Grid, find_grid

Array = NDArray[Any]
Shape = tuple[int, ...]
Drawing = Literal["tiles", "charts", "maps"]
ROLLOUTS = frozenset({"attention_rollout", "gradient_rollout", "relevance"})
HISTOGRAM = "histogram["  # prefix of the names of a histogram's columns
GRADIENTS = frozenset({"grad_output", "grad_input", "attention_grad"})


@dataclass(frozen=True, kw_only=True)
class ResultInfo:
    """The properties that determine a result's drawing."""

    name: str
    module: str
    site: str
    shape: Shape
    row_axis: int | None = 0  # the axis of rows in ``shape``; None: there is none
    layout: str | None = None
    prefix_tokens: int = 0  # tokens or attention keys before the patches
    whole: bool = True  # no tokens, queries, keys or heads were selected, and nothing is pooled
    columns: tuple[str, ...] | None = None  # names of statistics
    channels: tuple[int, ...] | None = None
    captions: tuple[str, ...] = ()  # of the rows
    input_indexes: tuple[int, ...] = ()  # in the request; each input may have several rows, such as windows
    grid_size: Grid | None = None  # rows and columns of patches, if known
    method: str = ""  # of the explanation whose map it is

    @property
    def rows(self) -> int:
        """The number of rows; 1 if all inputs share one result."""
        return 1 if self.row_axis is None else self.shape[self.row_axis]

    @property
    def row_shape(self) -> Shape:
        """The shape of one input's result."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.row_axis)

    @property
    def is_signed(self) -> bool:
        """Whether its numbers are on both sides of zero by nature."""
        return self.site in GRADIENTS and not self.method

    @property
    def parts(self) -> int:
        """The number of rows for each input."""
        return max(self.rows // len(self.input_indexes), 1) if self.input_indexes else 1

    def find_input(self, row: int) -> int:
        """The index in the request of a row's input."""
        return self.input_indexes[row // self.parts] if row // self.parts < len(self.input_indexes) else row

    def name_row(self, row: int) -> str:
        """The input of a row, and its part of the input; empty if there is only one row."""
        if self.rows == 1:
            return ""
        of_part = f", part {row % self.parts}" if self.parts > 1 else ""
        return f"input {self.find_input(row)}{of_part}"

    @property
    def is_share(self) -> bool:
        """Whether its numbers are shares of attention, which are never zero."""
        return self.method in ROLLOUTS or self.site == "attention"

    def split(self, array: Array) -> list[Array]:
        """The result of each input in the array; views."""
        return [array] if self.row_axis is None else list(np.moveaxis(array, self.row_axis, 0))


def is_over_pictures(info: ResultInfo) -> bool:
    """Whether tiles are grids of patches of the inputs' pictures, which can be drawn over these.

    The model must give the grid size: a square number of tokens may not be a grid.
    """
    return (
        _is_attention(info)
        and info.parts == 1
        and info.grid_size is not None
        and _find_attention_grid(info) is not None
    )


def _find_grid(info: ResultInfo, tokens: int) -> Grid | None:
    """The grid of the patches among some tokens; None if there are fewer than two."""
    patches = tokens - info.prefix_tokens
    return find_grid(patches, info.grid_size) if patches > 1 else None


def _is_map(info: ResultInfo) -> bool:
    return info.whole and info.layout in ("NCHW", "NHWC") and len(info.row_shape) == 3


def _measure_map(info: ResultInfo) -> tuple[int, int, int]:
    first, second, third = info.row_shape
    return (first, second, third) if info.layout == "NCHW" else (third, first, second)


def _cut_map(info: ResultInfo, array: Array) -> Array:
    return array if info.layout == "NCHW" else np.moveaxis(array, -1, 0)


def _is_grid(info: ResultInfo) -> bool:
    is_tokens = info.whole and info.layout == "NTC" and len(info.row_shape) == 2
    return is_tokens and _find_grid(info, info.row_shape[0]) is not None


def _measure_grid(info: ResultInfo) -> tuple[int, int, int]:
    return info.row_shape[1], *(_find_grid(info, info.row_shape[0]) or (1, 1))


def _cut_grid(info: ResultInfo, array: Array) -> Array:
    return array[info.prefix_tokens :].T.reshape(_measure_grid(info))


def _is_attention(info: ResultInfo) -> bool:
    return info.layout == "NAQK" and len(info.row_shape) == 3


def _find_attention_grid(info: ResultInfo) -> Grid | None:
    _, queries, keys = info.row_shape
    return _find_grid(info, keys) if info.whole and queries == keys else None


def _measure_attention(info: ResultInfo) -> tuple[int, int, int]:
    heads, queries, keys = info.row_shape
    return heads, *(_find_attention_grid(info) or (queries, keys))


def _cut_attention(info: ResultInfo, array: Array) -> Array:
    """The first token's attention over the patches; without a prefix, the average over all tokens."""
    if _find_attention_grid(info) is None:
        return array
    weights = array[:, 0] if info.prefix_tokens else array.astype(np.float32).mean(1)
    return weights[:, info.prefix_tokens :].reshape(_measure_attention(info))


def _measure_matrix(info: ResultInfo) -> tuple[int, int, int]:
    """One tile: the last axis from left to right."""
    *leading, last = info.row_shape
    return 1, prod(leading), last


def _cut_matrix(info: ResultInfo, array: Array) -> Array:
    return array.reshape(_measure_matrix(info))


def _cut_explanation(info: ResultInfo, array: Array) -> Array:
    """An explanation's map; channels are summed."""
    return (array.sum(0) if array.ndim == 3 else array)[None]


@dataclass(frozen=True)
class Kind:
    """A kind of drawing: whether it ``fits``, the number, height and width of tiles, and how to cut them."""

    fits: Callable[[ResultInfo], bool]
    drawing: Drawing = "tiles"
    measure: Callable[[ResultInfo], tuple[int, int, int]] = _measure_matrix
    cut: Callable[[ResultInfo, Array], Array] = _cut_matrix
    noun: str = ""


def _is_chart(info: ResultInfo) -> bool:
    """Whether it is statistics, or has only one axis longer than 1."""
    shape = info.row_shape
    if info.columns is not None and len(shape) == 2:  # histograms of channels form a table of channels and bins
        return not all(name.startswith(HISTOGRAM) for name in info.columns)
    return info.columns is not None or prod(shape) == max(shape, default=1)


KINDS = (
    Kind(lambda info: bool(info.method) and len(info.row_shape) in (2, 3), "maps", cut=_cut_explanation),
    Kind(_is_chart, "charts"),
    Kind(_is_map, "tiles", _measure_map, _cut_map, "channels"),
    Kind(_is_grid, "tiles", _measure_grid, _cut_grid, "channels"),
    Kind(_is_attention, "tiles", _measure_attention, _cut_attention, "heads"),
    Kind(lambda info: True),  # whatever else has several axes
)


def find_kind(info: ResultInfo) -> Kind:
    """The kind of drawing of a result."""
    return next(kind for kind in KINDS if kind.fits(info))
