"""What a result looks like: which of its numbers stand beside each other in tiles, by its layout.

A kind of result is a row of ``KINDS``. Arrays here are of one input, without an axis of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layertap.models.inputs.geometry import Grid, find_grid

Array = NDArray[Any]
Shape = tuple[int, ...]
Drawing = Literal["tiles", "charts", "maps"]
ROLLOUTS = frozenset({"attention_rollout", "gradient_rollout", "relevance"})
HISTOGRAM = "histogram["  # how the names of a histogram's columns begin
GRADIENTS = frozenset({"grad_output", "grad_input", "attention_grad"})


@dataclass(frozen=True, kw_only=True)
class ResultInfo:
    """What decides how a result is drawn; ``shape`` has the rows on ``row_axis``, None where there are none.

    ``prefix_tokens`` stand before the patches of tokens or of attention, ``grid_size`` are the rows and columns of
    these patches where the model tells. ``whole``: no tokens, queries, keys or heads were chosen, and nothing is
    pooled. ``columns`` names those of statistics, ``channels`` the numbers of channels; ``captions`` say something of
    each row, ``places`` are those of the inputs in the request, of each of which there may be several rows, such as
    windows.
    ``method``: the result is the map of an explanation.
    """

    name: str
    module: str
    site: str
    shape: Shape
    row_axis: int | None = 0
    layout: str | None = None
    prefix_tokens: int = 0
    whole: bool = True
    columns: tuple[str, ...] | None = None
    channels: tuple[int, ...] | None = None
    captions: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    grid_size: Grid | None = None
    method: str = ""

    @property
    def rows(self) -> int:
        """How many inputs it has something of; 1 where it is of all together."""
        return 1 if self.row_axis is None else self.shape[self.row_axis]

    @property
    def row_shape(self) -> Shape:
        """The shape of what one input has."""
        return tuple(size for axis, size in enumerate(self.shape) if axis != self.row_axis)

    @property
    def is_signed(self) -> bool:
        """Whether its numbers lie on both sides of zero by nature."""
        return self.site in GRADIENTS and not self.method

    @property
    def parts(self) -> int:
        """How many rows there are of each input."""
        return max(self.rows // len(self.places), 1) if self.places else 1

    def find_place(self, row: int) -> int:
        """Which input of the request a row is of."""
        return self.places[row // self.parts] if row // self.parts < len(self.places) else row

    def name_row(self, row: int) -> str:
        """Which input a row is of, and which part of it; nothing where there is one alone."""
        if self.rows == 1:
            return ""
        of_part = f", part {row % self.parts}" if self.parts > 1 else ""
        return f"input {self.find_place(row)}{of_part}"

    @property
    def is_share(self) -> bool:
        """Whether its numbers are shares of attention, of which none is nothing."""
        return self.method in ROLLOUTS or self.site == "attention"

    def split(self, array: Array) -> list[Array]:
        """What each input has of the result's array; views."""
        return [array] if self.row_axis is None else list(np.moveaxis(array, self.row_axis, 0))


def is_over_pictures(info: ResultInfo) -> bool:
    """Whether tiles are grids of the patches of the inputs' pictures, so that they may be laid over these.

    The model must tell how patches stand: as many tokens as make a square may be anything.
    """
    return (
        _is_attention(info)
        and info.parts == 1
        and info.grid_size is not None
        and _find_attention_grid(info) is not None
    )


def _find_grid(info: ResultInfo, tokens: int) -> Grid | None:
    """How the patches among some tokens stand; None where there are no several."""
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
    """What the first token attends to, or all on average where there is no prefix, over the patches."""
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
    """A map; of one with a number for each channel their sum."""
    return (array.sum(0) if array.ndim == 3 else array)[None]


@dataclass(frozen=True)
class Kind:
    """One kind: whether it ``fits``, how many tiles of which height and width there are, and how to cut them."""

    fits: Callable[[ResultInfo], bool]
    drawing: Drawing = "tiles"
    measure: Callable[[ResultInfo], tuple[int, int, int]] = _measure_matrix
    cut: Callable[[ResultInfo, Array], Array] = _cut_matrix
    noun: str = ""


def _is_chart(info: ResultInfo) -> bool:
    """Whether it is statistics, or has one axis that is longer than 1."""
    shape = info.row_shape
    if info.columns is not None and len(shape) == 2:  # histograms of channels are a table of channels and bins
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
    """How a result is drawn."""
    return next(kind for kind in KINDS if kind.fits(info))
